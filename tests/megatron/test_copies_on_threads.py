"""Weights of copies and their gradients, number for number: the EP ranks are threads, messages arrive when waited for.

The transport, its buffers and cells are the runtime's; experts are parameters without a layer around them.
"""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from strategies import model_spec
from thread_ranks import ThreadRanks

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.core.native import native_core
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron.replica_buffers import ReplicaBuffers
    from moe_rl.megatron.replica_cells import ReplicaCells
    from moe_rl.megatron.residents import ResidentCopies
    from moe_rl.megatron.transport import TrafficCounters, Transport

pytestmark = pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
RANKS, MICRO_BATCHES, LAYERS, EXPERTS = 4, 3, 3, 8
PER_RANK = EXPERTS // RANKS
SHAPES = ((3, 5), (7,), (2, 2))


def numbers(shape: tuple[int, ...], *key: int) -> torch.Tensor:
    """Return small whole numbers, which every dtype holds and whose sums are exact."""
    return torch.from_numpy(np.random.default_rng(key).integers(-8, 8, shape)).float()


class Experts:
    """The experts of one layer on one rank."""

    num_local_experts = PER_RANK

    def __init__(self, layer: int, rank: int, *, dtype: torch.dtype, frozen: tuple[int, ...], step: int = 0) -> None:
        self.layer, self.rank, self.dtype = layer, rank, dtype
        self.weights = [
            [
                torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=i not in frozen)
                for i, shape in enumerate(SHAPES)
            ]
            for _ in range(PER_RANK)
        ]
        for of_slot in self.weights:
            for parameter in of_slot:
                if parameter.requires_grad:
                    parameter.main_grad = torch.zeros(parameter.shape)
        self.step(step)

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        return self.weights[slot]

    def step(self, step: int) -> None:
        """Give every expert the weights of this optimizer step."""
        with torch.no_grad():
            for slot, of_slot in enumerate(self.weights):
                for parameter, weights in zip(of_slot, weights_of(self.layer, self.rank, slot, step), strict=True):
                    parameter.copy_(weights)


def weights_of(layer: int, rank: int, slot: int, step: int) -> list[torch.Tensor]:
    return [numbers(shape, step, layer, rank, slot, index) for index, shape in enumerate(SHAPES)]


def plan_of(*, replica_slots: int, cross_node_slots: int, seed: int) -> Plan:
    """Return the plan of a skewed load on two nodes of two ranks."""
    rng = np.random.default_rng(seed)
    liking = np.exp(-np.arange(EXPERTS))
    pairs = np.array(
        [
            [[rng.multinomial(400, liking / liking.sum()) for _ in range(RANKS)] for _ in range(LAYERS)]
            for _ in range(MICRO_BATCHES)
        ]
    )
    config = BalancerConfig(
        objective="imbalance", replica_slots=replica_slots, cross_node_slots=cross_node_slots, ranks_per_node=2
    )
    return plan_of_load(
        StepLoad(pairs=pairs[None].astype(np.int32), tokens=np.full((1, MICRO_BATCHES, RANKS), 200), top_k=2),
        config=config,
        model=model_spec(num_experts=EXPERTS, num_layers=LAYERS, top_k=2),
        topology=cluster_topology(config, ep_size=RANKS),
        placement=ExpertPlacement.contiguous(
            num_layers=LAYERS, num_experts=EXPERTS, ep_size=RANKS, spare_slots=config.slots.foreign
        ),
    )


def on_ranks(step: Callable[[int, Any], Any], ranks: ThreadRanks) -> list[Any]:
    """Return what `step(rank, group)` returns on every rank; raise what it raises."""
    group = SimpleNamespace(rank=ranks.rank)
    with patch.object(dist, "get_global_rank", lambda group, rank: rank):
        found = ranks.run(lambda rank: step(rank, group))
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


def gradient_of(numel: int, micro_batch: int, layer: int, host_rank: int, row: int) -> torch.Tensor:
    """Return the flat gradient that a copy has gathered."""
    return numbers((numel,), 7, micro_batch, layer, host_rank, row)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("replica_slots", "cross_node_slots", "dtype", "frozen"),
    [
        (1, 0, torch.float32, ()),
        (2, 0, torch.bfloat16, ()),
        (1, 1, torch.bfloat16, (1,)),
        (2, 1, torch.float32, (0, 2)),
        (0, 2, torch.bfloat16, ()),
    ],
)
def test_copies_have_their_homes_weights_and_homes_their_copies_gradients(
    replica_slots: int, cross_node_slots: int, dtype: torch.dtype, frozen: tuple[int, ...], seed: int
) -> None:
    plan = plan_of(replica_slots=replica_slots, cross_node_slots=cross_node_slots, seed=seed)
    assert plan.replicas.copies > 0
    anywhere = (np.diff(plan.replicas.offsets) > 0).reshape(MICRO_BATCHES, LAYERS)

    def step(rank: int, group: Any) -> Any:
        layers = [Experts(layer, rank, dtype=dtype, frozen=frozen) for layer in range(LAYERS)]
        buffers = ReplicaBuffers(layers, replica_slots=replica_slots, cross_node_slots=cross_node_slots)  # type: ignore[arg-type]
        transport = Transport(group=group, buffers=buffers)
        cells = ReplicaCells.of_plan(plan, has_copies=anywhere, rank=rank, buffers=buffers, chunks=[range(LAYERS)])
        assert buffers.num_bytes == sum(part.nbytes for part in (buffers.weights, buffers.gradients)), "of both"
        copies, hosted_gradients = [], []
        for number in range(2):  # passes
            for experts in layers:
                experts.step(number)
            transport.reset()
            for micro_batch in range(MICRO_BATCHES):
                for layer, experts in enumerate(layers):
                    cell = cells.cell(micro_batch, layer)
                    if cell is None:
                        continue
                    for bank in range(3):
                        transport.start_push(cell, bank, experts)  # type: ignore[arg-type]
                    before = transport.counters.pushes
                    for bank in range(3):
                        transport.wait_for_push(bank)
                        transport.start_push(cell, bank, experts)  # type: ignore[arg-type]
                    assert transport.counters.pushes == before, "what is there is not pushed again"
                    for copy in cell.copies:
                        copies.append((number, micro_batch, layer, copy))
                        if copy.host_rank != rank:
                            continue
                        row = buffers.row(copy.host_slot, cell.half)
                        expected = weights_of(layer, copy.home_rank, copy.home_slot, number)
                        for view, weights in zip(buffers.weights_of(row), expected, strict=True):
                            assert buffers.owns(view)
                            assert torch.equal(view.float(), weights)
                        gradient = gradient_of(buffers.gradient_numel, micro_batch, layer, rank, row)
                        buffers.gradients[row].copy_(gradient)
                        views = [view for view in buffers.gradients_of(row) if view is not None]
                        assert torch.equal(torch.cat([view.reshape(-1) for view in views]), gradient)
                        hosted_gradients.append(((layer, copy.home_rank, copy.home_slot), gradient))
                    transport.start_return(cell, experts)  # type: ignore[arg-type]
                    assert all(transport.buffers.held[bank] is None for bank in cell.banks)
                    transport.finish_return()
            of_expert = sum(np.prod(shape) for shape in SHAPES) * torch.empty(0, dtype=dtype).element_size()
            own = [copy for pass_, _, _, copy in copies if pass_ == number]
            assert transport.counters.pushed_bytes == of_expert * sum(copy.home_rank == rank for copy in own)
            returned = 4 * buffers.gradient_numel * sum(copy.host_rank == rank for copy in own)
            assert transport.counters.returned_bytes == returned
        return layers, hosted_gradients

    found = on_ranks(step, ThreadRanks(RANKS))
    sums: dict[tuple[int, int, int], torch.Tensor] = {}
    for _, hosted_gradients in found:
        for home, gradient in hosted_gradients:
            sums[home] = sums.get(home, torch.zeros_like(gradient)) + gradient
    assert sums
    for rank, (layers, _) in enumerate(found):
        for layer, experts in enumerate(layers):
            for slot in range(PER_RANK):
                trained = [p for p in experts.parameters_of(slot) if p.requires_grad]
                gathered = torch.cat([parameter.main_grad.view(-1) for parameter in trained])
                assert torch.equal(gathered, sums.get((layer, rank, slot), torch.zeros_like(gathered)))


def test_a_return_that_is_dropped_and_pushes_that_nobody_waited_for_reach_no_later_pass() -> None:
    plan = plan_of(replica_slots=1, cross_node_slots=0, seed=0)
    anywhere = (np.diff(plan.replicas.offsets) > 0).reshape(MICRO_BATCHES, LAYERS)
    micro_batch, layer = np.argwhere(anywhere)[0].tolist()

    def step(rank: int, group: Any) -> None:
        experts: Any = Experts(layer, rank, dtype=torch.float32, frozen=())
        buffers = ReplicaBuffers([experts], replica_slots=1, cross_node_slots=0)
        transport = Transport(group=group, buffers=buffers)
        cells = ReplicaCells.of_plan(plan, has_copies=anywhere, rank=rank, buffers=buffers, chunks=[range(LAYERS)])
        cell = cells.cell(micro_batch, layer)
        assert cell is not None
        transport.start_push(cell, 0, experts)
        buffers.gradients.fill_(5)
        transport.start_return(cell, experts)
        experts.step(1)
        transport.reset()
        assert (transport.counters.pushes, transport.counters.pushed_bytes, transport.counters.returned_bytes) == (
            0,
            0,
            0,
        )
        transport.finish_return()  # of a later cell
        for of_slot in experts.weights:
            assert not any(parameter.main_grad.any() for parameter in of_slot)
        transport.start_push(cell, 0, experts)
        transport.settle()
        for copy in cell.copies:
            if copy.host_rank == rank:
                views = buffers.weights_of(buffers.row(copy.host_slot, cell.half))
                for view, weights in zip(views, weights_of(layer, copy.home_rank, copy.home_slot, 1), strict=True):
                    assert torch.equal(view, weights)
        buffers.release()
        assert buffers.num_bytes == 0
        buffers.allocate()
        assert buffers.held == [None] * 3
        assert not buffers.weights.any()

    on_ranks(step, ThreadRanks(RANKS))


def test_experts_that_cannot_share_buffers_are_refused() -> None:
    def experts(**words: Any) -> Any:
        return Experts(0, 0, **{"dtype": torch.float32, "frozen": ()} | words)

    other_shape, mixed = experts(), experts()
    other_shape.weights[0][0] = torch.nn.Parameter(torch.zeros(4, 5))
    mixed.weights[0][0] = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16))
    for layers, words in (
        ([experts(), other_shape], "experts with the same shapes in all layers"),
        ([mixed], "replicas need the same dtype"),
        ([experts(), experts(dtype=torch.bfloat16)], "replicas need the same dtype"),
        ([experts(), experts(frozen=(1,))], "the same frozen parameters in every expert"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            ReplicaBuffers(layers, replica_slots=1, cross_node_slots=0)


def resident_placement(expert_by_rank: list[list[int]]) -> ExpertPlacement:
    """Return contiguous homes, and in every layer these residents (-1: none)."""
    residents = np.array([expert_by_rank] * LAYERS)
    homes = np.tile(np.arange(EXPERTS) // PER_RANK, (LAYERS, 1))
    placement = ExpertPlacement.from_home_rank(homes, ep_size=RANKS, resident_experts=residents)
    slots = residents.shape[2]
    return placement.with_slots(resident_slots=slots, spare_slots=slots)


def test_residents_are_pushed_when_anything_changed_and_their_gradients_go_home_once() -> None:
    ranks = ThreadRanks(RANKS)
    first = resident_placement([[2, -1], [0, 5], [0, -1], [-1, -1]])
    second = resident_placement([[3, -1], [0, -1], [-1, -1], [1, 0]])
    numel = sum(int(np.prod(shape)) for shape in SHAPES)

    def step(rank: int, group: Any) -> None:
        layers: Any = {layer: Experts(layer, rank, dtype=torch.bfloat16, frozen=()) for layer in range(LAYERS)}
        groups: Any = SimpleNamespace(
            replicas=group, place=(0, rank), device=torch.device("cpu"), all_true=lambda own: all(ranks.gathered(own))
        )
        counters = TrafficCounters()
        copies = ResidentCopies(layers, groups=groups, resident_slots=2, counters=counters)
        assert copies.num_bytes == LAYERS * 2 * numel * (2 + 4)

        def ran(placement: ExpertPlacement, weights: Callable[[int, int], int], num_micro_batches: int = 2) -> int:
            """Run a pass, check every number, and return how many banks were pushed."""
            counters.clear()
            copies.begin_pass(placement, num_micro_batches=num_micro_batches)
            hosted = [expert for expert in placement.resident_experts[0, rank].tolist() if expert >= 0]
            for layer, of_layer in copies.layers.items():
                for of_slot in layers[layer].weights:
                    for parameter in of_slot:
                        parameter.main_grad.zero_()
                of_layer.start_push()
                of_layer.wait_for_push()
                buffers = of_layer.transport.buffers
                slots = [slot for slot, expert in enumerate(placement.resident_experts[0, rank]) if expert >= 0]
                assert of_layer.hosted_slots == slots
                assert not buffers.gradients.any(), "they add up from nothing"
                for slot, expert in zip(slots, hosted, strict=True):
                    home_rank, home_slot = divmod(expert, PER_RANK)
                    expected = weights_of(layer, home_rank, home_slot, weights(layer, home_rank))
                    for view, values in zip(buffers.weights_of(slot), expected, strict=True):
                        assert torch.equal(view.float(), values)
            for micro_batch in range(num_micro_batches):
                for layer, of_layer in copies.layers.items():
                    for slot in of_layer.hosted_slots:
                        gradient = gradient_of(numel, micro_batch, layer, rank, slot)
                        of_layer.transport.buffers.gradients[slot].add_(gradient)
                    returning = of_layer.end_micro_batch(micro_batch)
                    assert (returning is None) == (micro_batch < num_micro_batches - 1)
                    of_layer.transport.finish_return()
            copies.end_pass()
            for layer in copies.layers:
                for slot in range(PER_RANK):
                    total = torch.zeros(numel)
                    for host, host_slot in np.argwhere(
                        placement.resident_experts[layer] == rank * PER_RANK + slot
                    ).tolist():
                        for micro_batch in range(num_micro_batches):
                            total += gradient_of(numel, micro_batch, layer, host, host_slot)
                    gathered = torch.cat([p.main_grad.view(-1) for p in layers[layer].weights[slot]])
                    assert torch.equal(gathered, total)
            return counters.pushes

        def step_of(*numbers_of_ranks: int) -> Callable[[int, int], int]:
            return lambda layer, home_rank: numbers_of_ranks[home_rank]

        zero = step_of(0, 0, 0, 0)
        assert ran(first, zero) == LAYERS
        assert ran(first, zero) == LAYERS, "gradients came home through the rows of weights"
        for experts in layers.values():
            experts.step(int(rank == 2))
        changed = step_of(0, 0, 1, 0)
        assert ran(first, changed, num_micro_batches=1) == LAYERS, "a weight of one rank changed"
        assert ran(second, changed, num_micro_batches=3) == LAYERS
        copies.begin_pass(second, num_micro_batches=2)
        for of_layer in copies.layers.values():
            of_layer.start_push()
            of_layer.wait_for_push()
            of_layer.end_micro_batch(0)
        with pytest.raises(InvalidInputError, match=f"gradients of {LAYERS} layers are lost"):
            copies.end_pass()
        copies.give_up()
        copies.release()
        assert copies.num_bytes == 0
        copies.allocate()
        assert ran(second, changed) == LAYERS
        again = SimpleNamespace(**vars(groups) | {"replicas": SimpleNamespace(rank=ranks.rank)})
        copies.use(again)  # type: ignore[arg-type]
        assert all(of_layer.transport.group is again.replicas for of_layer in copies.layers.values())
        assert ran(first, changed) == LAYERS

    on_ranks(step, ranks)


def test_gradients_of_residents_that_broke_off_on_their_way_reach_no_later_pass() -> None:
    ranks, placement = ThreadRanks(RANKS), resident_placement([[2], [0], [0], [-1]])

    def step(rank: int, group: Any) -> None:
        layers: Any = {layer: Experts(layer, rank, dtype=torch.float32, frozen=()) for layer in range(LAYERS)}
        groups: Any = SimpleNamespace(
            replicas=group, place=(0, rank), device=torch.device("cpu"), all_true=lambda own: all(ranks.gathered(own))
        )
        copies = ResidentCopies(layers, groups=groups, resident_slots=1, counters=TrafficCounters())
        copies.begin_pass(placement, num_micro_batches=1)
        for of_layer in copies.layers.values():
            of_layer.transport.buffers.gradients.fill_(5)
            assert of_layer.end_micro_batch(0) is not None, "on its way"
        copies.give_up()
        copies.begin_pass(placement, num_micro_batches=1)
        for layer, of_layer in copies.layers.items():
            of_layer.transport.buffers.gradients.fill_(5)  # of the pass that runs now
            of_layer.transport.finish_return()
            for of_slot in layers[layer].weights:
                assert not any(parameter.main_grad.any() for parameter in of_slot)

    on_ranks(step, ranks)


def test_residents_whose_weights_did_not_change_stay_from_one_forward_pass_to_the_next() -> None:
    ranks, placement = ThreadRanks(RANKS), resident_placement([[2], [0], [0], [-1]])

    def step(rank: int, group: Any) -> list[int]:
        layers: Any = {layer: Experts(layer, rank, dtype=torch.float32, frozen=()) for layer in range(LAYERS)}
        groups: Any = SimpleNamespace(
            replicas=group, place=(0, rank), device=torch.device("cpu"), all_true=lambda own: all(ranks.gathered(own))
        )
        counters = TrafficCounters()
        copies = ResidentCopies(layers, groups=groups, resident_slots=1, counters=counters)
        pushes = []
        for number in range(7):
            if number == 2:
                copies.give_up()
            if number == 4 and rank == 0:  # the home of expert 0, of which ranks 1 and 2 have copies
                layers[1].step(1)
            placed = placement if number < 6 else resident_placement([[2], [0], [0], [-1]])
            counters.clear()
            copies.begin_pass(placed, num_micro_batches=1)
            for layer, of_layer in copies.layers.items():
                of_layer.start_push()
                of_layer.wait_for_push()
                for slot in of_layer.hosted_slots:
                    home_rank, home_slot = divmod(int(placement.resident_experts[0, rank, slot]), PER_RANK)
                    of_step = int(number >= 4 and layer == 1 and home_rank == 0)
                    views = of_layer.transport.buffers.weights_of(slot)
                    for view, values in zip(views, weights_of(layer, home_rank, home_slot, of_step), strict=True):
                        assert torch.equal(view, values)
            copies.end_pass()
            pushes.append(counters.pushes)
        return pushes

    for pushes in on_ranks(step, ranks):
        assert pushes == [LAYERS, 0, LAYERS, 0, LAYERS, 0, LAYERS], "first, given up, changed on one rank, placed anew"


def test_without_resident_slots_nothing_is_asked() -> None:
    copies = ResidentCopies({0: None}, groups=None, resident_slots=0, counters=TrafficCounters())  # type: ignore[arg-type, dict-item]
    copies.begin_pass(resident_placement([[-1]] * RANKS), num_micro_batches=1)
    assert copies.layers == {}
    assert copies.num_bytes == 0
