"""Gated activations equal float64 within the error of their exponential; quantizing in the pass is exact."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.expert_bias.reference import group_of_rows
from moe_rl.kernels.glu import reference
from moe_rl.kernels.glu.op import swiglu, swiglu_backward, swiglu_backward_quantize, swiglu_oai, swiglu_quantize
from moe_rl.kernels.glu.spec import SWIGLU, GluRows, GluSpec, oai_spec
from moe_rl.kernels.quantization.op import quantize, quantize_both, quantize_columns

EPS = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Case:
    sizes: tuple[int, ...]
    """Rows of each slot."""
    width: int
    spec: GluSpec = SWIGLU
    dtype: torch.dtype = torch.bfloat16
    weighted: bool = True
    biased: bool = False
    tail: int = 0
    """Rows beyond the last offset."""

    def __str__(self) -> str:
        flags = "".join(
            name for name, on in (("p", self.weighted), ("b", self.biased), ("o", self.spec.up_shift > 0)) if on
        )
        layout = self.spec.layout[:5]
        sizes = "_".join(map(str, self.sizes))
        return f"M{sizes}+{self.tail}-I{self.width}-{layout}-{str(self.dtype)[6:]}-{flags}"


OAI = oai_spec()
CASES = [
    Case(sizes=(0,), width=16),
    Case(sizes=(1,), width=1),
    Case(sizes=(33, 0, 7), width=144),
    Case(sizes=(40,), width=130, dtype=torch.float32, weighted=False),
    Case(sizes=(20,), width=64, dtype=torch.float16, spec=GluSpec(layout="interleaved"), tail=5),
    Case(sizes=(17, 0, 70, 1), width=96, spec=OAI, biased=True),
    Case(sizes=(17, 0, 70, 1), width=96, spec=OAI, biased=True, dtype=torch.float32, weighted=False, tail=9),
    Case(sizes=(0, 130), width=48, spec=oai_spec(limit=0.5, layout="concatenated"), biased=True, tail=1),
    Case(sizes=(0, 0), width=16, spec=OAI, biased=True, tail=3),
    Case(sizes=(30,), width=80, spec=oai_spec(limit=1.0, alpha=3.0), dtype=torch.float32),
    Case(sizes=(5, 6), width=32, biased=True, dtype=torch.float32),
]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    h: torch.Tensor
    probs: torch.Tensor | None
    bias: torch.Tensor | None
    m_offsets: torch.Tensor
    grad_out: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        return self.h, self.probs, self.bias, self.m_offsets

    def exact(self, spec: GluSpec) -> GluRows:
        return glu_rows(self.h.double(), *self.tensors[1:], spec)

    @property
    def named(self) -> dict[str, torch.Tensor | None]:
        return {"bias": self.bias, "m_offsets": self.m_offsets}


def glu_rows(
    h: torch.Tensor,
    probs: torch.Tensor | None,
    bias: torch.Tensor | None,
    m_offsets: torch.Tensor | None,
    spec: GluSpec,
) -> GluRows:
    return GluRows(h=h, probs=probs, bias=bias, m_offsets=m_offsets, spec=spec)


def make_inputs(case: Case, device: str, dtype: torch.dtype | None = None) -> Inputs:
    """Rows of sizes up to 30, so that sigmoids saturate and limits bite; NaN beyond the last offset."""
    generator = torch.Generator().manual_seed(0)
    used, rows, dtype = sum(case.sizes), sum(case.sizes) + case.tail, dtype or case.dtype
    h = torch.randn(rows, 2 * case.width, generator=generator) * torch.logspace(-2, 1, max(1, rows))[:rows, None]
    probs, grad_out = torch.rand(rows, generator=generator), torch.randn(rows, case.width, generator=generator)
    for tensor in (h, probs, grad_out):
        tensor[used:] = float("nan")
    bias = torch.randn(len(case.sizes), 2 * case.width, generator=generator).to(dtype).to(device)
    probs_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Inputs(
        h=h.to(dtype).to(device),
        probs=probs.to(probs_dtype).to(device) if case.weighted else None,
        bias=bias if case.biased else None,
        m_offsets=torch.tensor([0, *case.sizes]).cumsum(0).to(torch.int32).to(device),
        grad_out=grad_out.to(dtype).to(device),
    )


def sigmoid_error(case: Case, inputs: Inputs) -> torch.Tensor:
    """Return [M, I], the relative error of an fp32 sigmoid(alpha g) times at most 16 roundings of fp32.

    exp(a) computed as 2^(a log2 e) is off by |a| roundings of its exponent (2 |a| with that of alpha g itself), and
    where the result of the exponential decides, that is the error of the sigmoid.
    """
    gate, _ = reference._gate_and_up(inputs.exact(case.spec))
    gate = gate.clamp(max=case.spec.limit)
    return EPS * (16 + 4 * (case.spec.alpha * gate).abs())


def magnitudes(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 |g' sigmoid(alpha g')| and |u'| + up_shift of the clamped gate g' and up u'."""
    gate, up = reference._gate_and_up(inputs.exact(case.spec))
    gate, up = gate.clamp(max=case.spec.limit), up.clamp(-case.spec.limit, case.spec.limit)
    return (gate * torch.sigmoid(case.spec.alpha * gate)).abs(), up.abs() + case.spec.up_shift


def rounding(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of one rounding of `value` to `dtype`, half a step, and the smallest subnormal."""
    info = torch.finfo(dtype)
    return value.abs() * (info.eps / 2) + info.smallest_normal * info.eps


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_activation_is_the_float64_one_up_to_its_sigmoid_and_one_rounding(
    device: str, case: Case, backend: str
) -> None:
    inputs = make_inputs(case, device)
    got = swiglu(inputs.h, inputs.probs, spec=case.spec, **inputs.named, backend=backend)
    exact = reference.swiglu(inputs.exact(case.spec))
    assert got.dtype == case.dtype
    # up + up_shift may cancel: what the roundings before it leave is relative to |up| + up_shift.
    gate, up = magnitudes(case, inputs)
    weight = 1.0 if inputs.probs is None else inputs.probs.double().nan_to_num()[:, None]
    bound = gate * up * weight * sigmoid_error(case, inputs) + rounding(exact * (1 + 2.0**-7), case.dtype)
    assert bool(((got.double() - exact).abs() <= bound).all())
    assert not got[sum(case.sizes) :].any()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("how", ["division", "pow2"])
def test_quantizing_in_the_pass_gives_the_bits_of_quantizing_afterwards(device: str, case: Case, how: str) -> None:
    inputs = make_inputs(case, device)
    for backend in ("triton", "reference"):
        call = {"spec": case.spec, **inputs.named, "backend": backend}
        fused = swiglu_quantize(inputs.h, inputs.probs, rounding=how, **call)
        apart = quantize(swiglu(inputs.h, inputs.probs, **call), rounding=how, backend=backend)
        assert torch.equal(fused.scale, apart.scale)
        assert torch.equal(fused.data.view(torch.uint8), apart.data.view(torch.uint8))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_gradients_are_those_of_float64_autograd(device: str, case: Case, backend: str) -> None:
    """Sums over I (probability) and over a slot's rows (bias) add their length in roundings of fp32."""
    inputs = make_inputs(case, device)
    grad_h, grad_probs, grad_bias = swiglu_backward(
        inputs.grad_out, inputs.h, inputs.probs, spec=case.spec, **inputs.named, backend=backend
    )
    used = sum(case.sizes)
    leaves = [None if t is None else t.double().requires_grad_() for t in inputs.tensors[:3]]
    exact = reference.swiglu(glu_rows(*leaves, inputs.m_offsets, case.spec))
    wanted = [leaf for leaf in leaves if leaf is not None]
    want = dict(
        zip(
            [name for name, leaf in zip(("h", "probs", "bias"), leaves, strict=True) if leaf is not None],
            torch.autograd.grad(exact, wanted, inputs.grad_out.double().nan_to_num()),
            strict=True,
        )
    )
    # The derivative multiplies by 1 + alpha g (1 - s), whose terms may cancel: bound its parts, not their sum.
    gate = reference._gate_and_up(inputs.exact(case.spec))[0]
    gate = gate.clamp(max=case.spec.limit)
    activated, up = magnitudes(case, inputs)
    weight = 1.0 if inputs.probs is None else inputs.probs.double().nan_to_num()[:, None]
    grad = inputs.grad_out.double().nan_to_num().abs()
    slope = torch.sigmoid(case.spec.alpha * gate) * (1 + (case.spec.alpha * gate).abs())
    parts = grad * weight * up * slope, grad * weight * activated
    scale = reference.join(*parts, case.spec)
    error = reference.join(*[sigmoid_error(case, inputs) * part for part in parts], case.spec)
    assert bool(((grad_h.double() - want["h"].nan_to_num()).abs() <= error + rounding(scale, case.dtype)).all())
    assert not grad_h[used:].any()
    if grad_probs is not None:
        bound = (grad * activated * up * (sigmoid_error(case, inputs) + EPS * case.width)).sum(1)
        assert grad_probs.dtype == torch.float32
        assert bool(((grad_probs.double() - want["probs"])[:used].abs() <= bound[:used]).all())
    if grad_bias is not None:
        slot = group_of_rows(inputs.m_offsets, len(scale))
        total = torch.zeros(len(case.sizes) + 1, scale.shape[1], dtype=torch.float64, device=device)
        bound = total.index_add(0, slot, error + scale * EPS * max(1, used))[:-1]
        assert grad_bias.dtype == torch.float32
        assert bool(((grad_bias.double() - want["bias"]).abs() <= bound).all())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int32)


FUSED_CASES = [
    *CASES,
    Case(sizes=(33, 0, 140), width=128, tail=200),
    Case(sizes=(129,), width=384, weighted=False),
    Case(sizes=(5, 0, 7), width=320, spec=OAI, biased=True, tail=3),
    Case(sizes=(2, 3), width=128, spec=oai_spec(limit=0.5, layout="concatenated")),
    Case(sizes=(2, 3), width=64, spec=GluSpec(layout="interleaved")),
]


@pytest.mark.parametrize("case", FUSED_CASES, ids=str)
@pytest.mark.parametrize("how", ["division", "pow2"])
def test_gradients_quantized_in_the_pass_have_the_bits_of_quantizing_afterwards(
    device: str, case: Case, how: str
) -> None:
    """Gates and ups apart and side by side, blocks that hold both; sums of rows and columns within their bound."""
    inputs = make_inputs(case, device)
    h, probs, bias, m_offsets = inputs.tensors
    call = {"spec": case.spec, "bias": bias, "m_offsets": m_offsets, "backend": "triton"}
    got = swiglu_backward_quantize(inputs.grad_out, h, probs, rounding=how, **call)
    grad_h, grad_probs, grad_bias = swiglu_backward(inputs.grad_out, h, probs, **call)
    rows, columns = quantize_both(grad_h, m_offsets, rounding=how, backend="triton")
    act = quantize_columns(swiglu(h, probs, **call), m_offsets, rounding=how, backend="triton")
    pairs = zip(
        (got.rows.data, got.rows.scale, *got.columns, *got.act), (rows.data, rows.scale, *columns, *act), strict=True
    )
    for first, second in pairs:
        assert torch.equal(bits(first), bits(second))
    used = sum(case.sizes)
    for mine, other, terms, dim in ((got.probs, grad_probs, case.width, 1), (got.bias, grad_bias, max(1, used), 0)):
        assert (mine is None) == (other is None)
        if mine is None or other is None:
            continue
        parts = (
            (inputs.grad_out.float() * swiglu(h, None, **call).float()).nan_to_num().abs().sum(1)
            if dim
            else grad_h.float().abs().sum(0).expand_as(other)
        )
        # Both orders are off by at most `terms` roundings of the sum of magnitudes, which bf16 gives within 1 %.
        assert bool(((mine - other).abs() <= 2 * terms * EPS * 1.02 * parts + 1e-30)[slice(used) if dim else ...].all())


@pytest.mark.parametrize("spec", [SWIGLU, GluSpec(layout="interleaved")], ids=str)
def test_rows_that_begin_amid_a_word_are_quantized_in_several_passes(device: str, spec: GluSpec) -> None:
    """Two bf16 are read as one word where they lie as one."""
    case = Case(sizes=(2, 0, 3), width=128, spec=spec)
    inputs = make_inputs(case, device)
    amid = torch.empty(5, 257, dtype=torch.bfloat16, device=device)[:, 1:]
    amid.copy_(inputs.h)
    assert amid.data_ptr() % 4
    got, want = (
        swiglu_backward_quantize(
            inputs.grad_out, h, inputs.probs, m_offsets=inputs.m_offsets, spec=spec, backend="triton"
        )
        for h in (amid, inputs.h)
    )
    assert torch.equal(bits(got.rows.data), bits(want.rows.data))
    assert torch.equal(bits(got.columns[0]), bits(want.columns[0]))


@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=str)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_autograd_reaches_the_explicit_gradient(device: str, case: Case, backend: str) -> None:
    inputs = make_inputs(case, device)
    leaves = [t.clone().requires_grad_() for t in inputs.tensors[:3] if t is not None]
    h, probs, *bias = leaves
    call = {"spec": case.spec, "m_offsets": inputs.m_offsets, "backend": backend}
    out = swiglu(h, probs, bias=bias[0] if bias else None, **call)
    got = torch.autograd.grad(out, leaves, inputs.grad_out)
    want = [g for g in swiglu_backward(inputs.grad_out, *inputs.tensors[:2], bias=inputs.bias, **call) if g is not None]
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, want, strict=True))
    expanded = torch.autograd.grad(swiglu(h, probs, bias=bias[0] if bias else None, **call).sum(), h)[0]
    assert bool(expanded.isfinite().all())


@pytest.mark.parametrize("spec", [SWIGLU, oai_spec(limit=1.0), GluSpec(alpha=2.0, layout="interleaved")], ids=str)
def test_the_reference_passes_gradcheck_and_its_gradient_is_autograds(spec: GluSpec) -> None:
    case = Case(sizes=(2, 0, 3), width=4, spec=spec, biased=True, dtype=torch.float64)
    inputs = make_inputs(case, "cpu", torch.float64)
    leaves = [t.clone().requires_grad_() for t in inputs.tensors[:3] if t is not None]

    def run(h: torch.Tensor, probs: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return reference.swiglu(glu_rows(h, probs, bias, inputs.m_offsets, spec))

    assert torch.autograd.gradcheck(run, leaves)
    got = reference.swiglu_backward(inputs.grad_out, glu_rows(*inputs.tensors, spec))
    want = torch.autograd.grad(run(*leaves), leaves, inputs.grad_out)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(got, want, strict=True))


def test_gradients_stop_beyond_the_limit_and_pass_at_it(device: str) -> None:
    h = torch.tensor([[7.0, 1.0], [7.5, 1.0], [1.0, -7.0], [1.0, -7.5]], device=device)
    for backend in ("triton", "reference"):
        grad, _, _ = swiglu_backward(torch.ones(4, 1, device=device), h, spec=OAI, backend=backend)
        assert (grad != 0).tolist() == [[True, True], [False, True], [True, True], [True, False]]


def test_nan_stays_nan(device: str) -> None:
    h = torch.zeros(1, 32, device=device)
    h[0, 3] = float("nan")
    for spec in (SWIGLU, OAI, oai_spec(layout="concatenated")):
        for backend in ("triton", "reference"):
            assert int(swiglu(h, spec=spec, backend=backend).isnan().sum()) == 1


def test_saturated_gates_give_zero_or_themselves(device: str) -> None:
    h = torch.tensor([[-1e30, 2.0], [-500.0, 2.0], [500.0, 2.0], [1e30, 1.0]], device=device)
    for backend in ("triton", "reference"):
        assert swiglu(h, backend=backend)[:, 0].tolist() == [0.0, 0.0, 1000.0, h[3, 0].item()]


def test_both_layouts_hold_the_same_values(device: str) -> None:
    gate, up = torch.randn(2, 20, 48, generator=torch.Generator().manual_seed(3)).to(device)
    concatenated, interleaved = GluSpec(), GluSpec(layout="interleaved")
    results = [
        swiglu(reference.join(gate, up, spec), spec=spec, backend="triton") for spec in (concatenated, interleaved)
    ]
    assert torch.equal(*results)


def test_gpt_oss_is_its_published_formula(device: str) -> None:
    """Written out as in gpt_oss/torch/model.py: glu = x_glu sigmoid(alpha x_glu), times (x_linear + 1)."""
    h = torch.randn(30, 64, generator=torch.Generator().manual_seed(4)).mul(5).to(device)
    x_glu, x_linear = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(min=-7.0, max=7.0)
    want = x_glu * torch.sigmoid(1.702 * x_glu) * (x_linear + 1)
    assert torch.allclose(swiglu_oai(h, backend="triton"), want, rtol=64 * EPS, atol=1e-30)


def test_a_row_does_not_depend_on_other_rows(device: str) -> None:
    case = Case(sizes=(60, 37), width=96, spec=OAI, biased=True)
    inputs = make_inputs(case, device)
    whole = swiglu(inputs.h, inputs.probs, spec=OAI, **inputs.named, backend="triton")
    grads = swiglu_backward(inputs.grad_out, inputs.h, inputs.probs, spec=OAI, **inputs.named, backend="triton")
    assert inputs.probs is not None
    alone = slice(70, 71)
    offsets = torch.tensor([0, 0, 1], dtype=torch.int32, device=device)
    call = {"spec": OAI, "bias": inputs.bias, "m_offsets": offsets, "backend": "triton"}
    one = inputs.h[alone], inputs.probs[alone]
    assert torch.equal(swiglu(*one, **call), whole[alone])
    one_grads = swiglu_backward(inputs.grad_out[alone], *one, **call)
    assert torch.equal(one_grads[0], grads[0][alone])
    assert torch.equal(one_grads[1], grads[1][alone])


def test_strided_input_is_read_in_place(device: str) -> None:
    wide = torch.randn(10, 256, device=device)
    got = swiglu(wide[:, 64:192], backend="triton")
    assert torch.equal(got, swiglu(wide[:, 64:192].contiguous(), backend="triton"))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_ops_pass_opcheck(device: str, backend: str) -> None:
    case = Case(sizes=(3, 0, 4), width=16, spec=OAI, biased=True, dtype=torch.float32)
    inputs = make_inputs(case, device)
    leaves = [t.clone().requires_grad_() for t in inputs.tensors[:3] if t is not None]
    constants = (OAI.alpha, OAI.limit, OAI.up_shift, OAI.layout)
    ops = torch.ops.moe_rl
    torch.library.opcheck(ops.swiglu.default, (*leaves, inputs.m_offsets, *constants, backend))
    torch.library.opcheck(ops.swiglu.default, (leaves[0], None, None, None, *constants, backend))
    torch.library.opcheck(ops.swiglu_backward.default, (inputs.grad_out, *inputs.tensors, *constants, backend))
    torch.library.opcheck(
        ops.swiglu_quantize.default,
        (*inputs.tensors, *constants, "division", backend),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: swiglu(torch.zeros(2, 3)), r"h must be \[M, 2 I\]"),
        (lambda: swiglu(torch.zeros(2, 4, dtype=torch.int32)), r"h must be floating \[M, 2 I\], got torch.int32"),
        (lambda: swiglu(torch.zeros(4, 2).t()), "must have stride 1"),
        (lambda: swiglu(torch.zeros(2, 4), torch.zeros(3)), "probs must be float32"),
        (lambda: swiglu(torch.zeros(2, 4), bias=torch.zeros(1, 4)), "`bias` needs `m_offsets`"),
        (lambda: swiglu(torch.zeros(2, 4), m_offsets=torch.tensor([0, 2])), "m_offsets must be dense int32"),
        (
            lambda: swiglu(torch.zeros(2, 4), bias=torch.zeros(2, 4), m_offsets=torch.zeros(2, dtype=torch.int32)),
            "bias must be floating",
        ),
        (lambda: swiglu_backward(torch.zeros(2, 4), torch.zeros(2, 4)), "grad_out must be"),
        (lambda: swiglu(torch.zeros(2, 4), torch.zeros(2, device="meta")), "probs is on meta, but must be on cpu"),
        (
            lambda: swiglu(torch.zeros(2, 4), m_offsets=torch.tensor([0, 2, 1], dtype=torch.int32)),
            r"never decrease, got \[0, 2, 1\]",
        ),
        (lambda: oai_spec(limit=-1.0), "limit must be positive"),
        (lambda: GluSpec(layout="striped"), "is not one of concatenated, interleaved"),  # type: ignore[arg-type]
    ],
)
def test_misuse_gets_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        call()
