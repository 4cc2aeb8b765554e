"""One layer's experts through `GroupedExperts`, in one process: whose weights are read, and where gradients go."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="needs megatron-core")

from moe_rl.core.errors import InvalidInputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron.expert_views import grouped
    from moe_rl.megatron.expert_views.grouped import KEPT_TABLES, GroupedSlots, share_replica_codes
    from moe_rl.megatron.expert_views.grouped_compute import GroupedCompute

HIDDEN, FFN, HOMES = 32, 16, 2
CONFIG: Any = SimpleNamespace(
    gated_linear_unit=True, activation_func=F.silu, activation_func_clamp_value=None, glu_linear_offset=0.0
)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4).to(torch.bfloat16)


class Homes:
    """Experts of fc1 [2 F, H] and fc2 [H, F]."""

    num_local_experts = HOMES

    def __init__(self, *, trained: bool = True) -> None:
        self.weights = [
            [torch.nn.Parameter(weight, requires_grad=trained) for weight in expert_of(seed)] for seed in range(HOMES)
        ]

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        return self.weights[slot]


def expert_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(2 * FFN, HIDDEN, seed=10 + seed), drawn(HIDDEN, FFN, seed=20 + seed)


class Compute(GroupedCompute):
    """Notes which matrices are made codes of."""

    def __init__(self, recipe: str) -> None:
        super().__init__(recipe=recipe)
        self.quantized: list[list[int]] = []

    def quantize(self, weights: Any, into: Any) -> None:
        if weights:
            self.quantized.append([weight.data_ptr() for weight in weights])
        super().quantize(weights, into)


def slots_of(homes: Homes, recipe: str = "bf16") -> tuple[GroupedSlots, Compute]:
    compute = Compute(recipe)
    return GroupedSlots(homes, CONFIG, compute), compute


def by_definition(rows: torch.Tensor, counts: list[int], probs: torch.Tensor, experts: list[Any]) -> torch.Tensor:
    """Return [T, H], every row through the gated MLP of its slot, in float32."""
    outputs = []
    parts = zip(rows.float().split(counts), probs.split(counts), experts, strict=True)
    for part, of_rows, (fc1, fc2) in parts:
        gate, up = (part @ fc1.float().T).chunk(2, dim=1)
        outputs.append((F.silu(gate) * up * of_rows[:, None]) @ fc2.float().T)
    return torch.cat(outputs)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a tensor is another one but for rounding to bf16."""
    difference = torch.linalg.vector_norm(found.float() - expected.float())
    return bool(difference <= 2**-7 * torch.linalg.vector_norm(expected.float()))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("has_main_grad", [False, True])
@pytest.mark.parametrize("copied_slot", [2, 3])
def test_homes_and_copies_compute_and_gather_gradients_where_they_belong(
    on_device: bool, has_main_grad: bool, copied_slot: int
) -> None:
    """Two slots of homes and two of copies, one of them empty; two rows behind the last slot's are nobody's."""
    homes = Homes()
    if has_main_grad:
        for parameter in [p for of_slot in homes.weights for p in of_slot]:
            parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
    view, _ = slots_of(homes)
    view.require_float32_gradients()
    copied = [weight.requires_grad_() for weight in expert_of(7)]
    counts, spare = [3, 2, 0, 0], 2 * on_device
    counts[copied_slot] = 4
    total = sum(counts)
    rows, probs = drawn(total + spare, HIDDEN, seed=1).requires_grad_(), torch.linspace(0.2, 1.0, total + spare)
    gradients = [torch.zeros_like(weight, dtype=torch.float32) for weight in copied]
    # Rows come as counts on the host, or as a tensor that stays on its device.
    given = torch.tensor(counts) if on_device else counts
    weights, targets = ([value if slot == copied_slot else None for slot in range(4)] for value in (copied, gradients))
    output = view.forward(rows, given, probs, weights, targets)
    experts = [*homes.weights, copied]
    filled = [3, 2, 4]
    plain = [[weight.detach().clone().requires_grad_() for weight in expert] for expert in experts]
    plain_rows = rows.detach().clone().requires_grad_()
    expected = by_definition(plain_rows[:total], filled, probs[:total], plain)
    assert close(output[:total], expected)
    weights_of_output = drawn(total, HIDDEN, seed=2)
    (output[:total] * weights_of_output).float().sum().backward()
    (expected * weights_of_output).sum().backward()
    assert close(rows.grad[:total], plain_rows.grad[:total])
    for expert, its_plain in zip(homes.weights, plain, strict=False):
        for parameter, plain_parameter in zip(expert, its_plain, strict=True):
            if has_main_grad:
                assert close(parameter.main_grad - 1, plain_parameter.grad), "added to what was there"
                assert parameter.grad_added_to_main_grad
            else:
                assert close(parameter.grad, plain_parameter.grad)
    for gathered, plain_parameter in zip(gradients, plain[2], strict=True):
        assert close(gathered, plain_parameter.grad)


@pytest.mark.parametrize(("trained", "records"), [(True, False), (False, True)])
def test_nothing_is_gathered_of_experts_that_do_not_train_now(trained: bool, records: bool) -> None:
    homes = Homes(trained=trained)
    view, _ = slots_of(homes)
    rows, probs = drawn(4, HIDDEN, seed=1), torch.ones(4)
    with torch.set_grad_enabled(records):
        output = view.forward_homes(rows, torch.tensor([1, 3]), probs)
    assert not output.requires_grad
    assert close(output, by_definition(rows, [1, 3], probs, homes.weights))


def test_codes_of_homes_are_made_once_while_weights_are_fixed() -> None:
    homes = Homes(trained=False)
    view, compute = slots_of(homes, "fp8-block")
    assert view.is_fp8
    rows, probs = drawn(4, HIDDEN, seed=1), torch.ones(4)
    this_pass, next_pass = object(), object()
    made = []
    for fixed_during in (this_pass, this_pass, next_pass, None, None, next_pass):
        compute.quantized.clear()
        view.begin(fixed_during)
        outputs = [view.forward_homes(rows, torch.tensor([1, 3]), probs) for _ in range(2)]
        assert torch.equal(*outputs)
        made.append(len(compute.quantized))
    assert made == [1, 0, 1, 1, 1, 1]
    assert len(compute.quantized[0]) == 2 * HOMES
    room = [codes.plain.data.data_ptr() for codes in view._home_codes]
    for of_slot in homes.weights:
        for parameter in of_slot:
            parameter.data.neg_()
    view.begin(object())
    # Of both matrices' signs, fc2's and the up half's cancel out; the gate's does not.
    changed = view.forward_homes(rows, torch.tensor([1, 3]), probs)
    assert not torch.equal(changed, outputs[0])
    assert [codes.plain.data.data_ptr() for codes in view._home_codes] == room, "tables point there"
    view.release()
    assert (view._home_codes, view._tables, view.replica_codes) == ([], {}, {})
    assert torch.equal(view.forward_homes(rows, torch.tensor([1, 3]), probs), changed)


def test_codes_of_copies_are_made_when_they_have_arrived_for_forward_and_for_backward() -> None:
    views = [slots_of(Homes(), "fp8-block") for _ in range(2)]
    share_replica_codes([views[0][0], SimpleNamespace(), views[1][0]])  # type: ignore[list-item]
    view, compute = views[0]
    assert views[1][0].replica_codes is view.replica_codes
    view.begin(object())
    copied = expert_of(7)
    arrived = [weight.data_ptr() for weight in copied]
    gradients = [torch.zeros_like(weight, dtype=torch.float32) for weight in copied]
    rows, probs = drawn(4, HIDDEN, seed=1).requires_grad_(), torch.ones(4)
    output = view.forward(rows, [1, 1, 0, 2], probs, [None, None, None, copied], [None, None, None, gradients])
    assert compute.quantized[1:] == [arrived], "behind the homes'"
    assert set(view.replica_codes) == {(1, 0), (1, 1)}, "by the slot among copies"
    compute.quantized.clear()
    output.float().sum().backward()
    assert compute.quantized == [arrived], "another layer has used their place since"
    places = {key: codes.plain.data.data_ptr() for key, codes in view.replica_codes.items()}
    other, others_compute = views[1]
    other.begin(object())
    other.forward(rows, [1, 1, 0, 2], probs, [None, None, None, copied], [None, None, None, gradients])
    assert len(others_compute.quantized) == 2
    assert {key: codes.plain.data.data_ptr() for key, codes in view.replica_codes.items()} == places


def test_as_many_tables_are_kept_as_fit_and_the_oldest_goes() -> None:
    view, _ = slots_of(Homes())
    parts = [[drawn(16, 16, seed=seed)] for seed in range(KEPT_TABLES + 1)]
    tables = [view._table(of_one, "matrices") for of_one in parts[:KEPT_TABLES]]
    assert all(view._table(of_one, "matrices") is table for of_one, table in zip(parts, tables, strict=False))
    assert [table.tolist() for table in tables] == [[part.data_ptr()] for (part,) in parts[:KEPT_TABLES]]
    view._table(parts[KEPT_TABLES], "matrices")
    assert len(view._tables) == KEPT_TABLES
    assert view._table(parts[1], "matrices") is tables[1]
    assert view._table(parts[0], "matrices") is not tables[0]


def test_what_cannot_be_computed_is_refused() -> None:
    odd, partly, mixed = Homes(), Homes(), Homes()
    odd.weights[0][1] = torch.nn.Parameter(torch.zeros(HIDDEN, 24))
    with pytest.raises(InvalidInputError, match="multiples of 16, but one dimension on this rank is 24"):
        slots_of(odd)
    partly.weights[0][1].requires_grad_(False)
    with pytest.raises(InvalidInputError, match="only some of their weights are frozen"):
        slots_of(partly)
    mixed.weights[1][1].main_grad = torch.zeros(HIDDEN, FFN, dtype=torch.bfloat16)
    view, _ = slots_of(mixed)
    with pytest.raises(InvalidInputError, match=r"torch\.bfloat16: set grad_reduce_in_fp32=True"):
        view.require_float32_gradients()


def test_values_for_a_gpu_are_sent_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Sent:
        def pin_memory(self) -> "Sent":
            asked.append("pinned")
            return self

        def to(self, device: torch.device, *, non_blocking: bool) -> "Sent":
            asked.append((device, non_blocking))
            return self

    assert grouped._sent([1, 2], torch.device("cpu")).tolist() == [1, 2]
    monkeypatch.setattr(torch, "tensor", lambda values, dtype: Sent())
    grouped._sent([1, 2], torch.device("cuda", 0))
    assert asked == ["pinned", (torch.device("cuda", 0), True)]
    grouped._sent([1, 2], torch.device("cpu"))
    assert len(asked) == 2
