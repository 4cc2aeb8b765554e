"""Calls that make every launch that is shipped, small, with every consumer's rows filled and more than one tile.

Products have operands whose sums are exact in fp32, whatever their order: small whole numbers, and scales that are
powers of two, another for each row and block. So results must be those of the float64 reference, to the bit.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from benchmarks.kernels.cases import (
    SHIPPED_OPS,
    GemmCase,
    GemmOperands,
    exact_columns,
    exact_operands,
    exact_values,
    powers_of_two,
    rows_gemm,
    wgrad_gemm,
)
from benchmarks.kernels.fused_suite import fused_problems
from benchmarks.kernels.recording import recorded
from benchmarks.operators.cases import TINY, TINY_OAI, Case, ModelShape
from benchmarks.operators.harness import Problem, check
from benchmarks.operators.kernel_suites import SUITES
from emulator.launch import as_gpu
from moe_rl.kernels import (
    RECIPES,
    SWIGLU,
    GroupedExperts,
    empty_weight_codes,
    gather_logprobs,
    oai_spec,
    prepare,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_weights,
    tile_map,
)
from moe_rl.kernels.gemm import reference, triton_kernel, triton_wgrad
from moe_rl.kernels.gemm.problem import WgradGemm
from moe_rl.kernels.gemm.tiling import (
    GemmConfig,
    GemmProblem,
    Op,
    Scaling,
    candidates,
    config,
    needed_capability,
    scaling_of,
)
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.router_logprobs.op import SCORE_FUNCTIONS
from moe_rl.kernels.types import ROUNDINGS, QuantizedTensor, Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One call."""

    name: str
    call: Callable[[], Any]
    """Make the launches."""
    verify: Callable[[Any], None]
    """Compare what `call` returned: raise AssertionError with what differs."""
    launches: tuple[str, ...] = ()


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    differing = ~((got == want) | (got.isnan() & want.isnan()))
    if bool(differing.any()):
        where = differing.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(differing.sum())} of {got.numel()} values differ, the first at {where}: "
            f"{float(got[tuple(where)])} instead of {float(want[tuple(where)])}"
        )


def product_checks(arch: int) -> Iterator[Check]:
    """Forward, dgrad and wgrad with every tile that may be chosen, in one tensor or behind a table, with biases."""
    for op, scaling in SHIPPED_OPS:
        if (arch // 10, arch % 10) < needed_capability(scaling):
            continue
        for out_dtype in (torch.bfloat16, torch.float32):
            for tile in _tiles_of(op, scaling, out_dtype.itemsize, (arch // 10, arch % 10)):
                made = _operands(op, scaling, tile)
                if op == "wgrad":
                    yield from _wgrad_checks(made, scaling, tile, out_dtype)
                else:
                    yield from _row_checks(made, op, scaling, tile, out_dtype)
    yield from _long_sum_checks(arch)


def _tiles_of(op: Op, scaling: Scaling, out_bytes: int, capability: tuple[int, int]) -> tuple[GemmConfig, ...]:
    """Return the tiles for few and many rows, narrow and wide results; MXFP8's loop in Gluon wants whole steps."""
    problems = [
        GemmProblem(
            op=op, scaling=scaling, num_rows=rows, num_groups=3, n=n, k=k, out_bytes=out_bytes, capability=capability
        )
        for rows, (n, k) in itertools.product((64, 1024), ((336, 416), (2048, 2048)))
    ]
    return tuple(dict.fromkeys(tile for problem in problems for tile in candidates(problem)))


@cache
def _operands(op: Op, scaling: Scaling, tile: GemmConfig) -> GemmOperands:
    """Return operands of two tiles of columns, the last one not full, and steps enough for a ring to go round.

    Rows: a group with a full tile and some of another one, an empty group, one with more rows than half a tile, and
    rows of no group. The last step is not whole, but for MXFP8 in Gluon. Of wgrad both sides of the result are columns,
    and rows are summed.
    """
    columns, rest = 2 * tile.block_n - 48, 0 if scaling == "mx" and tile.specialized else 32
    if op == "wgrad":
        sizes, n, k = (4 * tile.block_k + 40, 0, 75), 2 * tile.block_m - 48, columns
    else:
        sizes, summed = (tile.block_m + 40, 0, tile.block_m // 2 + 11), 4 * tile.block_k + rest
        n, k = (columns, summed) if op == "forward" else (summed, columns)
    return exact_operands(GemmCase(sizes=sizes, n=n, k=k, extra_rows=9, scaling=scaling))


def _row_checks(
    made: GemmOperands, op: Op, scaling: Scaling, tile: GemmConfig, out_dtype: torch.dtype
) -> Iterator[Check]:
    table = ExpertWeights.of_parts(made.weight_parts)
    generator = torch.Generator().manual_seed(5)
    n = made.weights.shape[0]
    bias = exact_values((3, n), generator).to(torch.bfloat16)
    factor = powers_of_two(torch.empty(len(made.x.data)), generator)
    rows = made.x if op == "forward" else made.dy
    biases: tuple[dict[str, Any], ...] = (
        {}, {"bias": bias, "bias_factor": factor}, {"bias": bias}, {"bias": bias.float(), "bias_factor": factor},
        {"bias": bias.float()},
    )  # fmt: skip
    for weights, settings in itertools.product((made.weights, table), biases if op == "forward" else ({},)):
        gemm = rows_gemm(rows, weights, made.m_offsets, out_dtype=out_dtype, **settings)
        launch, exact = getattr(triton_kernel, op), getattr(reference, op)

        yield Check(
            name=f"{op} {scaling} {tile}", call=partial(launch, gemm, chosen=tile),
            verify=lambda got, gemm=gemm, exact=exact: _same_bits(got, exact(gemm)),
        )  # fmt: skip


def _long_sum_checks(arch: int) -> Iterator[Check]:
    """FP8 forward with a sum of 2,048, as models have it: its scales' strides are multiples of 16, compiled apart."""
    described = GemmProblem(
        op="forward", scaling="block", num_rows=1024, num_groups=3, n=144, k=2048, capability=(arch // 10, arch % 10)
    )
    if described.capability < needed_capability("block"):
        return
    tile = config(described)
    made = exact_operands(GemmCase(sizes=(tile.block_m + 40, 0, 75), n=144, k=2048, extra_rows=9, scaling="block"))
    yield from _row_checks(made, "forward", "block", tile, torch.bfloat16)


def _wgrad_checks(made: GemmOperands, scaling: Scaling, tile: GemmConfig, out_dtype: torch.dtype) -> Iterator[Check]:
    n, k = made.weights.shape
    gemm = wgrad_gemm(made, scaling, ExpertGradients.of(torch.zeros(3, n, k)), accumulate=False)
    gemm = exact_columns(gemm)
    before = [torch.full((n, k), 3.0 + g, dtype=out_dtype) for g in range(3)]
    parts, whole = [part.clone() for part in before], torch.stack(before)
    table = ExpertGradients.of_parts(parts)
    for as_table, accumulate in itertools.product((False, True), repeat=2):

        def call(gemm: WgradGemm = gemm, as_table: bool = as_table, accumulate: bool = accumulate) -> torch.Tensor:
            for g, part in enumerate(before):
                parts[g].copy_(part)
                whole[g].copy_(part)
            out = table if as_table else ExpertGradients.of(whole)
            triton_wgrad.wgrad(replace(gemm, out=out, accumulate=accumulate), chosen=tile)
            return torch.stack(parts) if as_table else whole.clone()

        def verify(got: torch.Tensor, gemm: WgradGemm = gemm, accumulate: bool = accumulate) -> None:
            wanted = torch.stack(before)
            reference.wgrad(replace(gemm, out=ExpertGradients.of(wanted), accumulate=accumulate))
            _same_bits(got, wanted)

        yield Check(name=f"wgrad {scaling} {tile}", call=call, verify=verify)


SMALL = ModelShape(name="small", num_experts=4, top_k=2, hidden=256, intermediate=128, ep_size=2)
CASES = (
    Case(model=TINY, tokens=40),
    Case(model=TINY_OAI, tokens=40, routing="dropped"),
    Case(model=SMALL, tokens=9),
    Case(model=replace(SMALL, top_k=4), tokens=70, routing="even"),
    Case(model=replace(SMALL, num_experts=8, ep_size=4, top_k=8), tokens=70, routing="even"),
    Case(model=replace(SMALL, num_experts=8, top_k=4, is_oai=True), tokens=70, routing="even"),
    Case(model=replace(SMALL, num_experts=64, top_k=4, ep_size=1), tokens=12),
)


def operator_checks(arch: int) -> Iterator[Check]:
    """The problems of the benchmark for every operator but the products, its casts, and what no model has there."""
    with as_gpu(arch):
        made = [p for build in (*SUITES.values(), fused_problems) for case in CASES for p in build(case, "cpu")]
    for problem in made:
        name = f"{problem.operator} {problem.variant} {problem.case}"
        yield Check(name=name, call=problem.ours or problem.calls["triton"], verify=partial(_solves, problem))
    for experts, top_k, score in itertools.product((32, 128, 256, 512), (4, 8), SCORE_FUNCTIONS):
        yield _logprobs(experts, top_k, score)
    for slots, block_m in itertools.product((1, 2, 4, 8, 16, 32, 64, 128), (32, 64, 128, 256)):
        yield _tiles(slots, block_m)
    for dtype, rounding in itertools.product((torch.bfloat16, torch.float32), ROUNDINGS):
        yield from _quantizers(dtype, rounding)


def _solves(problem: Problem, got: Any) -> None:
    provider = "triton"
    with as_gpu(0):
        row = check(replace(problem, repeats=1, calls={provider: lambda: got}), provider, problem.expected())
    assert row["passed"], row["problem"]


def _logprobs(experts: int, top_k: int, score: str) -> Check:
    generator = torch.Generator().manual_seed(experts)
    wide = torch.randn(20, experts, generator=generator)
    ids = torch.rand(20, experts, generator=generator).topk(top_k).indices.to(torch.int32)
    grad = torch.randn(20, top_k, generator=generator)

    def run(backend: str = "triton") -> tuple[torch.Tensor, torch.Tensor]:
        logits = wide.clone().requires_grad_()
        found = gather_logprobs(logits, ids, score_function=score, backend=backend)
        found.backward(grad)
        return found.detach(), logits.grad  # type: ignore[return-value]  # it has one

    def verify(results: tuple[torch.Tensor, torch.Tensor]) -> None:
        with as_gpu(0):
            wanted = run("reference")
        for got, want in zip(results, wanted, strict=True):
            error = float(((got - want).abs() / (want.abs() + 1)).max())
            assert error < 2.0**-18, f"log-probabilities or gradients differ by {error:.1e}"

    return Check(name=f"log-probabilities {experts} {top_k} {score}", call=run, verify=verify)


def _tiles(slots: int, block_m: int) -> Check:
    generator = torch.Generator().manual_seed(slots)
    sizes = torch.randint(0, 2 * block_m, (slots,), generator=generator)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    num_rows = int(offsets[-1]) + 5

    def verify(found: Any) -> None:
        with as_gpu(0):
            wanted = tile_map(offsets, num_rows, block_m, backend="reference")
        used = int(wanted.num_tiles)
        assert torch.equal(found.num_tiles, wanted.num_tiles), "another number of tiles"
        assert torch.equal(found.entries[:used], wanted.entries[:used]), "other tiles"

    return Check(name=f"tile map {slots} {block_m}", call=lambda: tile_map(offsets, num_rows, block_m), verify=verify)


def _quantizers(dtype: torch.dtype, rounding: Rounding) -> Iterator[Check]:
    x = torch.randn(200, 400, generator=torch.Generator().manual_seed(1)).to(dtype)
    many = torch.randn(8400, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    # Two blocks of 8,400 rows: a program takes 64 rows there, 16 of few.
    two_blocks = torch.randn(8400, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    offsets = torch.tensor([0, 70, 70, 200], dtype=torch.int32)
    runs: list[tuple[str, Callable[[str], tuple[torch.Tensor, ...]]]] = []
    for name, shape, value in (
        ("1x128", (1, 128), x), ("1x128 of many", (1, 128), many), ("1x128 of two blocks", (1, 128), two_blocks),
        ("128x128", (128, 128), x[None]),
        ("row", (1, -1), x), ("1x32", (1, 32), x),
    ):  # fmt: skip
        if rounding == "division" or shape != (1, 32):  # MX has one rounding
            runs.append((name, lambda b, v=value, s=shape: _parts(quantize(v, s, rounding=rounding, backend=b))))
    for block, value in ((128, x), (32, x), (128, x[:, :128].contiguous()), (128, many[:200].contiguous())):
        if rounding == "division" or block != 32:
            columns = partial(quantize_columns, value, offsets, block=block, rounding=rounding)
            runs.append((f"{block}x1", lambda b, columns=columns: columns(backend=b)))
        if rounding == "division" or block != 32:
            runs.append((f"{block}x1 and rows", lambda b, v=value, n=block: _both(v, offsets, n, rounding, b)))
    runs += [("of a layer", lambda b, t=transpose: _of_layer(x, rounding, t, b)) for transpose in (False, True)]
    for name, run in runs:
        yield Check(
            name=f"quantize {name} {dtype} {rounding}", call=partial(run, "triton"), verify=partial(_same_codes, run)
        )


def _parts(x: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.data, x.scale


def _of_layer(x: torch.Tensor, rounding: Rounding, transpose: bool, backend: str) -> tuple[torch.Tensor, ...]:
    matrices = [x[:192], x[:64, :272].contiguous()]
    into = empty_weight_codes(matrices, transpose=transpose)
    quantize_weights(matrices, into, rounding=rounding, backend=backend)
    return tuple(tensor for codes in into for side in codes.both for tensor in (side.data, side.scale))


def _both(
    x: torch.Tensor, offsets: torch.Tensor, block: int, rounding: Rounding, backend: str
) -> tuple[torch.Tensor, ...]:
    rows, columns = quantize_both(x, offsets, block=block, rounding=rounding, backend=backend)
    return rows.data, rows.scale, *columns


def _same_codes(run: Callable[[str], tuple[torch.Tensor, ...]], got: tuple[torch.Tensor, ...]) -> None:
    with as_gpu(0):
        want = run("reference")
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), "codes or scales differ"


def expert_checks(arch: int) -> Iterator[Check]:
    """The expert MLP, forward and backward, as runs do it: each recipe's forms, against its own reference."""
    forms = itertools.product(RECIPES, (64, 384), (True, False), ("rows", "rows of gpt-oss"))
    for recipe, rows, transpose, form in forms:
        supported = (arch // 10, arch % 10) >= needed_capability(scaling_of(recipe.weight_block_shape))
        square = recipe.weight_block_shape in (None, (128, 128))
        if supported and (transpose or square):
            run = partial(_experts, recipe, rows, transpose, form)
            verify = partial(_like_reference, run, 0.02 if recipe.is_fp8 else 0.005)
            name = f"expert MLP {recipe.name} {rows} rows, transposed copy {transpose}, {form}"
            yield Check(name=name, call=run, verify=verify)


def _experts(recipe: Any, rows: int, transpose: bool, form: str, backend: str = "triton") -> list[torch.Tensor]:
    hidden, intermediate, slots = 256, 128, 2
    is_oai = form == "rows of gpt-oss"
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(torch.bfloat16)

    w1, w2 = (
        w.requires_grad_() for w in (random(slots, 2 * intermediate, hidden), random(slots, hidden, intermediate))
    )
    x, probs = random(rows, hidden).requires_grad_(), torch.rand(rows, generator=generator).requires_grad_()
    fc1, fc2 = (prepare(w.detach(), recipe, transpose=transpose) for w in (w1, w2))
    experts = GroupedExperts(recipe=recipe, backend=backend, spec=oai_spec() if is_oai else SWIGLU)
    offsets = torch.tensor([0, rows // 2 - 3, rows], dtype=torch.int32)
    biases = {f"fc{at}_bias": random(slots, n) for at, n in ((1, 2 * intermediate), (2, hidden))} if is_oai else {}
    y = experts(x, probs, fc1, fc2, offsets, masters=(w1, w2), **biases)
    found = [y, *torch.autograd.grad(y, (x, probs, w1, w2), random(*y.shape))]
    return [value.detach() for value in found]


def _like_reference(run: Callable[..., list[torch.Tensor]], limit: float, results: list[torch.Tensor]) -> None:
    with as_gpu(0):
        wanted = run(backend="reference")
    for number, (got, want) in enumerate(zip(results, wanted, strict=True)):
        error = float((got.double() - want.double()).norm() / want.double().norm())
        assert error < limit, f"result {number} of the expert MLP errs by {error:.3g}"


def quick_checks(arch: int) -> list[Check]:
    """Return a check of each specialized loop and each loop on tensor memory, with weights in one tensor."""
    found: dict[str, Check] = {}
    for made in product_checks(arch):
        if "pointer" not in made.name and ("specialized" in made.name or " tma " in made.name):
            found.setdefault(made.name, made)
    special = [made for name, made in found.items() if "specialized" in name]
    plain = [made for name, made in found.items() if made not in special and "row" not in name.split()]
    kept = plain[::2] if arch == 100 else [made for made in plain if made.name.startswith("forward none")]
    return special + kept


def chosen_checks(arch: int, wanted: set[str] | None = None) -> tuple[list[Check], set[str]]:
    """Return checks that make every launch in `wanted` at least once, and the names that none of them makes."""
    found: list[Check] = []
    seen: set[str] = set()
    for made in itertools.chain(product_checks(arch), operator_checks(arch), expert_checks(arch)):
        with recorded(arch) as launches:
            made.call()
        names = dict.fromkeys(launch.name for launch in launches)
        if any(name not in seen and (wanted is None or name in wanted) for name in names):
            seen |= set(names)
            found.append(replace(made, launches=tuple(names)))
    return found, (wanted or seen) - seen
