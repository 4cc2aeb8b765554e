"""Autograd around the experts of a layer, in one process: what is there when experts read, what comes home and when.

The transport is a stand-in of the test: it brings a copy's weights when they are waited for, and a gradient of another
rank when its return is finished. Buffers and autograd functions are the runtime's.
"""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron.exchange import ReplicatedExperts
    from moe_rl.megatron.replica_buffers import ReplicaBuffers
    from moe_rl.megatron.transport import GradientReturn, ReplicaCell, ReplicaCopy

HIDDEN, RANK, LATE = 2, 0, 100.0
"""LATE: of every element of the gradient that another rank brings for the expert in home slot 1."""


class LinearExperts:
    """Two experts of one matrix each, computed by autograd."""

    num_local_experts = 2

    def __init__(self, *, trained: bool = True) -> None:
        weights = torch.arange(8.0).view(2, HIDDEN, HIDDEN)
        self.weights = [torch.nn.Parameter(weight.clone(), requires_grad=trained) for weight in weights]

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        return [self.weights[slot]]

    def forward(self, rows: Any, rows_per_slot: Any, probs: Any, by_slot: Any, gradients: Any) -> torch.Tensor:
        self.gradients = gradients
        parts = rows.split(list(rows_per_slot))
        return torch.cat([part @ weight[0] for part, weight in zip(parts, by_slot, strict=True) if weight is not None])


class Transport:
    """Notes what it is asked in `calls`."""

    def __init__(self, name: str, experts: Any, calls: list[str], *, slots: int = 1) -> None:
        self.name, self.calls, self.rank = name, calls, RANK
        self.experts = experts
        self.buffers = ReplicaBuffers([experts], replica_slots=slots, cross_node_slots=0)
        self.weights = torch.full((slots, HIDDEN * HIDDEN), 3.0)
        self.returns = {1: [torch.full((HIDDEN, HIDDEN), LATE)]}

    def start_push(self, cell: Any, bank: int, experts: Any) -> None:
        assert experts is self.experts
        if bank in cell.banks:
            self.calls.append(f"{self.name} pushed")

    def wait_for_push(self, bank: int) -> None:
        self.calls.append(f"{self.name} there")
        self.buffers.weights.copy_(self.weights)

    def start_return(self, cell: Any, experts: Any) -> GradientReturn:
        assert experts is self.experts
        self.calls.append(f"{self.name} starts home")
        return GradientReturn(cell=cell, experts=experts, loose=self.returns)

    def finish_return(self) -> None:
        self.calls.append(f"{self.name} home")


CELL = ReplicaCell(
    key=(4, 7),
    half=0,
    banks=(0,),
    copies=(ReplicaCopy(home_rank=1, home_slot=0, host_rank=RANK, host_slot=0, ordinal=0, home_capacity=1),),
    rounds=1,
)


class Layer:
    """A layer that hosts one copy, and with `resident` another that stays, in two slots of which the first is empty."""

    def __init__(self, *, trained: bool = True, resident: bool = False) -> None:
        self.calls: list[str] = []
        self.experts: Any = LinearExperts(trained=trained)
        self.transport = Transport("copy", self.experts, self.calls)
        self.residents: Any = None
        if resident:
            stays = Transport("resident", self.experts, self.calls, slots=2)
            stays.weights.fill_(5.0)
            self.owed: GradientReturn | None = None
            self.residents = SimpleNamespace(
                transport=stays,
                hosted_slots=[1],
                start_push=lambda: self.calls.append("resident pushed"),
                wait_for_push=lambda: stays.wait_for_push(0),
                end_micro_batch=lambda micro_batch: self.calls.append(f"resident ends {micro_batch}") or self.owed,
            )
        self.replicated = ReplicatedExperts(
            cell=CELL,
            experts=self.experts,
            transport=self.transport,  # type: ignore[arg-type]
            residents=self.residents,
        )

    def run(self, rows: torch.Tensor, counts: list[int], *, enters: bool) -> torch.Tensor:
        """Run forward with attention in front of the experts, which doubles its input."""
        if enters:
            rows = self.replicated.enter(rows)
        before = rows * 2
        if before.requires_grad:
            before.register_hook(lambda _: self.calls.append("attention's backward"))
        return self.replicated.compute(before, counts, torch.ones(sum(counts)))


ROWS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]])


def expected(layer: Layer, counts: list[int], slots: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output, and the gradient of its sum by the weights of every slot."""
    parts = (2 * ROWS).split(counts)
    output = torch.cat([part @ weight for part, weight in zip(parts, slots, strict=True)])
    return output, [part.T @ torch.ones(len(part), HIDDEN) for part in parts]


@pytest.mark.parametrize("enters", [True, False])
def test_a_copys_gradient_is_gathered_and_others_are_added_before_a_parameter_is_ready(enters: bool) -> None:
    layer, counts = Layer(), [1, 1, 1]
    copied = torch.full((HIDDEN, HIDDEN), 3.0)
    for weight in layer.experts.weights:
        weight.register_post_accumulate_grad_hook(lambda _: layer.calls.append("ready"))
    output = layer.run(ROWS.clone().requires_grad_(), counts, enters=enters)
    assert layer.calls == ["copy there"]
    assert layer.replicated.entered is None, "or the graph would live as long as the plan"
    its_output, of_slots = expected(layer, counts, [*layer.experts.weights, copied])
    assert torch.equal(output, its_output)
    assert layer.experts.gradients[:2] == [None, None]
    layer.calls.clear()
    layer.transport.buffers.weights.fill_(-1)  # other layers use them in between
    layer.transport.buffers.gradients.fill_(-1)
    output.sum().backward()
    assert torch.equal(layer.transport.buffers.gradients[0].view(HIDDEN, HIDDEN), of_slots[2])
    assert torch.equal(layer.experts.weights[0].grad, of_slots[0])
    assert torch.equal(layer.experts.weights[1].grad, of_slots[1] + LATE)
    attention = layer.calls.index("attention's backward")
    assert layer.calls[:2] == ["copy there", "copy starts home"]
    assert (layer.calls.index("copy home") > attention) == enters, "on its way beside attention"
    assert layer.calls.index("ready") > layer.calls.index("copy home")
    assert layer.calls.count("copy home") == 1
    assert list(layer.replicated.returning) == []


@pytest.mark.parametrize("enters", [True, False])
def test_rows_get_the_gradient_of_a_copys_weights_as_they_are_again(enters: bool) -> None:
    layer = Layer()
    rows = ROWS.clone().requires_grad_()
    output = layer.run(rows, [1, 0, 2], enters=enters)
    layer.transport.buffers.weights.fill_(-1)
    output.sum().backward()
    own, copied = layer.experts.weights[0].sum(dim=1), torch.full((HIDDEN,), 6.0)
    assert torch.equal(rows.grad, 2 * torch.stack([own, copied, copied]))


def test_what_stays_comes_and_goes_with_the_copies_and_stands_before_them() -> None:
    layer = Layer(resident=True)
    layer.replicated.start_push()
    assert layer.calls == ["copy pushed", "resident pushed"]
    counts = [1, 0, 0, 1, 1]  # homes, two resident slots, one replica slot
    for owed in (False, True):
        layer.owed = None
        if owed:
            layer.owed = GradientReturn(cell=CELL, experts=layer.experts, loose={0: [torch.full((2, 2), 1000.0)]})
        for weight in layer.experts.weights:
            weight.grad = None
        layer.calls.clear()
        output = layer.run(ROWS.clone().requires_grad_(), counts, enters=True)
        zeros = torch.zeros(HIDDEN, HIDDEN)
        slots = [*layer.experts.weights, zeros, zeros + 5, zeros + 3]
        its_output, of_slots = expected(layer, counts, slots)
        assert torch.equal(output, its_output)
        layer.residents.transport.buffers.gradients.zero_()
        output.sum().backward()
        for number, index in ((0, 2), (1, 3)):
            gathered = layer.residents.transport.buffers.gradients[number].view(HIDDEN, HIDDEN)
            assert torch.equal(gathered, of_slots[index])
        assert torch.equal(layer.transport.buffers.gradients[0].view(HIDDEN, HIDDEN), of_slots[4])
        assert torch.equal(layer.experts.weights[0].grad, of_slots[0] + (1000.0 if owed else 0.0))
        assert torch.equal(layer.experts.weights[1].grad, of_slots[1] + LATE)
        assert layer.calls == [
            *("copy there", "resident there", "copy there", "resident there"),
            *("copy starts home", "resident ends 4", "attention's backward", "copy home", "resident home"),
        ]


def test_what_the_residents_buffers_are_used_for_is_noted() -> None:
    layer = Layer(resident=True)
    noted: list[str] = []
    for name, transport in (("copy", layer.transport), ("resident", layer.residents.transport)):
        transport.buffers.last_use = SimpleNamespace(note=lambda name=name: noted.append(name))
    layer.run(ROWS, [1, 0, 0, 1, 1], enters=False)
    assert noted == ["copy", "resident"]


def test_rows_that_all_stay_at_home_need_no_buffer_and_frozen_experts_no_return() -> None:
    layer = Layer(resident=True)
    with torch.no_grad():
        output = layer.run(ROWS, [1, 2], enters=True)
    assert torch.equal(output, expected(layer, [1, 2], layer.experts.weights)[0])
    assert layer.experts.gradients == [None, None]
    assert layer.replicated.entered is None
    frozen = Layer(trained=False)
    rows = ROWS.clone().requires_grad_()
    frozen.run(rows, [1, 1, 1], enters=True).sum().backward()
    assert rows.grad is not None
    assert frozen.calls == ["copy there", "copy there", "attention's backward"]
    assert frozen.transport.buffers.gradients.numel() == 0


def test_copies_from_other_nodes_lie_in_the_half_that_their_layer_uses() -> None:
    """One row in the node, then two halves of two rows each."""
    experts: Any = LinearExperts()
    transport: Any = SimpleNamespace(buffers=ReplicaBuffers([experts], replica_slots=1, cross_node_slots=2))
    for half, rows in ((0, [0, 1, 2]), (1, [0, 3, 4])):
        replicated = ReplicatedExperts(cell=replace(CELL, half=half), experts=experts, transport=transport)
        assert [replicated.row(slot) for slot in range(3)] == rows
