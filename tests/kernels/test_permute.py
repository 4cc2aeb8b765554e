"""Permute and unpermute equal their references bit for bit; a token's sum depends on nothing but its own rows."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.permutation import reference
from moe_rl.kernels.permutation.op import RowMap, build_row_map, permute, unpermute

EPS = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: int
    top_k: int
    num_slots: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    routing: str = "random"
    first_slot: int = 0

    def __str__(self) -> str:
        return (
            f"T{self.num_tokens}-K{self.top_k}-S{self.num_slots}-H{self.hidden}-{str(self.dtype)[6:]}-{self.routing}"
            f"-from{self.first_slot}"
        )


CASES = [
    Case(num_tokens=0, top_k=2, num_slots=4, hidden=16),
    Case(num_tokens=1, top_k=1, num_slots=1, hidden=1),
    Case(num_tokens=1, top_k=4, num_slots=4, hidden=33),
    Case(num_tokens=140, top_k=2, num_slots=5, hidden=48),
    Case(num_tokens=50, top_k=3, num_slots=8, hidden=520, dtype=torch.float32),
    Case(num_tokens=70, top_k=2, num_slots=6, hidden=32, dtype=torch.float16, routing="one_slot"),
    Case(num_tokens=65, top_k=4, num_slots=9, hidden=40, routing="dropped"),
    Case(num_tokens=65, top_k=2, num_slots=9, hidden=40, routing="all_dropped"),
    Case(num_tokens=40, top_k=8, num_slots=8, hidden=64, routing="every_slot"),
    Case(num_tokens=90, top_k=4, num_slots=3, hidden=24, routing="random", first_slot=2),
]


def make_slot_map(case: Case, generator: torch.Generator) -> torch.Tensor:
    shape = (case.num_tokens, case.top_k)
    if case.routing == "one_slot":
        return torch.full(shape, 3, dtype=torch.int32)
    if case.routing == "all_dropped":
        return torch.full(shape, -1, dtype=torch.int32)
    # Slots below first_slot and beyond the last belong to other ranks; slot num_slots // 2 stays empty.
    scores = torch.rand(case.num_tokens, case.num_slots + 2 * case.first_slot, generator=generator)
    if case.routing == "every_slot":
        return torch.argsort(scores, dim=1)[:, : case.top_k].to(torch.int32)
    if case.num_slots > case.top_k:
        scores[:, case.num_slots // 2] = -1.0
    slots = torch.argsort(scores, dim=1, descending=True)[:, : case.top_k].to(torch.int32)
    if case.routing == "dropped":
        slots[torch.rand(shape, generator=generator) < 0.4] = -1
    return slots


@dataclass(frozen=True, kw_only=True)
class Inputs:
    slot_map: torch.Tensor
    x: torch.Tensor
    probs: torch.Tensor
    y: torch.Tensor


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    slot_map = make_slot_map(case, generator).to(device)
    x = torch.randn(case.num_tokens, case.hidden, generator=generator).to(case.dtype).to(device)
    probs = torch.rand(case.num_tokens, case.top_k, generator=generator).to(device)
    y = torch.randn(case.num_tokens * case.top_k, case.hidden, generator=generator).to(case.dtype).to(device)
    return Inputs(slot_map=slot_map, x=x, probs=probs, y=y)


def row_map_of(case: Case, inputs: Inputs, backend: str = "reference") -> RowMap:
    return build_row_map(inputs.slot_map, case.num_slots, first_slot=case.first_slot, backend=backend)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_row_map_is_the_references(device: str, case: Case) -> None:
    inputs = make_inputs(case, device)
    got, want = row_map_of(case, inputs, "triton"), row_map_of(case, inputs)
    for name in ("m_offsets", "row_to_token", "token_k_to_row"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_stand_in_slot_order_and_within_a_slot_in_token_order(device: str, case: Case) -> None:
    """The definition, pair by pair, without sorting."""
    inputs = make_inputs(case, device)
    rows = row_map_of(case, inputs, "triton")
    offsets, row_to_token = rows.m_offsets.tolist(), rows.row_to_token.tolist()
    expected: list[int] = []
    for slot in range(case.first_slot, case.first_slot + case.num_slots):
        assert offsets[slot - case.first_slot] == len(expected)
        for token, choices in enumerate(inputs.slot_map.tolist()):
            for k, chosen in enumerate(choices):
                if chosen == slot:
                    assert rows.token_k_to_row[token, k] == len(expected)
                    expected.append(token)
    assert offsets[-1] == len(expected)
    assert row_to_token == expected + [-1] * (len(row_to_token) - len(expected))
    assert int((rows.token_k_to_row >= 0).sum()) == len(expected)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_both_directions_give_the_references_bits(device: str, case: Case, weighted: bool) -> None:
    inputs = make_inputs(case, device)
    rows, probs = row_map_of(case, inputs), inputs.probs if weighted else None
    got, want = (permute(inputs.x, probs, rows, backend=name) for name in ("triton", "reference"))
    assert torch.equal(got[0], want[0])
    assert (got[1] is None) == (want[1] is None) == (not weighted)
    assert got[1] is None or torch.equal(got[1], want[1])
    combined = [unpermute(inputs.y, probs, rows, backend=name) for name in ("triton", "reference")]
    assert torch.equal(*combined)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_autograd_of_the_reference(device: str, case: Case) -> None:
    """Row gradients bit for bit; a probability's gradient is a sum of H products: error <= H eps sum |products|."""
    inputs = make_inputs(case, device)
    rows = row_map_of(case, inputs)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(inputs.x.shape, generator=generator).to(device)
    row_weights = torch.randn(inputs.y.shape, generator=generator).to(device)

    def gradients(run_permute: Callable[..., object], run_unpermute: Callable[..., object]) -> list[torch.Tensor]:
        x, y, probs, carried = (t.clone().requires_grad_() for t in (inputs.x, inputs.y, inputs.probs, inputs.probs))
        x_rows, row_probs = run_permute(x, carried)
        loss = (x_rows.float() * row_weights).sum() + (row_probs * row_weights[:, 0]).sum()
        loss = loss + (run_unpermute(y, probs).float() * weights).sum()
        # With no tokens the reference's result does not depend on its inputs.
        return list(torch.autograd.grad(loss, (x, carried, y, probs), allow_unused=True, materialize_grads=True))

    index = (rows.row_to_token, rows.token_k_to_row)
    want = gradients(
        lambda x, probs: reference.permute(x, probs, *index), lambda y, probs: reference.unpermute(y, probs, index[1])
    )
    terms = inputs.y.float().abs() * reference.permute(weights.abs(), None, *index)[0]
    bound = reference.gather_row_values(terms.sum(1), index[1]) * (2 * case.hidden * EPS)
    for backend in ("triton", "reference"):
        got = gradients(
            lambda x, probs, name=backend: permute(x, probs, rows, backend=name),
            lambda y, probs, name=backend: unpermute(y, probs, rows, backend=name),
        )
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[2], want[2])
        assert bool(((got[3] - want[3]).abs() <= bound).all())
        # autograd of indexing adds a token's rows in the dtype of x, one by one: K roundings of partial sums.
        partial = reference.unpermute(row_weights.abs().to(case.dtype).float(), None, index[1])
        step = torch.finfo(case.dtype).eps * case.top_k
        assert bool(((got[0].float() - want[0].float()).abs() <= step * partial).all())


def test_the_reference_passes_gradcheck() -> None:
    case = Case(num_tokens=5, top_k=3, num_slots=4, hidden=6, dtype=torch.float64, routing="dropped")
    inputs = make_inputs(case, "cpu")
    rows = row_map_of(case, inputs)
    index = (rows.row_to_token, rows.token_k_to_row)
    x, y = (t.double().requires_grad_() for t in (inputs.x, inputs.y))
    probs = inputs.probs.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, p: reference.permute(a, p, *index), (x, probs))
    assert torch.autograd.gradcheck(lambda a, p: reference.unpermute(a, p, index[1]), (y, probs))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_unpermute_after_permute_is_the_weighted_identity(device: str, backend: str) -> None:
    """Weights that are powers of two and sum to one leave every bit of a token as it was."""
    case = Case(num_tokens=40, top_k=4, num_slots=7, hidden=40)
    inputs = make_inputs(case, device)
    rows = row_map_of(case, inputs, backend)
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125], device=device).expand(40, 4)
    x_rows, _ = permute(inputs.x, None, rows, backend=backend)
    assert torch.equal(unpermute(x_rows, weights, rows, backend=backend), inputs.x)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_dispatch_then_combine_is_the_weighted_sum_over_experts(device: str, backend: str) -> None:
    """With expert s multiplying by 2^s everything but the last rounding is exact, so the dense form agrees to a bit."""
    case = Case(num_tokens=100, top_k=3, num_slots=6, hidden=32, routing="dropped")
    inputs = make_inputs(case, device)
    rows = row_map_of(case, inputs, backend)
    x_rows, _ = permute(inputs.x, None, rows, backend=backend)
    slot_of_row = torch.searchsorted(rows.m_offsets, torch.arange(300, dtype=torch.int32, device=device), right=True)
    y = x_rows * (2.0 ** (slot_of_row - 1)).to(x_rows.dtype)[:, None]
    probs = torch.ones(100, 3, device=device)
    factor = torch.where(inputs.slot_map >= 0, 2.0 ** inputs.slot_map.clamp_min(0), 0.0).sum(1, dtype=torch.float64)
    want = (inputs.x.double() * factor[:, None]).to(torch.bfloat16)
    assert torch.equal(unpermute(y, probs, rows, backend=backend), want)


def test_a_tokens_result_does_not_depend_on_other_tokens(device: str) -> None:
    case = Case(num_tokens=60, top_k=3, num_slots=5, hidden=72)
    inputs = make_inputs(case, device)

    def result(keep: slice) -> torch.Tensor:
        rows = build_row_map(inputs.slot_map[keep], 5, backend="triton")
        x_rows, row_probs = permute(inputs.x[keep], inputs.probs[keep], rows, backend="triton")
        assert row_probs is not None
        return unpermute(x_rows * row_probs[:, None].to(x_rows.dtype), None, rows, backend="triton")

    assert torch.equal(result(slice(17, 18)), result(slice(None))[17:18])


def test_renaming_slots_moves_rows_and_keeps_the_bits_of_the_sum(device: str) -> None:
    case = Case(num_tokens=80, top_k=4, num_slots=6, hidden=40)
    inputs = make_inputs(case, device)
    renamed = torch.tensor([4, 2, 5, 0, 3, 1], dtype=torch.int32, device=device)
    results, sizes = [], []
    for slot_map in (inputs.slot_map, renamed[inputs.slot_map]):
        rows = build_row_map(slot_map, 6, backend="triton")
        x_rows, _ = permute(inputs.x, None, rows, backend="triton")
        results.append(unpermute(x_rows, inputs.probs, rows, backend="triton"))
        sizes.append(rows.m_offsets.diff())
    assert torch.equal(sizes[0], sizes[1][renamed])
    assert torch.equal(*results)


def test_a_repeated_slot_takes_a_row_each_time(device: str) -> None:
    slot_map = torch.tensor([[1, 1], [0, 1]], dtype=torch.int32, device=device)
    rows = build_row_map(slot_map, 2, backend="triton")
    assert rows.row_to_token.tolist() == [1, 0, 0, 1]
    assert rows.token_k_to_row.tolist() == [[1, 2], [0, 3]]


def test_rows_of_no_token_are_zero_and_never_read(device: str) -> None:
    """NaN in the unused tail reaches neither sums nor gradients."""
    case = Case(num_tokens=30, top_k=3, num_slots=4, hidden=24, routing="dropped")
    inputs = make_inputs(case, device)
    for backend in ("triton", "reference"):
        rows = row_map_of(case, inputs, backend)
        filled = int(rows.m_offsets[-1])
        x_rows, row_probs = permute(inputs.x, inputs.probs, rows, backend=backend)
        assert row_probs is not None
        assert not x_rows[filled:].any()
        assert not row_probs[filled:].any()
        poisoned = inputs.y.clone()
        poisoned[filled:] = float("nan")
        poisoned.requires_grad_()
        probs = inputs.probs.clone().requires_grad_()
        out = unpermute(poisoned, probs, rows, backend=backend)
        grads = torch.autograd.grad(out.float().sum(), (poisoned, probs))
        assert all(bool(t.isfinite().all()) for t in (out, *grads))


def test_strided_inputs_are_read_in_place(device: str) -> None:
    case = Case(num_tokens=40, top_k=2, num_slots=4, hidden=32)
    inputs = make_inputs(case, device)
    wide = torch.cat([inputs.x, inputs.x], dim=1)
    slots = inputs.slot_map.t().contiguous().t()
    rows = build_row_map(slots, 4, backend="triton")
    assert torch.equal(rows.token_k_to_row, row_map_of(case, inputs).token_k_to_row)
    got, _ = permute(wide[:, 8:40], None, rows, backend="triton")
    want, _ = permute(wide[:, 8:40].contiguous(), None, rows, backend="reference")
    assert torch.equal(got, want)
    out = unpermute(torch.cat([want, want], dim=1)[:, :32], inputs.probs, rows, backend="triton")
    assert torch.equal(out, unpermute(want, inputs.probs, rows, backend="reference"))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_ops_pass_opcheck(device: str, backend: str) -> None:
    case = Case(num_tokens=6, top_k=2, num_slots=3, hidden=16, dtype=torch.float32, routing="dropped")
    inputs = make_inputs(case, device)
    rows = row_map_of(case, inputs)
    index = (rows.row_to_token, rows.token_k_to_row)
    x, y = inputs.x.requires_grad_(), inputs.y.requires_grad_()
    probs = inputs.probs.requires_grad_()
    ops = torch.ops.moe_rl
    torch.library.opcheck(ops.build_row_map.default, (inputs.slot_map, 3, 0, backend))
    torch.library.opcheck(ops.permute.default, (x, probs, *index, backend))
    torch.library.opcheck(ops.permute.default, (x, None, *index, backend))
    torch.library.opcheck(ops.unpermute.default, (y, probs, *index, backend))
    torch.library.opcheck(ops.unpermute.default, (y, None, *index, backend))
    torch.library.opcheck(ops.unpermute_backward.default, (x.detach(), y.detach(), probs.detach(), *index, backend))
    torch.library.opcheck(ops.gather_row_values.default, (y.detach()[:, 0].contiguous(), index[1], backend))


def _rows() -> RowMap:
    return build_row_map(torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: build_row_map(torch.zeros(2, 2), 2), "slot_map must be int32"),
        (lambda: build_row_map(torch.zeros(2, 2, dtype=torch.int32), 0), "num_slots must be at least 1"),
        (lambda: permute(torch.zeros(3, 4), None, _rows()), r"x must be floating \[2, H\], got torch.float32 \(3, 4\)"),
        (
            lambda: permute(torch.zeros(2, 4, dtype=torch.int32), None, _rows()),
            r"x must be floating \[2, H\], got torch.int32",
        ),
        (lambda: permute(torch.zeros(4, 2).t(), None, _rows()), "must have stride 1"),
        (lambda: permute(torch.zeros(2, 4), torch.zeros(2, 3), _rows()), "probs must be float32"),
        (
            lambda: unpermute(torch.zeros(2, 4), None, _rows()),
            r"rows must be floating \[4, H\], got torch.float32 \(2, 4\)",
        ),
        (lambda: unpermute(torch.zeros(4, 4), None, _rows(), backend="deepgem"), "unknown kernel backend"),
        (lambda: permute(torch.zeros(2, 4, device="meta"), None, _rows()), "x is on meta, but must be on cpu"),
        (
            lambda: RowMap(m_offsets=torch.zeros(2), row_to_token=torch.zeros(1), token_k_to_row=torch.zeros(1, 1)),
            "m_offsets must be contiguous int32",
        ),
    ],
)
def test_misuse_gets_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        call()
