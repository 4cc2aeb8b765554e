"""Random layouts, weights that name themselves, and engines that keep slots: what the tests of a sync share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from moe_rl.sync import EngineLayout, SyncPlan, SyncProblem, TrainerLayout
from moe_rl.sync.executor import Read, Traffic, in_process, rank_work
from moe_rl.sync.expert_parts import ExpertShape
from moe_rl.sync.rank_plan import Parts
from moe_rl.sync.versions import SlotVersions

HIDDEN = 16
Expert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Weights = Callable[[int, int], Expert]


@dataclass(frozen=True, kw_only=True)
class TrainerSizes:
    """What Megatron is told; tests derive from it who holds what, without `TrainerLayout`."""

    layers: int = 4
    experts: int = 8
    ep: int = 2
    etp: int = 1
    edp: int = 1
    pp: int = 1
    vpp: int = 1

    @property
    def ranks(self) -> int:
        return self.ep * self.etp * self.edp * self.pp


def drawn_homes(rng: np.random.Generator, sizes: TrainerSizes) -> np.ndarray:
    per_rank = np.repeat(np.arange(sizes.ep), sizes.experts // sizes.ep)
    return np.stack([rng.permutation(per_rank) for _ in range(sizes.layers)]).astype(np.int32)


def drawn_slots(rng: np.random.Generator, sizes: TrainerSizes, ep: int, redundant: int = 0) -> np.ndarray:
    rows = []
    for _ in range(sizes.layers):
        own = rng.permutation(sizes.experts).reshape(ep, -1)
        others = [np.setdiff1d(np.arange(sizes.experts), row) for row in own]
        copies = [rng.choice(other, redundant, replace=False) for other in others]
        rows.append(np.concatenate([own, np.array(copies, int).reshape(ep, -1)], axis=1).ravel())
    return np.array(rows, np.int32)


def trainer_of(homes: np.ndarray, sizes: TrainerSizes) -> TrainerLayout:
    per_chunk = sizes.layers // (sizes.pp * sizes.vpp)
    stages = tuple(layer // per_chunk % sizes.pp for layer in range(sizes.layers))
    return TrainerLayout.in_megatron_order(
        homes, ep_size=sizes.ep, etp_size=sizes.etp, edp_size=sizes.edp, stage_of_layer=stages
    )


def nodes_apart(trainers: int, engine_ranks: int, per_node: int) -> tuple[int, ...]:
    trainer_nodes = [rank // per_node for rank in range(trainers)]
    first = trainer_nodes[-1] + 1
    return (*trainer_nodes, *(first + rank // per_node for rank in range(engine_ranks)))


def problem_of(
    homes: np.ndarray, sizes: TrainerSizes, engines: tuple[EngineLayout, ...], node_of: tuple[int, ...]
) -> tuple[SyncProblem, ExpertShape]:
    trainer = trainer_of(homes, sizes)
    parts = int(np.lcm.reduce([sizes.etp, *(engine.tp_size for engine in engines)]))
    shape = ExpertShape(hidden_size=HIDDEN, ffn_size=8 * parts, parts_per_expert=parts)
    problem = SyncProblem(trainer=trainer, engines=engines, node_of=node_of, expert_bytes=shape.expert_bytes)
    return problem, shape


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A random pair of layouts."""

    sizes: TrainerSizes
    homes: np.ndarray
    problem: SyncProblem
    shape: ExpertShape


def draw(seed: int, *, layers: tuple[int, ...] = (2, 3, 4, 6), **fixed: int) -> Drawn:
    rng = np.random.default_rng(seed)
    num_layers, experts = int(rng.choice(layers)), int(rng.choice([8, 16, 24]))
    pp = int(rng.choice([1, 2])) if num_layers % 2 == 0 else 1
    sizes = TrainerSizes(
        layers=num_layers,
        experts=experts,
        ep=int(rng.choice([1, 2, 4, 8])),
        etp=int(rng.choice([1, 1, 2])),
        edp=int(rng.choice([1, 1, 2])),
        pp=pp,
        vpp=int(rng.choice([1, num_layers // pp])) if pp > 1 else 1,
    )
    homes = drawn_homes(rng, sizes)
    engine_ep, tp = int(rng.choice([1, 2, 4])), int(rng.choice([1, 1, 2, 4]))
    redundant = int(rng.choice([0, 0, 1, 2])) if engine_ep > 1 else 0
    whole = bool(rng.integers(2))
    engines = tuple(
        EngineLayout(
            slots=drawn_slots(rng, sizes, engine_ep, redundant), ep_size=engine_ep, tp_size=tp, whole_tensors=whole
        )
        for _ in range(int(rng.integers(1, 5)))
    )
    engine_ranks = sum(engine.size for engine in engines)
    per_node = int(rng.choice([2, 4, 8]))
    node_of = nodes_apart(sizes.ranks, engine_ranks, per_node)
    if rng.random() < 0.25:  # colocated
        node_of = (*node_of[: sizes.ranks], *(rank // per_node for rank in range(engine_ranks)))
    problem, shape = problem_of(homes, sizes, engines, node_of)
    return Drawn(sizes=sizes, homes=homes, problem=problem, shape=shape)


def weights_of(shape: ExpertShape, step: int) -> Weights:
    """Every expert of every step has weights of its own."""
    drawn: dict[tuple[int, int], Expert] = {}
    sizes = (
        (shape.ffn_size, shape.hidden_size),
        (shape.ffn_size, shape.hidden_size),
        (shape.hidden_size, shape.ffn_size),
    )

    def weights(layer: int, expert: int) -> Expert:
        if (layer, expert) not in drawn:
            generator = torch.Generator().manual_seed(step * 1000003 + layer * 1009 + expert)
            gate, up, down = (torch.randn(*size, generator=generator).bfloat16() for size in sizes)
            drawn[layer, expert] = gate, up, down
        return drawn[layer, expert]

    return weights


def reader(rank: int, homes: np.ndarray, sizes: TrainerSizes, shape: ExpertShape, weights: Weights) -> Read:
    """What Megatron would hold on this rank, derived here a second time: a read of anything else is a KeyError."""
    rest, etp = divmod(rank, sizes.etp)
    rest, ep = divmod(rest, sizes.ep)
    stage = rest // sizes.edp
    per_chunk = sizes.layers // (sizes.pp * sizes.vpp)
    shards: dict[tuple[int, int], Expert] = {}
    for chunk in range(sizes.vpp):
        first = (chunk * sizes.pp + stage) * per_chunk
        for layer in range(first, first + per_chunk):
            for expert in np.flatnonzero(homes[layer] == ep).tolist():
                gate, up, down = weights(layer, expert)
                shards[layer, expert] = (
                    gate.chunk(sizes.etp)[etp],
                    up.chunk(sizes.etp)[etp],
                    down.chunk(sizes.etp, 1)[etp],
                )
    own = etp * (shape.parts_per_expert // sizes.etp)

    def read(parts: Parts) -> torch.Tensor:
        return shape.pack(*shards[parts.layer, parts.expert], parts.first - own, parts.stop - own)

    return read


class Slots:
    """An engine rank whose slots hold its slice of every expert, whichever way it comes."""

    def __init__(self, shape: ExpertShape, engine: EngineLayout, index: int) -> None:
        self.shape, self.engine, self.index = shape, engine, index
        self.local = engine.local_slots(index)
        self.versions = SlotVersions(self.local)
        self.slots: dict[tuple[int, int], Expert] = {}
        self.loads = 0

    def slice(self, expert: Expert) -> Expert:
        size, rank = self.engine.tp_size, self.index % self.engine.tp_size
        gate, up, down = expert
        return gate.chunk(size)[rank], up.chunk(size)[rank], down.chunk(size, 1)[rank]

    def writer(self, step: int) -> Callable[[Parts, torch.Tensor], None]:
        def write(parts: Parts, body: torch.Tensor) -> None:
            self.load(parts.layer, parts.expert, self.shape.unpack(body, parts.num_parts))
            self.versions.wrote(parts.layer, parts.expert, step)

        return write

    def load(self, layer: int, expert: int, tensors: Expert) -> None:
        own = self.slice(tensors) if self.engine.whole_tensors else tensors
        slots = np.flatnonzero(self.local[layer] == expert).tolist()
        assert slots, f"expert {expert} of layer {layer} is in no slot here"
        for slot in slots:
            self.slots[layer, slot] = tuple(tensor.clone() for tensor in own)
            self.loads += 1

    def wrong_slots(self, weights: Weights) -> int:
        wrong = 0
        for (layer, slot), expert in np.ndenumerate(self.local):
            right = self.slice(weights(layer, int(expert)))
            own = self.slots.get((layer, slot))
            same = own is not None and all(torch.equal(a, b) for a, b in zip(own, right, strict=True))
            wrong += not same
        return wrong


def engine_ranks(problem: SyncProblem, shape: ExpertShape) -> dict[int, Slots]:
    return {each.rank: Slots(shape, each.engine, each.index) for each in problem.engine_ranks()}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a sync in one process moved."""

    traffic: dict[int, Traffic]
    engines: dict[int, Slots]


def sync(plan: SyncPlan, drawn: Drawn, engines: dict[int, Slots], *, step: int = 7, **how: object) -> Ran:
    """Run a whole sync in this process."""
    problem, weights = plan.problem, weights_of(drawn.shape, step)
    traffic = {rank: Traffic() for rank in range(problem.size)}
    works: dict[int, Iterator] = {}
    for rank in range(problem.size):
        if rank in engines:
            works[rank] = rank_work(plan, rank, step=step, write=engines[rank].writer(step), traffic=traffic[rank])
        else:
            read = reader(rank, drawn.homes, drawn.sizes, drawn.shape, weights)
            works[rank] = rank_work(plan, rank, step=step, read=read, traffic=traffic[rank])
    in_process(works, **how)
    return Ran(traffic=traffic, engines=engines)
