"""The expert MLP and all its gradients are those of the definition, as far as each recipe rounds."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.operators.numerics import assert_close, compare
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.gemm.reference import row_ranges
from moe_rl.kernels.gemm.weights import ExpertGradients
from moe_rl.kernels.glu.reference import split
from moe_rl.kernels.glu.spec import SWIGLU, GluSpec, oai_spec
from moe_rl.kernels.grouped_experts import GroupedExperts
from moe_rl.kernels.recipes import (
    BF16,
    FP8_BLOCK,
    FP8_BLOCK_POW2,
    FP8_ROWWISE,
    RECIPES,
    Recipe,
    prepare,
)

HIDDEN, INTERMEDIATE = 80, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    x: torch.Tensor
    probs: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    bias: torch.Tensor
    bias2: torch.Tensor
    m_offsets: torch.Tensor
    grad: torch.Tensor


def make_mlp(device: str, sizes: tuple[int, ...] = (30, 0, 1, 19), dtype: torch.dtype = torch.bfloat16) -> Mlp:
    generator = torch.Generator().manual_seed(len(sizes) + sum(sizes))
    rows, slots = sum(sizes), len(sizes)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)

    return Mlp(
        x=random(rows, HIDDEN),
        probs=torch.rand(rows, generator=generator).to(device),
        w1=random(slots, 2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        w2=random(slots, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
        bias=random(slots, 2 * INTERMEDIATE),
        bias2=random(slots, HIDDEN),
        m_offsets=torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device),
        grad=random(rows, HIDDEN),
    )


def definition(mlp: Mlp, spec: GluSpec, *, biased: bool) -> dict[str, torch.Tensor]:
    """The MLP row by row in float64, and its gradients by autograd."""
    names = ("x", "probs", "w1", "w2", "bias", "bias2")
    given = {name: getattr(mlp, name).double().requires_grad_() for name in names}
    outs = []
    for slot, (low, high) in enumerate(row_ranges(mlp.m_offsets)):
        h = given["x"][low:high] @ given["w1"][slot].t() + (given["bias"][slot] if biased else 0.0)
        gate, up = split(h, spec)
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        act = gate * torch.sigmoid(spec.alpha * gate) * (up + spec.up_shift) * given["probs"][low:high, None]
        down = act @ given["w2"][slot].t()
        outs.append(down + given["probs"][low:high, None] * given["bias2"][slot] if biased else down)
    y = torch.cat(outs)
    y.backward(mlp.grad.double())
    gradients = {f"d{name}": t.grad for name, t in given.items() if t.grad is not None}
    return {"y": y.detach(), **gradients}


def run(
    mlp: Mlp,
    recipe: Recipe,
    *,
    spec: GluSpec = SWIGLU,
    biased: bool = False,
    backend: str = "triton",
    transpose: bool = True,
) -> dict[str, torch.Tensor]:
    names = ("x", "probs", "w1", "w2", "bias", "bias2")
    given = {name: getattr(mlp, name).clone().requires_grad_() for name in names}
    fc1, fc2 = (prepare(w, recipe, transpose=transpose) for w in (mlp.w1, mlp.w2))
    y = GroupedExperts(recipe=recipe, spec=spec, backend=backend)(
        given["x"], given["probs"], fc1, fc2, mlp.m_offsets,
        masters=(given["w1"], given["w2"]), fc1_bias=given["bias"] if biased else None,
        fc2_bias=given["bias2"] if biased else None,
    )  # fmt: skip
    y.backward(mlp.grad)
    gradients = {f"d{name}": t.grad for name, t in given.items() if t.grad is not None}
    return {"y": y.detach(), **gradients}


@pytest.mark.parametrize("spec", [SWIGLU, oai_spec()], ids=["swiglu", "oai"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_in_float32_every_gradient_is_that_of_the_definition(device: str, spec: GluSpec, backend: str) -> None:
    """Nothing is rounded on the way, so what is left is the formula itself."""
    if backend == "torch" and device == "cuda":
        backend = "reference"  # grouped_mm of torch takes float32 on CPUs only
    mlp = make_mlp(device, dtype=torch.float32)
    want, got = definition(mlp, spec, biased=True), run(mlp, BF16, spec=spec, biased=True, backend=backend)
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert_close(got[name], expected, m_offsets=mlp.m_offsets)


@pytest.mark.parametrize("recipe", [BF16, FP8_BLOCK, FP8_ROWWISE], ids=lambda recipe: recipe.name)
def test_both_biases_of_gpt_oss_and_their_gradients(device: str, recipe: Recipe) -> None:
    """The bound is that of the recipe's roundings, as in the test of all recipes."""
    mlp, spec = make_mlp(device), oai_spec()
    want, got = definition(mlp, spec, biased=True), run(mlp, recipe, spec=spec, biased=True)
    limit = 2 * 8**0.5 * ROUNDING["fp8" if recipe.is_fp8 else "bf16"]
    for name in ("y", "dx", "dw1", "dw2", "dbias", "dbias2"):
        error = (got[name].double() - want[name]).norm() / want[name].norm()
        assert error < limit, name
    assert (got["dprobs"].double() - want["dprobs"]).abs().max() < limit * want["dprobs"].abs().max()
    assert not got["dbias2"][1].any(), "the slot without rows"


def test_the_bias_of_the_down_projection_counts_as_often_as_the_token_is_routed(device: str) -> None:
    """With weights of zero what is left is the probability times the bias, and its gradients, rounded once."""
    mlp = make_mlp(device)
    still = replace(mlp, w1=torch.zeros_like(mlp.w1), w2=torch.zeros_like(mlp.w2), bias=torch.zeros_like(mlp.bias))
    want, got = definition(still, SWIGLU, biased=True), run(still, BF16, biased=True)
    for name in ("y", "dbias2", "dprobs"):
        assert_close(got[name], want[name], dtype=torch.bfloat16)
    without = run(still, BF16, biased=False)
    assert not without["y"].any()


ROUNDING = {"bf16": 2.0**-8, "fp8": 2.0**-4 / 3**0.5}
"""Typical relative error of one rounding: bf16's bound; the root mean square of E4M3's."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_each_recipe_stays_within_its_roundings(device: str, recipe: Recipe) -> None:
    """Down the chain of forward and backward at most eight roundings meet in one row; in quadrature, sqrt(8) of one.

    SwiGLU's relative condition is below two for most rows, hence the factor.
    """
    mlp = make_mlp(device)
    want, got = definition(mlp, SWIGLU, biased=False), run(mlp, recipe)
    limit = 2 * 8**0.5 * ROUNDING["fp8" if recipe.is_fp8 else "bf16"]
    for name in ("y", "dx", "dw1", "dw2"):
        error = (got[name].double() - want[name]).norm() / want[name].norm()
        assert error < limit, name
    # The worst probability gradient is a difference of products: measured against the largest one.
    assert (got["dprobs"].double() - want["dprobs"]).abs().max() < limit * want["dprobs"].abs().max()


@pytest.mark.parametrize("recipe", [BF16, FP8_BLOCK], ids=lambda recipe: recipe.name)
def test_backends_give_the_same_mlp(device: str, recipe: Recipe) -> None:
    """Sums in another order move a few roundings of h by one step, which is all that may differ."""
    mlp = make_mlp(device)
    got, want = (run(mlp, recipe, backend=backend) for backend in ("triton", "reference"))
    for name in ("y", "dx", "dw1", "dw2"):
        difference = (got[name].double() - want[name].double()).norm() / want[name].double().norm()
        assert difference < 2.0**-8, name


@pytest.mark.parametrize("recipe", [BF16, FP8_BLOCK, FP8_ROWWISE], ids=lambda recipe: recipe.name)
def test_main_gradients_hold_what_masters_get(device: str, recipe: Recipe) -> None:
    """The same fp32 sums, before their rounding to bf16; behind a table, added to what is there."""
    mlp = make_mlp(device)
    want = run(mlp, recipe)
    parts = [[torch.zeros(*w.shape[1:], device=device) for _ in w] for w in (mlp.w1, mlp.w2)]
    fc1, fc2 = (prepare(list(w), recipe) for w in (mlp.w1, mlp.w2))
    x = mlp.x.clone().requires_grad_()
    experts = GroupedExperts(recipe=recipe, backend="triton")
    y = experts(
        x, mlp.probs, fc1, fc2, mlp.m_offsets,
        main_grads=(ExpertGradients.of_parts(parts[0]), ExpertGradients.of_parts(parts[1])),
    )  # fmt: skip
    assert torch.equal(y.detach(), want["y"])
    y.backward(mlp.grad)
    assert x.grad is not None
    assert torch.equal(x.grad, want["dx"])
    for sums, name in zip(parts, ("dw1", "dw2"), strict=True):
        assert torch.equal(torch.stack(sums).to(torch.bfloat16), want[name])


def test_dgrad_without_a_transposed_copy_gives_the_same_sums(device: str) -> None:
    mlp = make_mlp(device)
    got, want = (run(mlp, FP8_BLOCK, transpose=transpose) for transpose in (False, True))
    assert torch.equal(got["y"], want["y"])
    assert compare(got["dx"], want["dx"].double()).row_error < 2.0**-6


@pytest.mark.parametrize("recipe", [BF16, FP8_BLOCK_POW2, FP8_ROWWISE], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("sizes", [(0, 0), (0, 1)])
def test_no_tokens_and_one_token_pass_through(device: str, recipe: Recipe, sizes: tuple[int, ...]) -> None:
    got = run(make_mlp(device, sizes), recipe, biased=True)
    assert got["y"].shape == (sum(sizes), HIDDEN)
    assert all(bool(value.isfinite().all()) for value in got.values())
    assert got.keys() >= {"dbias", "dbias2"}
    assert bool((got["dw1"][0] == 0).all())
    assert bool((got["dw2"][0] == 0).all())


@pytest.mark.parametrize("recipe", [BF16, FP8_BLOCK, FP8_ROWWISE], ids=lambda recipe: recipe.name)
def test_a_token_does_not_see_the_batch(device: str, recipe: Recipe) -> None:
    mlp = make_mlp(device)
    whole = run(mlp, recipe, biased=True)
    alone = Mlp(
        x=mlp.x[31:32], probs=mlp.probs[31:32], w1=mlp.w1, w2=mlp.w2, bias=mlp.bias, bias2=mlp.bias2,
        grad=mlp.grad[31:32],
        m_offsets=torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32, device=device),
    )  # fmt: skip
    got = run(alone, recipe, biased=True)
    for name in ("y", "dx", "dprobs"):
        assert torch.equal(got[name][0], whole[name][31]), name


def test_misuse_gets_a_sentence(device: str) -> None:
    mlp = make_mlp(device)
    fc1, fc2 = prepare(mlp.w1, BF16), prepare(mlp.w2, BF16)
    with pytest.raises(InvalidInputError, match="recipe fp8-block needs"):
        GroupedExperts(recipe=FP8_BLOCK)(mlp.x, mlp.probs, fc1, fc2, mlp.m_offsets)
    with pytest.raises(InvalidInputError, match=r"fc1 \[80, 48\] needs fc2 \[48, 40\]"):
        GroupedExperts(recipe=BF16)(mlp.x, mlp.probs, fc2, fc1, mlp.m_offsets)
    with pytest.raises(InvalidInputError, match=r"row_probs must be float32 \[50\]"):
        GroupedExperts(recipe=BF16)(mlp.x, mlp.probs.double(), fc1, fc2, mlp.m_offsets)
    with pytest.raises(InvalidInputError, match=r"bias must be floating \[4, 80\]"):
        GroupedExperts(recipe=BF16)(mlp.x, mlp.probs, fc1, fc2, mlp.m_offsets, fc2_bias=mlp.bias)
    with pytest.raises(InvalidInputError, match="Did you mean 'fp8-block'"):
        RECIPES["fp8-blok"]


@pytest.mark.parametrize("recipe", [BF16, FP8_BLOCK, FP8_ROWWISE], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("as_list", [False, True], ids=["one tensor", "list"])
def test_trained_weights_never_go_without_gradients_in_silence(device: str, recipe: Recipe, as_list: bool) -> None:
    mlp = make_mlp(device)
    w1, w2 = (torch.nn.Parameter(w) for w in (mlp.w1, mlp.w2))
    experts, rest = GroupedExperts(recipe=recipe, backend="reference"), (mlp.probs, mlp.m_offsets)
    x = mlp.x.clone().requires_grad_()

    def call(*weights: torch.Tensor, **settings: object) -> torch.Tensor:
        fc1, fc2 = (prepare(list(w) if as_list else w, recipe, backend="reference") for w in weights)
        return experts(x, rest[0], fc1, fc2, rest[1], **settings)

    for weights in ((w1, w2), (w1.detach(), w2), (w1, w2.detach())):
        with pytest.raises(InvalidInputError, match=r"require gradients.*masters=\(w1, w2\).*main_grads=.*detach"):
            call(*weights)
    call(w1, w2, masters=(w1, w2)).backward(mlp.grad)
    buffers = tuple(torch.zeros_like(w, dtype=torch.float32) for w in (w1, w2))
    call(w1, w2, main_grads=buffers).backward(mlp.grad)
    for parameter, buffer in zip((w1, w2), buffers, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.any()
        assert torch.equal(parameter.grad, buffer.to(torch.bfloat16))
    x = mlp.x
    with pytest.raises(InvalidInputError, match=r"backward would not reach main_grads. Pass masters=\(w1, w2\)"):
        call(w1, w2, main_grads=buffers)
    call(w1, w2, masters=(w1, w2), main_grads=buffers).backward(mlp.grad)
    assert torch.equal(buffers[0].to(torch.bfloat16), 2 * w1.grad)
    x = mlp.x.clone().requires_grad_()
    # Frozen weights, and calls without gradients, are asked nothing.
    call(w1.detach(), w2.detach()).backward(mlp.grad)
    with torch.no_grad():
        call(w1, w2)


def test_one_pass_builds_its_tile_map_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both projections, both dgrads and four quantizations along tokens share it; small groups need a second."""
    from moe_rl.kernels.tiles import op, triton_kernel

    built: list[int] = []
    launch = triton_kernel._tile_map_kernel

    class Counting:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            def run_kernel(*arguments: object, **constants: int) -> None:
                built.append(constants["BLOCK_M"])
                launch[grid](*arguments, **constants)

            return run_kernel

    monkeypatch.setattr(triton_kernel, "_tile_map_kernel", Counting())
    assert inspect.unwrap(op.TILE_MAP.resolve("triton", device)) is triton_kernel.tile_map
    run(make_mlp(device, (150,)), FP8_BLOCK)
    assert built == [128]
    built.clear()
    run(make_mlp(device), FP8_BLOCK)
    assert built == [64, 128]


@pytest.mark.lengthy
def test_what_rows_of_no_slot_hold_never_matters(device: str) -> None:
    """NaN in rows, probabilities and gradients beyond the last offset: zeros come out, and nothing else changes."""
    mlp = make_mlp(device)
    for recipe in (BF16, FP8_BLOCK, FP8_ROWWISE):
        want = run(mlp, recipe, biased=True)
        tail = {name: torch.cat([t := getattr(mlp, name), torch.full_like(t[:3], float("nan"))])
                for name in ("x", "probs", "grad")}  # fmt: skip
        got = run(replace(mlp, **tail), recipe, biased=True)
        for name, value in want.items():
            rows = len(mlp.x) if name in ("y", "dx", "dprobs") else len(value)
            assert torch.equal(got[name][:rows], value), (recipe.name, name)
            assert not got[name][rows:].any(), (recipe.name, name)


COMPILED = """
import torch
from moe_rl.kernels.grouped_experts import GroupedExperts
from moe_rl.kernels.recipes import BF16, FP8_BLOCK, prepare

offsets = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
probs, grad = torch.rand(9), torch.randn(9, 32).bfloat16()
w1, w2 = torch.randn(3, 32, 32).bfloat16(), torch.randn(3, 32, 16).bfloat16()
biases = {"fc1_bias": torch.randn(3, 32).bfloat16(), "fc2_bias": torch.randn(3, 32).bfloat16()}
for recipe in (BF16, FP8_BLOCK):
    fc1, fc2 = prepare(w1, recipe), prepare(w2, recipe)
    # On a CPU the automatic choice takes the reference, after building a tile map as on a GPU.
    experts = GroupedExperts(recipe=recipe, backend="auto")
    apply = lambda x: experts(x, probs, fc1, fc2, offsets, **biases)
    got = torch.randn(9, 32).bfloat16().requires_grad_()
    want = got.detach().clone().requires_grad_()
    torch.compile(apply, fullgraph=True, backend="aot_eager")(got).backward(grad)
    apply(want).backward(grad)
    assert torch.equal(got.grad, want.grad)
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.lengthy
def test_a_compiler_keeps_the_mlp_in_one_graph() -> None:
    """`fullgraph` refuses any break; gradients have the bits they have without. Own process: dynamo is off in tests."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["2"]
