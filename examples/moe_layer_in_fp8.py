"""An MoE layer whose permutation and expert MLP are moe_rl's kernels: errors in bf16 and FP8, by hand, and with EP.

    python examples/moe_layer_in_fp8.py                # on a GPU our kernels, on a CPU the reference in plain torch
    python examples/moe_layer_in_fp8.py --interpret    # on a CPU our kernels, in Triton's interpreter
    torchrun --standalone --nproc-per-node 2 examples/moe_layer_in_fp8.py    # EP2 over gloo, on a CPU
    torchrun --standalone --nproc-per-node 8 examples/moe_layer_in_fp8.py --top-k 8 --experts 16    # EP8

Options set the sizes. Experts of two models, each a CPU minute with the reference:

    --tokens 128 --top-k 8 --experts 16 --hidden 2048 --intermediate 768    # Qwen3-30B-A3B, a rank of EP8
    --tokens 64 --experts 2 --hidden 7168 --intermediate 2048               # DeepSeek-V3, two experts

The first two compare y and all gradients with plain torch in float32, and a chain of single operators with
`GroupedExperts`, bit for bit. The others compare every rank of EP with one process that has all experts, bit for bit.
The last line says what held. If an error exceeds the bound that follows from the roundings of its recipe (`bounds`),
or a bit differs, the exit code is 1. Needs torch; `--interpret` also needs triton.
"""

import argparse
import math
import os
import sys
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import silu

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the layer; the options of this example. Qwen3-235B-A22B has top 8 of 128, 4096 and 1536."""

    tokens: int = 40
    """Per rank."""
    top_k: int = 2
    experts: int = 4
    hidden: int = 256
    intermediate: int = 128

    def __post_init__(self) -> None:
        """Refuse sizes that no layer has, or that the FP8 kernels do not take."""
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}.")
        if self.top_k > self.experts:
            raise SystemExit(f"--top-k must be at most the {self.experts} experts, got {self.top_k}.")
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % 16:
                raise SystemExit(f"--{name} must be a multiple of 16, got {getattr(self, name)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Inputs and weights of the layer, after the router; the same for a seed on every rank."""

    x: Tensor
    """bf16 [T, H]."""
    probs: Tensor
    """fp32 [T, K]."""
    expert_ids: Tensor
    """int32 [T, K]."""
    w1: Tensor
    """bf16 [E, 2 I, H]: the I rows of the gate before those of up."""
    w2: Tensor
    """bf16 [E, H, I]."""
    dy: Tensor
    """bf16 [T, H]: the gradient that backward starts from."""

    @classmethod
    def drawn(cls, sizes: Sizes, device: str, num_ranks: int = 1) -> "Layer":
        """Return random normal values for the tokens of all ranks; weights are small enough that y is near 1."""
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw)

        num_tokens = num_ranks * sizes.tokens
        scores, expert_ids = normal(num_tokens, sizes.experts).topk(sizes.top_k)
        w1 = normal(sizes.experts, 2 * sizes.intermediate, sizes.hidden) / sizes.hidden**0.5
        w2 = normal(sizes.experts, sizes.hidden, sizes.intermediate) / sizes.intermediate**0.5
        layer = cls(
            x=normal(num_tokens, sizes.hidden).bfloat16(), probs=scores.softmax(1), expert_ids=expert_ids.int(),
            w1=w1.bfloat16(), w2=w2.bfloat16(), dy=normal(num_tokens, sizes.hidden).bfloat16(),
        )  # fmt: skip
        return cls(**{name: getattr(layer, name).to(device) for name in cls.__slots__})

    def shard(self, rank: int, num_ranks: int) -> "Layer":
        """Return an EP rank's equal share of tokens and of experts."""

        def part(tensor: Tensor) -> Tensor:
            return tensor.chunk(num_ranks)[rank]

        return Layer(**{name: part(getattr(self, name)) for name in self.__slots__})


class Results(NamedTuple):
    """What a forward and a backward pass return."""

    y: Tensor
    dx: Tensor
    dprobs: Tensor
    dw1: Tensor
    dw2: Tensor


class Errors(NamedTuple):
    """Relative errors, or bounds on them, of the results: norm of a difference / norm of the expected tensor."""

    y: float
    dx: float
    dprobs: float
    dw1: float
    dw2: float

    @classmethod
    def between(cls, ours: Results, expected: Results) -> "Errors":
        """Return the relative errors of `ours`."""
        pairs = zip(ours, expected, strict=True)
        return cls(*(float((tensor.float() - other.float()).norm() / other.float().norm()) for tensor, other in pairs))


E4M3, BF16_BITS = 3, 7
"""Stored bits of the mantissa: values in [1, 2) are 2^-3 and 2^-7 apart."""
FP8_ROUNDINGS = Errors(y=6, dx=8, dprobs=6, dw1=8, dw2=6)
"""Operands in E4M3 on which a result depends.

Gate and up each depend on x and w1, which makes four. The fifth and later ones:
    y        silu(gate) up, w2
    dprobs   dy, w2
    dw2      dy, silu(gate) up
    dx       dy, w2, the gradient of gate and up, w1
    dw1      dy, w2, the gradient of gate and up, x
"""
BF16_ROUNDINGS = Errors(y=5, dx=6, dprobs=3, dw1=5, dw2=4)
"""Tensors in bf16 after the layer's inputs, which are in bf16 in both computations. Gate and up are two. The others:

    y        silu(gate) up, rows of y, y
    dprobs   the gradient of silu(gate) up
    dw2      silu(gate) up, dw2
    dx       the gradients of silu(gate) up, of gate and up and of the rows of x, dx
    dw1      the gradients of silu(gate) up and of gate and up, dw1
"""
GATE = 1.07
"""E[silu'(g)^2] / E[silu(g)^2] of a normal g: silu amplifies the squared relative error of gate by at most this."""


def bounds(sizes: Sizes, num_tokens: int, *, is_fp8: bool) -> Errors:
    """Return how large the relative errors may be, from the roundings of the formats alone.

    A rounding error is uniform within half a spacing either way, so its root mean square is spacing / sqrt(12): at most
    2^-bits / sqrt(12) of the value, which is reached at 1. Values are random with mean 0, so sums pass on the relative
    error of their operands, and independent errors add in squares. The logarithm of the ratio of two norms of n
    independent values has the standard deviation 1 / sqrt(n); four of them are allowed.
    """
    num_rows = num_tokens * sizes.top_k
    # A product of matrices has at most as many independent errors as the narrower operand has values.
    num_values = Errors(*[num_rows * min(sizes.hidden, sizes.intermediate)] * 5)._replace(dprobs=num_rows)
    limits = []
    for fp8, bf16, values in zip(FP8_ROUNDINGS, BF16_ROUNDINGS, num_values, strict=True):
        squares = bf16 * 4.0**-BF16_BITS / 12
        if is_fp8:
            squares += fp8 * 4.0**-E4M3 / 12
        limits.append(math.sqrt(GATE * squares) * math.exp(4 / math.sqrt(values)))
    return Errors(*limits)


def trained(forward: Any, layer: Layer, dtype: torch.dtype = torch.bfloat16) -> Results:
    """Run `forward(x, probs, w1, w2)` and its backward pass on a layer's tensors; x and weights become `dtype`."""
    x, w1, w2 = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (layer.x, layer.w1, layer.w2))
    probs = layer.probs.clone().requires_grad_()
    y = forward(x, probs, w1, w2)
    return Results(y.detach(), *torch.autograd.grad(y, (x, probs, w1, w2), layer.dy.to(dtype)))


def in_plain_torch(layer: Layer) -> Results:
    """Compute the layer in float32, expert by expert."""

    def forward(x: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(len(w1)):
            token, choice = (layer.expert_ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ w1[expert].T).chunk(2, dim=1)
            y = y.index_add(0, token, probs[token, choice, None] * ((silu(gate) * up) @ w2[expert].T))
        return y

    return trained(forward, layer, torch.float32)


def on_one_rank(layer: Layer, recipe: Any, backend: str) -> Results:
    """Compute the layer with our kernels, all experts on this rank."""
    on = {"backend": backend}  # your own code can leave this out: CUDA tensors take our kernels

    def forward(x: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        fc1, fc2 = prepare(w1, recipe, **on), prepare(w2, recipe, **on)  # once per optimizer step
        rows = build_row_map(layer.expert_ids, len(w1), **on)
        x_rows, row_probs = permute(x, probs, rows, **on)  # sorted by expert
        experts = GroupedExperts(recipe=recipe, **on)
        y_rows = experts(x_rows, row_probs, fc1, fc2, rows.m_offsets, masters=(w1, w2))
        return unpermute(y_rows, None, rows, **on)  # None: y_rows are already multiplied by row_probs

    return trained(forward, layer)


def by_hand(layer: Layer, backend: str) -> Results:
    """Compute the layer in FP8 as `GroupedExperts` does, by single operators: six grouped GEMMs on quantized rows."""
    on = {"backend": backend}
    fc1, fc2 = prepare(layer.w1, FP8_BLOCK, **on), prepare(layer.w2, FP8_BLOCK, **on)
    rows = build_row_map(layer.expert_ids, len(layer.w1), **on)
    x_rows, row_probs = permute(layer.x, layer.probs, rows, **on)
    ends = rows.m_offsets  # expert e has rows ends[e] to ends[e + 1]

    x_codes, x_columns = quantize_both(x_rows, ends, **on)  # in blocks along a row, and along tokens for dw1
    h = grouped_gemm(x_codes, fc1.weights, ends, **on)  # [M, 2 I], kept for backward
    act_codes = swiglu_quantize(h, row_probs, m_offsets=ends, **on)
    y = unpermute(grouped_gemm(act_codes, fc2.weights, ends, **on), None, rows, **on)

    dy_rows, _ = permute(layer.dy, None, rows, **on)
    dy_codes, dy_columns = quantize_both(dy_rows, ends, **on)
    d_act = grouped_gemm(dy_codes, fc2.transposed, ends, **on)
    grads = swiglu_backward_quantize(d_act, h, row_probs, m_offsets=ends, **on)  # of h; the activation again, for dw2
    dw2 = grouped_gemm_wgrad(dy_columns, grads.act, ends, **on)
    dw1 = grouped_gemm_wgrad(grads.columns, x_columns, ends, **on)
    dx = unpermute(grouped_gemm(grads.rows, fc1.transposed, ends, **on), None, rows, **on)
    dprobs = grads.probs[rows.token_k_to_row]  # every choice has a row here; for a dropped one (-1) it would be 0
    return Results(y, dx, dprobs, dw1, dw2)


class AllToAll(torch.autograd.Function):
    """Rows sent to and received from every rank; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Return the received rows, in the order of their source ranks."""
        ctx.sizes = sent, received
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the sent rows."""
        sent, received = ctx.sizes
        return AllToAll.apply(grad, received, sent), None, None


def on_ep_ranks(layer: Layer, recipe: Any, backend: str) -> Results:
    """Compute a rank's share of tokens, with this rank's experts; a collective call."""
    on = {"backend": backend}
    num_ranks, num_local = dist.get_world_size(), len(layer.w1)

    def forward(x: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        # Sorted by global expert, the rows for one rank are contiguous. No choice is dropped, so all rows are sent.
        rows = build_row_map(layer.expert_ids, num_ranks * num_local, **on)
        x_rows, row_probs = permute(x, probs, rows, **on)
        sent_PE = rows.m_offsets.diff().view(num_ranks, num_local)  # to each rank, for each of its experts
        received_PE = torch.empty_like(sent_PE)
        dist.all_to_all_single(received_PE, sent_PE)
        sent, received = sent_PE.sum(1).tolist(), received_PE.sum(1).tolist()
        x_here, probs_here = AllToAll.apply(x_rows, sent, received), AllToAll.apply(row_probs, sent, received)

        # Received rows are sorted by source rank, then by expert. A second map, of one choice per row, sorts them by
        # local expert. It is stable, so the rows of an expert have the order of one rank with all tokens.
        local_experts = torch.arange(num_local, dtype=torch.int32).repeat(num_ranks)
        local_ids = local_experts.repeat_interleave(received_PE.flatten()).unsqueeze(1)
        local_rows = build_row_map(local_ids, num_local, **on)
        x_local, probs_local = permute(x_here, probs_here.unsqueeze(1), local_rows, **on)
        fc1, fc2 = prepare(w1, recipe, **on), prepare(w2, recipe, **on)
        experts = GroupedExperts(recipe=recipe, **on)
        y_local = experts(x_local, probs_local, fc1, fc2, local_rows.m_offsets, masters=(w1, w2))

        y_here = unpermute(y_local, None, local_rows, **on)
        return unpermute(AllToAll.apply(y_here, received, sent), None, rows, **on)

    return trained(forward, layer)


def require_equal_bits(ours: Results, expected: Results, what: str) -> None:
    """Stop the example if any tensor differs."""
    for name, tensor, reference in zip(Results._fields, ours, expected, strict=True):
        if not torch.equal(tensor, reference):
            raise SystemExit(f"{what}: {name} differs by up to {(tensor - reference).abs().max():.3g}")


def excesses(what: str, errors: Errors, limits: Errors) -> list[str]:
    """Print errors above their bounds; return a sentence per error that exceeds its bound."""
    for label, row in ((what, errors), ("  at most", limits)):
        print(f"{label:16}" + "".join(f"{value:8.4f}" for value in row))
    return [
        f"{what}: the error of {name} is {error:.4f}, above {limit:.4f}"
        for name, error, limit in zip(Errors._fields, errors, limits, strict=True)
        if not error <= limit  # not ">": NaN is above any bound
    ]


def compare_with_plain_torch(sizes: Sizes, device: str, backend: str) -> bool:
    """Print the relative errors of both recipes and whether they hold their bounds; check the chain by hand."""
    layer = Layer.drawn(sizes, device)
    exact = in_plain_torch(layer)
    (num_tokens, top_k), (num_experts, hidden, intermediate) = layer.probs.shape, layer.w2.shape
    print(f"{num_tokens} tokens, top {top_k} of {num_experts} experts, H = {hidden}, I = {intermediate}")
    print(f"{layer.x.device.type}, backend {backend}: norm of the difference from plain torch / norm of plain torch")
    print(f"{'recipe':16}" + "".join(f"{name:>8}" for name in Results._fields))
    bf16, fp8 = (on_one_rank(layer, recipe, backend) for recipe in (BF16, FP8_BLOCK))
    bf16_limits, fp8_limits = (bounds(sizes, num_tokens, is_fp8=is_fp8) for is_fp8 in (False, True))
    # The difference of two results has the errors of both.
    limits_of_difference = Errors(*map(math.hypot, bf16_limits, fp8_limits))
    failures = [
        *excesses(BF16.name, Errors.between(bf16, exact), bf16_limits),
        *excesses(FP8_BLOCK.name, Errors.between(fp8, exact), fp8_limits),
        *excesses("fp8-block - bf16", Errors.between(fp8, bf16), limits_of_difference),
    ]
    require_equal_bits(by_hand(layer, backend), fp8, "by hand")
    print("The chain of single FP8 operators gives the same bits as GroupedExperts.")
    if failures:
        print("\n".join(("FAILED:", *failures)))
    else:
        print("PASSED: y and all gradients are those of plain torch within the roundings of bf16 and of FP8.")
    return not failures


def compare_with_one_rank(sizes: Sizes, backend: str) -> None:
    """Check that EP changes no bit.

    The bound is zero: a scale belongs to one row, or to up to 128 rows of one expert, which stand in the same order; a
    row's sums do not depend on other rows; and a token's rows are summed in the order of its top-k.
    """
    dist.init_process_group("gloo")  # on GPUs: "nccl", and tensors on the rank's GPU
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if sizes.experts % num_ranks:
        raise SystemExit(f"the {sizes.experts} experts cannot be divided among {num_ranks} ranks.")
    whole = Layer.drawn(sizes, "cpu", num_ranks)
    mine = whole.shard(rank, num_ranks)
    for recipe in (BF16, FP8_BLOCK):
        expected = Results(*(part.chunk(num_ranks)[rank] for part in on_one_rank(whole, recipe, backend)))
        require_equal_bits(on_ep_ranks(mine, recipe, backend), expected, f"rank {rank}, {recipe.name}")
        print(f"rank {rank} of {num_ranks}, {recipe.name}: y and all gradients have the bits of one rank", flush=True)
    dist.barrier()  # a rank with other bits has stopped, and then no rank gets further
    if rank == 0:
        print(f"PASSED: on {num_ranks} ranks, EP changes no bit in bf16 and in FP8.")
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--interpret", action="store_true", help="run our kernels in Triton's interpreter")
    for size in fields(Sizes):
        arguments.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default, metavar="N")
    options = vars(arguments.parse_args())
    interpret, sizes = options.pop("interpret"), Sizes(**options)
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from moe_rl.kernels import (
        BF16,
        FP8_BLOCK,
        GroupedExperts,
        build_row_map,
        grouped_gemm,
        grouped_gemm_wgrad,
        permute,
        prepare,
        quantize_both,
        swiglu_backward_quantize,
        swiglu_quantize,
        unpermute,
    )

    backend = "triton" if interpret else "auto"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        compare_with_one_rank(sizes, backend)
    else:
        device = "cuda" if torch.cuda.is_available() and not interpret else "cpu"
        sys.exit(0 if compare_with_plain_torch(sizes, device, backend) else 1)
