"""Hooks on tensors, in one process: gradients that go to `main_grad`, and ranges around a part's backward."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron import backward_ranges
    from moe_rl.megatron.backward_ranges import BackwardRanges
    from moe_rl.megatron.expert_views.main_grad import fused_operands, fuses


class Experts:
    """One expert at home, of a matrix and a bias."""

    num_local_experts = 1

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
        for parameter in self.parameters:
            parameter.main_grad = torch.ones_like(parameter)

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        assert slot == 0
        return self.parameters


def test_matrices_are_leaves_whose_gradients_add_up_in_main_grad() -> None:
    """A home, an empty slot and a replica; the third is a matrix that nobody trains."""
    experts = Experts()
    matrix, bias = experts.parameters
    copy, frozen, own = torch.full((2, 2), 3.0, requires_grad=True), torch.ones(2, 2), torch.ones(2, 2)
    rows = torch.ones(1, 2, requires_grad=True)
    told, operands = fused_operands(
        experts,  # type: ignore[arg-type]
        rows,
        [experts.parameters, None, (copy, frozen)],
        [None, None, (own, torch.zeros(2, 2))],
    )
    assert operands[1] is None
    home, replica = operands[0], operands[2]
    assert home is not None
    assert replica is not None
    assert home[0] is not matrix
    assert home[1] is bias, "gradients of biases are never fused"
    assert replica[1] is frozen
    assert home[0].main_grad is matrix.main_grad
    assert replica[0].main_grad is own
    for count in (1, 2):
        (told @ home[0] + told @ replica[0]).sum().backward(retain_graph=True)
        assert torch.equal(matrix.main_grad, torch.full((2, 2), 1.0 + count)), "added to what was there"
        assert torch.equal(own, torch.full((2, 2), 1.0 + count))
        assert home[0].grad is None
        assert rows.grad is not None


@pytest.mark.parametrize(
    ("fusion", "gradients", "trains", "expected"),
    [(True, True, True, True), (False, True, True, False), (True, False, True, False), (True, True, False, False)],
)
def test_weights_are_fused_where_all_of_it_holds(fusion: bool, gradients: bool, trains: bool, expected: bool) -> None:
    weights = [torch.ones(2), torch.ones(2, 2, requires_grad=trains)]
    with torch.set_grad_enabled(gradients):
        assert fuses(SimpleNamespace(gradient_accumulation_fusion=fusion), weights) == expected  # type: ignore[arg-type]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What opened and closed, ranges being on."""
    found: list[str] = []

    @contextmanager
    def opened(category: str, *, layer: int, micro_batch: int, phase: str) -> Iterator[None]:
        found.append(f"{category} {layer} {micro_batch} {phase}")
        yield
        found.append(f"end of {category}")

    monkeypatch.setattr(backward_ranges.ranges, "range", opened)
    monkeypatch.setattr(backward_ranges.ranges, "is_enabled", lambda: True)
    return found


def noted(events: list[str], name: str, tensor: torch.Tensor) -> torch.Tensor:
    tensor.register_hook(lambda _: events.append(name))
    return tensor


def test_a_range_is_open_from_the_first_gradient_of_a_parts_results_to_the_last_of_its_inputs(
    events: list[str],
) -> None:
    ranges = BackwardRanges()
    first, second, fixed = (torch.ones(2, requires_grad=trains) for trains in (True, True, False))
    left, right = first * 2, second * 3 + fixed
    ranges.mark("expert_gemm", [first, second, fixed], [left, right], layer=4, micro_batch=1)
    noted(events, "first", first)
    noted(events, "second", second)
    result = noted(events, "result", left + right)
    result.sum().backward()
    assert events[:2] == ["result", "expert_gemm 4 1 backward"]
    end = "end of expert_gemm"
    assert events[2:] in (["first", end, "second"], ["second", end, "first"]), "the last input's hook closes it"


def test_a_part_that_follows_closes_the_one_before_and_none_is_marked_when_it_is_off(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part's input needs no gradient that would close its range."""
    ranges = BackwardRanges()
    start: Any = torch.ones(2, requires_grad=True)
    middle = start * 2
    end = middle * 3
    ranges.mark("dispatch", [start], [middle], layer=0, micro_batch=0)
    ranges.mark("combine", [torch.ones(2)], [end], layer=0, micro_batch=0)
    end.sum().backward()
    assert events == [
        *("combine 0 0 backward", "end of combine"),
        *("dispatch 0 0 backward", "end of dispatch"),
    ]
    events.clear()
    with torch.no_grad():
        ranges.mark("dispatch", [start], [start], layer=0, micro_batch=0)
    monkeypatch.setattr(backward_ranges.ranges, "is_enabled", lambda: False)
    again = start * 2
    ranges.mark("dispatch", [start], [again], layer=0, micro_batch=0)
    again.sum().backward()
    assert events == []
