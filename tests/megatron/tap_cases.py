"""RouterTap on whole models in Megatron's schedules against a brute-force recomputation, run on every rank."""

import zlib
from collections.abc import Callable
from typing import Any

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from parallel_cases import gathered_attention
from tiny_gpt import SEQUENCE
from torch import Tensor

from moe_rl.importance import RouterTap, all_reduce_sum, float32_head, group_like

MICRO_BATCHES = 2


def tensor_and_sequence_parallel() -> dict[str, float]:
    return compared({"tensor": 2})


def pipeline_parallel_with_recomputation() -> dict[str, float]:
    return compared({"pipeline": 2}, **FULL_RECOMPUTE)


def context_parallel_with_partial_replay() -> dict[str, float]:
    return compared(
        {"context": 2}, replay=second_layer_free, spec_of=gathered_attention, position_embedding_type="none"
    )


def interleaved_pipeline_with_recomputation() -> dict[str, float]:
    return compared({"pipeline": 2, "virtual": 2}, num_layers=4, **FULL_RECOMPUTE)


def head_in_float32() -> dict[str, Any]:
    """Logits of Megatron's own head, whose vocabulary is split, for hidden states in bfloat16."""
    with tiny_gpt.parallel(1, tensor=2):
        head = tiny_gpt.gpt_of(tiny_gpt.build().model).output_layer.bfloat16()
        owner = torch.nn.ModuleDict({"output_layer": head})
        hidden = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
        part = hidden.chunk(2)[parallel_state.get_tensor_model_parallel_rank()]  # sequence parallelism gathers it
        rounded, _ = head(part)
        float32_head(owner)
        logits, _ = head(part)
        logits.sum().backward()
        exact = hidden.double() @ head.weight.detach().double().T
        return {
            "types": [str(logits.dtype), str(head.weight.grad.dtype)],
            "difference": float((logits - exact).abs().max()),
            "rounded": float((rounded.double() - exact).abs().max()),
        }


FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def second_layer_free(gpt: Any, routes: Tensor) -> None:
    """Replay every other layer; the rest routes as it likes, otherwise in the update than in the old pass."""
    replay_all(gpt, routes)
    for layer in gpt.decoder.layers:
        if layer.layer_number % 2 == 0:
            layer.mlp.router.router_replay.clear_router_replay_action()


replay_all = tiny_gpt.replay


def compared(layout: dict[str, int], replay: Callable[[Any, Tensor], None] = replay_all, **changes: Any) -> Any:
    """Largest difference of gamma, its smallest value, bytes per token of a router, and tokens of a forward here."""
    tiny_gpt.replay = replay
    try:
        with tiny_gpt.parallel(1, **layout):
            run = tiny_gpt.build(**changes)
            shape = {"num_layers": run.config.num_layers}
            routes = [tiny_gpt.skewed_routes(0, m, **shape) for m in range(MICRO_BATCHES)]
            stages = parallel_state.get_pipeline_model_parallel_group()
            tap = RouterTap(run.models, word=torch.int32, pipeline=group_like(stages))
            rows = SEQUENCE * tiny_gpt.BATCH // parallel_state.get_context_parallel_world_size()
            keys = torch.randperm(MICRO_BATCHES * rows, generator=torch.Generator().manual_seed(3)).view(-1, rows)
            with tap.old_pass(keys.numel()) as old, tap.told(list(keys)):
                tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
            over = all_reduce_sum(parallel_state.get_tensor_model_parallel_group())
            with tap.update_pass(old) as update, tap.told(list(keys)):
                tiny_gpt.forward_backward(run, 0, routes)
            unmoved = min(float(update.finish(each, sum_over_ranks=over).ratio.min()) for each in keys)
            before = every_router(run, routes)
            for model in run.models:
                drift(tiny_gpt.gpt_of(model))
            after = every_router(run, routes)
            with tap.update_pass(old) as update, tap.told(list(keys)):
                tiny_gpt.forward_backward(run, 0, routes)
            with tap.update_pass(old) as again, tap.told(list(keys)):
                tiny_gpt.forward_backward(run, 0, routes)  # no update in between
            # Of the last stage alone: the sums of the others have travelled.
            part = parallel_state.get_tensor_model_parallel_rank() if run.config.sequence_parallel else 0
            found = [update.finish(each, floor=0.0, sum_over_ranks=over).ratio for each in keys]
            same = [again.finish(each, floor=0.0, sum_over_ranks=over).ratio for each in keys]
            expected = [by_brute_force(before, after, m, all_reduce_sum(stages)) for m in range(MICRO_BATCHES)]
            mine = [each.view(-1, len(expected[0]))[part] for each in found]
            last = parallel_state.is_pipeline_last_stage()
            return {
                "last": float(last),
                "unmoved": unmoved,
                "difference": max(float((a - b).abs().max()) for a, b in zip(mine, expected, strict=True)),
                "repeated": max(float((a - b).abs().max()) for a, b in zip(same, found, strict=True)),
                "largest": max(float(b.max()) for b in expected),
                "bytes": old.num_bytes / ((keys.numel() + 1) * len(tap)),
            }
    finally:
        tiny_gpt.replay = replay_all


def every_router(run: tiny_gpt.Run, routes: list[Tensor]) -> list[list[tuple[Tensor, Tensor]]]:
    """For each router of this rank and each micro-batch: all log-probabilities in float64, and the used experts."""
    routers = [layer.mlp.router for model in run.models for layer in tiny_gpt.gpt_of(model).decoder.layers]
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in routers]

    def kept(number: int) -> Callable[[Any, tuple[Tensor, ...], tuple[Tensor, Tensor]], None]:
        def keep(router: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
            rows = args[0].detach().flatten(0, 1).double()
            found[number].append(((rows @ router.weight.detach().double().T).log_softmax(dim=1), output[1].double()))

        return keep

    handles = [router.register_forward_hook(kept(number)) for number, router in enumerate(routers)]
    tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
    for handle in handles:
        handle.remove()
    return found


def by_brute_force(
    before: list[list[tuple[Tensor, Tensor]]],
    after: list[list[tuple[Tensor, Tensor]]],
    micro_batch: int,
    stages: Callable[[Tensor], Tensor],
) -> Tensor:
    """exp(-mean |delta|) over the layers of all stages and the experts of the old pass."""
    total, count = torch.zeros(()), torch.zeros(())
    for old, new in zip(before, after, strict=True):
        (log_probs, used), (moved, _) = old[micro_batch], new[micro_batch]
        total = total + ((moved - log_probs).abs() * used).sum(dim=1)
        count = count + used.sum(dim=1)
    return torch.exp(-stages(total) / stages(count))


def drift(gpt: Any) -> None:
    """An update of every weight, the same on every rank that holds it."""
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    dist.barrier()
