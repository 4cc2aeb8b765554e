"""Cells of copies, and gradients that come home to experts without Megatron's DDP; one process, no Megatron."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import ReplicaPlan
from moe_rl.megatron.replica_buffers import ReplicaBuffers
from moe_rl.megatron.replica_cells import ReplicaCells
from moe_rl.megatron.transport import GradientReturn, ReplicaCell, ReplicaCopy, Transport

COPY = ReplicaCopy(home_rank=0, home_slot=0, host_rank=1, host_slot=0, ordinal=0, home_capacity=1)


@dataclass
class OneExpert:
    """Stands in for a view of one expert of [4, 8] weights."""

    dtype: torch.dtype = torch.float32
    num_local_experts: int = 1
    weights: list[torch.nn.Parameter] = field(default_factory=list)

    def parameters_of(self, _: int) -> list[torch.nn.Parameter]:
        self.weights = self.weights or [torch.nn.Parameter(torch.zeros(4, 8, dtype=self.dtype))]
        return self.weights


def test_layers_in_which_only_residents_are_have_cells_on_every_rank() -> None:
    """Two micro-batches, three layers; residents in layer 1, nobody's replica anywhere but in the last cell."""
    residents = np.full((3, 2, 1), -1)
    residents[1, 0] = 2
    home = np.tile([0, 0, 1, 1], (3, 1))
    placement = ExpertPlacement.from_home_rank(home, ep_size=2, resident_experts=residents)
    placement = placement.with_slots(resident_slots=1, spare_slots=1)
    nothing = ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=2, num_layers=3, ep_size=2)
    plan: Any = SimpleNamespace(replicas=nothing, placement=placement)
    anywhere = np.zeros((2, 3), np.bool_)
    anywhere[1, 2] = True
    for rank in range(2):
        cells = ReplicaCells.of_plan(
            plan,
            has_copies=anywhere,
            rank=rank,
            buffers=ReplicaBuffers([OneExpert()], replica_slots=1, cross_node_slots=0),  # type: ignore[list-item]
            chunks=[[0, 1, 2]],
        )
        there = [[cells.cell(micro_batch, layer) is not None for layer in range(3)] for micro_batch in range(2)]
        assert there == [[False, True, False], [False, True, True]]


def test_a_layer_whose_only_resident_is_the_first_expert_has_copies() -> None:
    residents = np.full((3, 2, 1), -1)
    residents[1, 1] = 0
    placement = ExpertPlacement.from_home_rank(
        np.tile([0, 0, 1, 1], (3, 1)), ep_size=2, resident_experts=residents
    ).with_slots(resident_slots=1, spare_slots=1)
    buffers = ReplicaBuffers([OneExpert()], replica_slots=1, cross_node_slots=0)  # type: ignore[list-item]
    for rank in range(2):
        cells = ReplicaCells.of_residents(placement, rank=rank, buffers=buffers)
        assert cells.has_copies.tolist() == [False, True, False]


def test_gradients_that_come_home_are_summed_in_float32_whatever_the_weights_are() -> None:
    """256 + 64 times 1/2: in bf16, which has 8 bits, each sum would stay 256."""
    experts: Any = OneExpert(torch.bfloat16)
    buffers = ReplicaBuffers([experts], replica_slots=1, cross_node_slots=0)
    transport = Transport(group=SimpleNamespace(rank=lambda: 0), buffers=buffers)  # type: ignore[arg-type]
    loose: dict[int, list[torch.Tensor]] = {}
    for each in (256.0, *[0.5] * 64):
        transport._fold(COPY, torch.full((32,), each), 0, experts, loose)
    assert (loose[0][0] == 256 + 32).all()


def test_gradients_of_copies_reach_the_home_whose_parameters_have_no_main_grad() -> None:
    """Where no DDP of Megatron's gathers gradients they are autograd's; a home without a token has none of its own."""
    experts: Any = OneExpert(torch.bfloat16)
    buffers = ReplicaBuffers([experts], replica_slots=1, cross_node_slots=0)
    transport = Transport(group=SimpleNamespace(rank=lambda: 0), buffers=buffers)  # type: ignore[arg-type]
    cell = ReplicaCell(key=(0, 0), half=0, banks=(0,), copies=(COPY,), rounds=1)
    for own, expected in ((torch.ones(4, 8, dtype=torch.bfloat16), 3.0), (None, 2.0)):
        returning = GradientReturn(cell=cell, experts=experts, received=[(COPY, 0, torch.full((32,), 2.0))])
        transport._returning = returning
        transport.finish_return()
        gradients: list[torch.Tensor | None] = [own]
        returning.add_loose(gradients, experts.parameters_of(0), num_experts=1)
        (gradient,) = gradients
        assert gradient is not None
        assert gradient.dtype == torch.bfloat16
        assert (gradient == expected).all()


def test_what_a_broken_pass_has_left_on_its_way_reaches_no_later_step() -> None:
    experts: Any = OneExpert()
    (parameter,) = experts.parameters_of(0)
    parameter.main_grad = torch.zeros(4, 8)
    buffers = ReplicaBuffers([experts], replica_slots=1, cross_node_slots=0)
    transport = Transport(group=SimpleNamespace(rank=lambda: 0), buffers=buffers)  # type: ignore[arg-type]
    cell = ReplicaCell(key=(0, 0), half=0, banks=(0,), copies=(COPY,), rounds=1)
    for settle, expected in ((transport.finish_return, 1.0), (transport.reset, 1.0)):
        arrived = [(COPY, 0, torch.ones(32))]
        transport._returning = GradientReturn(cell=cell, experts=experts, received=arrived)
        settle()
        transport.finish_return()  # of a later cell without copies
        assert (parameter.main_grad == expected).all()
