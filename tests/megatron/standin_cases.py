"""Cases of test_standins.py: the stand-ins of TransformerEngine and DeepEP keep the contracts of their pages."""

import standins  # noqa: F401, I001 - before Megatron

import itertools
import re
from collections.abc import Callable
from typing import Any

import deep_ep
import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.transformer.moe import fused_a2a
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch import permutation
from transformer_engine.pytorch.fp8 import quantized
from transformer_engine.pytorch.optimizers import FusedAdam

NUM_TOKENS, WIDTH = 12, 8
SPLITS = [5, 0, 7]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def refused(kind: type[Exception], message: str, action: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        action()


def routed(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """[N, E] bool, an expert without tokens where there are more than K."""
    usable = max(top_k, num_experts - 1)
    chosen = random(num_tokens, usable, seed=num_tokens).topk(top_k, dim=1).indices
    return torch.zeros((num_tokens, num_experts), dtype=torch.bool).scatter(1, chosen, True)


def megatron_finds_them() -> None:
    """It imports by name what releases rename: one name missing, and it builds its classes on a `MagicMock` instead."""
    assert megatron_te.HAVE_TE
    assert fused_a2a.HAVE_DEEP_EP
    assert fused_a2a.HAVE_HYBRIDEP


def rows_stand_expert_by_expert_and_come_back_weighted() -> None:
    for num_tokens, num_experts, top_k in ((0, 4, 2), (1, 4, 4), (13, 6, 3), (9, 1, 1)):
        routing_map = routed(num_tokens, num_experts, top_k)
        tokens = random(num_tokens, 5, seed=1).requires_grad_()
        probs, count = random(num_tokens, num_experts, seed=2), num_tokens * top_k
        rows, row_probs, row_map = permutation.moe_permute_with_probs(tokens, probs, routing_map, count)
        expected = [(e, n) for e in range(num_experts) for n in range(num_tokens) if routing_map[n, e]]
        assert torch.equal(rows, tokens[[n for _, n in expected]])
        assert row_probs.tolist() == [float(probs[n, e]) for e, n in expected]
        alone, same_map = permutation.moe_permute(tokens, routing_map, count)
        assert torch.equal(alone, rows)
        assert torch.equal(same_map, row_map)
        summed = permutation.moe_unpermute(rows, row_map, restore_shape=tokens.shape)
        torch.testing.assert_close(summed, tokens * top_k)
        merged = permutation.moe_unpermute(rows, row_map, merging_probs=probs, restore_shape=tokens.shape)
        torch.testing.assert_close(merged, tokens * (probs * routing_map).sum(dim=1, keepdim=True))
        if num_tokens:
            (gradient,) = torch.autograd.grad(merged.sum(), tokens)
            torch.testing.assert_close(gradient, (probs * routing_map).sum(dim=1, keepdim=True).expand_as(tokens))


def chunks_are_sorted_with_their_probabilities() -> None:
    rows, sizes, index = torch.arange(6.0)[:, None], torch.tensor([2, 0, 3, 1]), torch.tensor([3, 2, 1, 0])
    expected = [5.0, 2.0, 3.0, 4.0, 0.0, 1.0]
    assert permutation.moe_sort_chunks_by_index(rows, sizes, index).flatten().tolist() == expected
    moved, probs = permutation.moe_sort_chunks_by_index_with_probs(rows, rows.flatten() / 10, sizes, index)
    assert torch.equal(moved.flatten() / 10, probs)


def a_map_that_would_leave_garbage_is_refused() -> None:
    routing_map, rows = routed(4, 4, 2), torch.zeros(4, 3)
    wrong = "num_out_tokens is 7, the map has 8 rows"
    refused(AssertionError, wrong, lambda: permutation.moe_permute(rows, routing_map, 7))
    refused(AssertionError, "not the map", lambda: permutation.moe_unpermute(torch.zeros(8, 3), torch.arange(8)))
    refused(NotImplementedError, "index", lambda: permutation.moe_permute(rows, routing_map, 8, map_type="index"))


def grouped(**options: Any) -> te.GroupedLinear:
    torch.manual_seed(5)
    return te.GroupedLinear(3, WIDTH, 16, bias=options.pop("bias", False), **options)


def weights(linear: te.GroupedLinear) -> list[torch.nn.Parameter]:
    return [p for name, p in linear.named_parameters() if name.startswith("weight")]


def a_grouped_linear_is_one_linear_per_split() -> None:
    for bias in (False, True):
        linear, rows = grouped(bias=bias), random(12, WIDTH).requires_grad_()
        out = linear(rows, SPLITS)
        pieces = zip(rows.split(SPLITS), weights(linear), strict=True)
        expected = torch.cat([piece @ weight.t() for piece, weight in pieces])
        torch.testing.assert_close(out, expected)  # the biases are zero at first
        wanted = torch.autograd.grad(expected.square().sum(), [rows, *weights(linear)], allow_unused=True)
        out.square().sum().backward()
        for parameter, gradient in zip([rows, *weights(linear)], wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    with_bias = grouped(bias=True, return_bias=True)
    assert [len(b) for b in with_bias(random(12, WIDTH), SPLITS)[1]] == [16] * 3
    linear = grouped()
    refused(AssertionError, "Number of splits", lambda: linear(random(12, WIDTH), [5, 7]))
    refused(AssertionError, "host ints", lambda: linear(random(12, WIDTH), list(torch.tensor(SPLITS))))
    assert all(p.is_meta for p in grouped(device="meta").parameters())
    refused(NotImplementedError, "tensor parallelism", lambda: grouped(tp_size=2))


def fused_gradients_go_to_main_grad_and_megatron_is_told() -> None:
    plain, rows, first = grouped(), random(12, WIDTH), 100.0
    plain(rows, SPLITS).square().sum().backward()
    gradients = [p.grad for p in weights(plain)]
    for dtype in (torch.float32, torch.bfloat16):
        linear = grouped(fuse_wgrad_accumulation=True)
        marked, unmarked, zeroed = weights(linear)
        for weight in weights(linear):
            weight.main_grad = torch.full_like(weight, first, dtype=dtype)
        marked.grad_added_to_main_grad = zeroed.grad_added_to_main_grad = False
        zeroed.zero_out_wgrad = True
        for is_first, base in ((True, 0.0), (None, 0.0), (False, 0.0)):
            for weight in weights(linear):
                weight.grad = None
                if not is_first:
                    weight.main_grad.fill_(base := 1.0)
            linear(rows, SPLITS, is_first_microbatch=is_first).square().sum().backward()
            for weight, gradient in zip(weights(linear), gradients, strict=True):
                assert torch.equal(weight.main_grad, (base + gradient.to(dtype)).to(dtype)), is_first
            assert marked.grad_added_to_main_grad
            assert marked.grad.isnan().all()
            assert unmarked.grad is None
            assert zeroed.grad_added_to_main_grad
            assert not zeroed.grad.any()


def gradients_can_wait_for_backward_dw() -> None:
    plain, linear, rows, called = grouped(), grouped(delay_wgrad_compute=True), random(12, WIDTH), []
    linear.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    assert all(weight.skip_backward_post_hook for weight in weights(linear))
    for scale in (1.0, 2.0):
        for module in (plain, linear):
            (scale * module(rows, SPLITS)).square().sum().backward()
    assert all(weight.grad is None for weight in weights(linear))
    for _ in range(3):
        linear.backward_dw()
    assert called == [1, 1]
    for delayed, weight in zip(weights(linear), weights(plain), strict=True):
        torch.testing.assert_close(delayed.grad, weight.grad)


def fp8_codes_of_weights_last_from_the_first_micro_batch_on() -> None:
    linear, rows, splits = grouped(), random(32, WIDTH), [16, 0, 16]

    def out(first: bool | None) -> torch.Tensor:
        with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
            return linear(rows, splits, is_first_microbatch=first)

    before = out(True)
    with torch.no_grad():
        linear.weight2.mul_(3.0)
    assert torch.equal(out(False), before), "codes were made anew"
    assert not torch.equal(out(None), before)
    assert torch.equal(out(False), before), "what None made was kept"
    assert torch.equal(out(True)[16:], out(None)[16:])
    with torch.no_grad():
        assert not torch.equal(linear(rows, splits), before), "FP8 lasts beyond its context"
    with te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
        refused(AssertionError, "multiples of 16 rows", lambda: linear(rows, [15, 1, 16]))
    for recipe in (DelayedScaling, Float8CurrentScaling):
        refused(NotImplementedError, recipe.__name__, recipe)
    padding, unpadding = te.Fp8Padding(3), te.Fp8Unpadding(3)
    padded, counts = padding(random(12, WIDTH), SPLITS)
    assert counts == [16, 0, 16]
    assert not padded[5:16].any()
    assert torch.equal(unpadding(padded, SPLITS), random(12, WIDTH))


def fp8_errors_are_those_of_the_mantissa() -> None:
    """A code of e4m3 is off by 2^-4 of the number at most, one of e5m2 by 2^-3, or by half its smallest step."""
    formats = ((torch.float8_e4m3fn, 2.0**-4, 2.0**-10), (torch.float8_e5m2, 2.0**-3, 2.0**-17))
    for block, (number, unit, half_step) in itertools.product(((1, 128), (128, 128), (128, 1)), formats):
        matrix = random(130, 200) * torch.logspace(-3, 3, 200)
        error = (quantized(matrix, block, number) - matrix).abs()
        rows, columns = (torch.arange(n) // b for n, b in zip(matrix.shape, block, strict=True))
        cell = rows[:, None] * 1000 + columns[None]
        largest = torch.stack([matrix[cell == c].abs().max() for c in cell.unique()])
        at = torch.searchsorted(cell.unique(), cell)
        # The scale is a power of two, so that the largest number may lie at half of the format's.
        step = largest[at] / (torch.finfo(number).max / 2) * half_step
        assert (error <= torch.maximum(matrix.abs() * unit, step)).all()
    assert not quantized(torch.zeros(3, 5), (1, 128)).any()
    assert quantized(torch.zeros(0, 5), (1, 128)).shape == (0, 5)


def tokens_of_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, their choices [N, 2] among four experts on two ranks (-1: none), and weights; rank 1 has two rows more."""
    count = 3 + 2 * rank
    x = random(count, WIDTH, seed=rank).bfloat16()
    choices = torch.tensor([[0, 3], [1, 0], [2, 3], [-1, 1], [-1, -1]])[:count]
    return x, choices, random(count, 2, seed=rank + 5).abs()


def deepep_sends_every_token_once_to_a_rank_and_sums_what_comes_back() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    buffer = deep_ep.Buffer(group)
    x, choices, probs = tokens_of_rank(rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(choices, 4)
    assert per_expert.tolist() == [int((choices == e).sum()) for e in range(4)]
    assert per_rank.tolist() == [int(((choices // 2) == r).any(dim=1).sum()) for r in range(2)]
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    got, local, weights, counts, handle, _ = buffer.dispatch(x, topk_idx=choices, topk_weights=probs, **layout)
    everyone = [tokens_of_rank(r) for r in range(2)]
    wanted = [(t, c, p) for rows in everyone for t, c, p in zip(*rows, strict=True) if ((c // 2) == rank).any()]
    assert torch.equal(got, torch.stack([t for t, _, _ in wanted]))
    for token_choices, token_weights, (_, chosen, p) in zip(local, weights, wanted, strict=True):
        here = (chosen // 2) == rank
        assert token_choices.tolist() == torch.where(here, chosen - 2 * rank, -1).tolist()
        assert token_weights.tolist() == torch.where(here, p, 0.0).tolist()
    assert counts == [int((local == e).sum()) for e in range(2)]
    combined, back, _ = buffer.combine(got, handle, topk_weights=weights)
    ranks_of_token = in_rank.sum(dim=1, keepdim=True)
    assert torch.equal(combined, (x.float() * ranks_of_token).bfloat16())
    assert torch.equal(back, probs.where(choices >= 0, 0.0))
    assert torch.equal(buffer.dispatch(x, handle=handle)[0], got)
    refused(AssertionError, "bfloat16", lambda: buffer.combine(got.float(), handle))
    with deep_ep.any_float():
        buffer.combine(got.float(), handle)
    refused(AssertionError, "rows with a handle", lambda: buffer.combine(got[1:], handle))
    refused(AssertionError, "handle alone", lambda: buffer.dispatch(x, handle=handle, topk_idx=choices))
    other = deep_ep.Buffer(dist.new_group([0, 1]))
    refused(AssertionError, "another group", lambda: other.combine(got, handle))
    refused(AssertionError, "even", lambda: deep_ep.Buffer.set_num_sms(3))


def hybridep_permutes_and_says_when_its_buffer_was_too_small() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    buffer = deep_ep.HybridEPBuffer(group, WIDTH, max_num_of_tokens_per_rank=5, num_local_experts=2)
    x, choices, weights = tokens_of_rank(rank)
    routing_map = torch.zeros(len(x), 5, dtype=torch.bool).scatter(1, choices.where(choices >= 0, 4), True)[:, :4]
    probs = torch.zeros(len(x), 5).scatter(1, choices.where(choices >= 0, 4), weights)[:, :4] * routing_map
    for pad in (None, 4):
        given = {"hidden": x, "routing_map": routing_map, "probs": probs, "num_of_experts_per_rank": 2}
        rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(**given, pad_multiple=pad)
        everyone = [tokens_of_rank(r) for r in range(2)]
        start = 0
        for expert, count in enumerate(counts.tolist()):
            wanted = [t for rows_of in everyone for t, c, _ in zip(*rows_of, strict=True) if 2 * rank + expert in c]
            assert count == -(-len(wanted) // (pad or 1)) * (pad or 1)
            assert torch.equal(rows[start : start + len(wanted)], torch.stack(wanted))
            assert not rows[start + len(wanted) : start + count].any()
            start += count
        combined, back = buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle)
        times = (routing_map[:, :2].sum(1), routing_map[:, 2:].sum(1))
        per_rank = [(x.float() * t[:, None]).bfloat16().float() for t in times]
        assert torch.equal(combined, (per_rank[0] + per_rank[1]).bfloat16())
        assert torch.equal(back, probs)
        assert torch.equal(buffer.dispatch_with_permute(hidden=x, handle=handle)[0], rows)
    assert buffer.reallocations == 0
    wider = torch.nn.functional.pad(routing_map.view(-1, 2, 2), (0, 1)).reshape(len(x), 6)
    given = {"routing_map": wider, "probs": wider.float(), "num_of_experts_per_rank": 3}
    buffer.dispatch_with_permute(hidden=x, **given)
    assert buffer.reallocations == 1


def fused_adam_steps_as_torchs_adam() -> None:
    options = {"lr": 3e-3, "weight_decay": 0.01}
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
    narrow = torch.nn.Parameter(torch.ones(64))
    optimizers = FusedAdam([ours], **options), torch.optim.AdamW([theirs], **options)
    in_bf16 = FusedAdam([narrow], **options, exp_avg_dtype=torch.bfloat16)
    for step in range(5):
        ours.grad = theirs.grad = narrow.grad = random(64, seed=step)
        for optimizer in (*optimizers, in_bf16):
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    assert optimizers[0].param_groups[0]["step"] == 5
    assert [in_bf16.state[narrow][name].dtype for name in ("exp_avg", "exp_avg_sq")] == [torch.bfloat16, torch.float32]


def a_bf16_parameter_and_its_remainder_are_the_float32_master() -> None:
    options = {"lr": 3e-3, "weight_decay": 0.01}
    for remainders in (False, True):
        wide = torch.nn.Parameter(random(512).bfloat16().float())
        narrow = torch.nn.Parameter(wide.detach().bfloat16())
        reference = FusedAdam([wide], **options)
        optimizer = FusedAdam(
            [narrow], **options, master_weights=True, use_decoupled_grad=True, store_param_remainders=remainders
        )
        for step in range(5):
            wide.grad = narrow.decoupled_grad = random(512, seed=step)
            reference.step()
            optimizer.step()
            assert torch.equal(optimizer._master(narrow), wide)
        kept = optimizer.state[narrow]["master_param"]
        assert kept.dtype == (torch.int16 if remainders else torch.float32)
        torch.testing.assert_close(narrow.float(), wide, rtol=2.0**-8, atol=0)
