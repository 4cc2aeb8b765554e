"""Who holds which part of which expert: in the trainer, in every rollout engine, and on which node a rank sits.

An expert is cut into S = lcm(ETP, TP of all engines) *parts*: part j is rows j of its gate and up matrices and columns
j of its down matrix, so that a trainer's shard and an engine's slice are both whole numbers of parts. Parts that have
the same trainers and the same engine nodes travel together; they are one *atom*.

Example: trainers with ETP 2, an engine of two ranks with TP 2 on one node. S = 2, and an expert has two atoms of a part
each: different trainers hold the halves. With ETP 1 both halves are on one trainer and go to one node, so that the
expert is one atom of two parts, which the engine node shares out by NVLink.

    expert 5           part 0            part 1
    trainer ETP 2      rank 0            rank 1       -> atoms 0 and 1
    trainer ETP 1      rank 0            rank 0       -> one atom

Ranks are numbered through: trainers 0 .. T-1, then the ranks of the first engine, of the second and so on. L MoE
layers, E experts, P expert-parallel ranks, W slots of an engine's layer. Atom a is unit a % U of expert a // U % E of
layer a // (U * E), with U atoms per expert.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require, require_least


def even_stages(num_layers: int, *, pp_size: int = 1, vpp_size: int = 1) -> tuple[int, ...]:
    """Return the pipeline stage of every layer where each virtual stage has the same number of layers.

    >>> even_stages(4, pp_size=2, vpp_size=2)
    (0, 1, 0, 1)
    """
    chunks = pp_size * vpp_size
    require(
        num_layers % chunks == 0,
        f"{num_layers} MoE layers cannot be divided evenly among {pp_size} pipeline stages of {vpp_size} chunks "
        "each: set stage_of_layer.",
    )
    per_chunk = num_layers // max(1, chunks)
    return tuple(layer // per_chunk % pp_size for layer in range(num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """Homes of the experts, wherever a balancer has moved them, and the global rank of every expert-parallel position.

    Resident copies are no source and not part of this: they are of the step before the optimizer's.
    """

    home_rank: NDArray[np.int32]
    """[L, E] expert-parallel rank that owns each expert."""
    stage_of_layer: tuple[int, ...]
    """[L] pipeline stage of each MoE layer, whichever virtual chunk it is in."""
    ranks: NDArray[np.int32]
    """[stages, twins, P, ETP] global rank. Twins are expert-data-parallel: after a gather they are equal."""

    def __post_init__(self) -> None:
        require(
            self.home_rank.ndim == 2,
            f"home_rank must have shape [MoE layers, experts], got {list(self.home_rank.shape)}.",
        )
        require(
            self.ranks.ndim == 4,
            "`ranks` must have shape [pipeline stages, expert-DP size, EP size, expert-TP size], got "
            f"{list(self.ranks.shape)}.",
        )
        num_layers, stages = len(self.home_rank), self.ranks.shape[0]
        require(
            len(self.stage_of_layer) == num_layers and all(0 <= stage < stages for stage in self.stage_of_layer),
            f"stage_of_layer must name one of {stages} stages for each of {num_layers} layers, got "
            f"{list(self.stage_of_layer)}.",
        )
        require(
            bool(((self.home_rank >= 0) & (self.home_rank < self.ep_size)).all()),
            f"home_rank must contain EP ranks of the trainer (0 to {self.ep_size - 1}), but its values range from "
            f"{self.home_rank.min(initial=0)} to {self.home_rank.max(initial=0)}.",
        )
        require(
            sorted(self.ranks.ravel().tolist()) == list(range(self.ranks.size)),
            f"`ranks` must contain each trainer rank (0 to {self.ranks.size - 1}) exactly once.",
        )

    @classmethod
    def in_megatron_order(
        cls,
        home_rank: NDArray[np.integer],
        *,
        ep_size: int,
        etp_size: int = 1,
        edp_size: int = 1,
        stage_of_layer: tuple[int, ...] | None = None,
    ) -> Self:
        """Return the layout with Megatron's ranks: expert tensor parallelism fastest, then EP, expert-DP, stages."""
        homes = np.array(home_rank, np.int32)
        stages = stage_of_layer or (0,) * len(homes)
        num_stages = 1 + max(stages, default=0)
        shape = (num_stages, edp_size, ep_size, etp_size)
        require(min(shape) >= 1, f"edp_size, ep_size and etp_size must be at least 1, got {shape[1:]}.")
        ranks = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        return cls(home_rank=homes, stage_of_layer=tuple(stages), ranks=ranks)

    @property
    def size(self) -> int:
        """T, trainers."""
        return int(self.ranks.size)

    @property
    def ep_size(self) -> int:
        """P."""
        return int(self.ranks.shape[2])

    @property
    def etp_size(self) -> int:
        """ETP, trainers that an expert is cut over."""
        return int(self.ranks.shape[3])

    @property
    def edp_size(self) -> int:
        """Trainers that hold the same shard."""
        return int(self.ranks.shape[1])

    def holders(self) -> NDArray[np.int32]:
        """Return [L, E, ETP, twins] trainers that hold each shard of each expert."""
        by_stage = self.ranks.transpose(0, 2, 3, 1)  # [stages, P, ETP, twins]
        stage = np.array(self.stage_of_layer, np.int64)[:, None]
        return np.asarray(by_stage[stage, self.home_rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """One rollout engine, a replica: its expert map, and how its ranks share experts.

    Rank i has expert-parallel index i // TP and slice i % TP of the experts in its slots, as SGLang and vLLM number
    them.
    """

    slots: NDArray[np.int32]
    """[L, W] expert in every slot; slot p is on expert-parallel rank p // (W / EP)."""
    ep_size: int
    tp_size: int = 1
    """Ranks that an expert is cut over."""
    whole_tensors: bool = False
    """True: every rank takes whole experts, of which the framework's loader keeps the slice. False: slices alone."""

    def __post_init__(self) -> None:
        require_least(self, whose="engine: ", ep_size=1, tp_size=1)
        require(
            self.slots.ndim == 2,
            f"an engine's slots must have shape [MoE layers, slots], got {list(self.slots.shape)}.",
        )
        require(
            self.slots.shape[1] % self.ep_size == 0,
            f"{self.slots.shape[1]} slots of an engine cannot be split evenly across {self.ep_size} ranks.",
        )

    @property
    def size(self) -> int:
        """Ranks of the engine."""
        return self.ep_size * self.tp_size

    def local_slots(self, index: int) -> NDArray[np.int32]:
        """Return [L, W / EP]: experts in the slots of rank `index` of the engine."""
        width = self.slots.shape[1] // self.ep_size
        start = index // self.tp_size * width
        return self.slots[:, start : start + width]

    def parts_of(self, index: int, parts_per_expert: int) -> range:
        """Return the parts of an expert that rank `index` takes."""
        if self.whole_tensors:
            return range(parts_per_expert)
        width = parts_per_expert // self.tp_size
        start = index % self.tp_size * width
        return range(start, start + width)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRank:
    """A rank of an engine among all ranks of a sync."""

    rank: int
    engine: EngineLayout
    index: int
    """Within the engine."""


@dataclass(frozen=True, kw_only=True)
class SyncProblem:
    """A trainer's weights, the engines that need them, and the nodes. It says what must travel, not how.

    Raises `InvalidInputError` where the layouts do not fit each other.
    """

    trainer: TrainerLayout
    engines: tuple[EngineLayout, ...]
    node_of: tuple[int, ...]
    """[T + engine ranks] node of every rank; ranks of one node reach each other by NVLink."""
    expert_bytes: int

    def __post_init__(self) -> None:
        require(bool(self.engines), "a weight sync needs at least one engine.")
        require(
            len(self.node_of) == self.size,
            f"node_of must name the node of each of {self.size} ranks, got {len(self.node_of)} entries.",
        )
        require(
            self.expert_bytes > 0 and self.expert_bytes % self.parts_per_expert == 0,
            f"an expert of {self.expert_bytes} bytes cannot be cut into {self.parts_per_expert} equal parts.",
        )
        num_layers, num_experts = self.trainer.home_rank.shape
        for number, engine in enumerate(self.engines):
            require(
                len(engine.slots) == num_layers,
                f"engine {number} has {len(engine.slots)} MoE layers, but the trainer has {num_layers}.",
            )
            counts = np.zeros((num_layers, num_experts), np.int64)
            is_expert = (engine.slots >= 0) & (engine.slots < num_experts)
            require(
                bool(is_expert.all()),
                f"engine {number} has a slot whose expert id is not in the range 0 to {num_experts - 1}.",
            )
            np.add.at(counts, (np.arange(num_layers)[:, None], engine.slots), 1)
            for layer, expert in np.argwhere(counts == 0):
                raise InvalidInputError(f"engine {number}, MoE layer {layer}: no slot holds expert {expert}.")

    @property
    def size(self) -> int:
        """Ranks: trainers and all engines'."""
        return self.trainer.size + sum(engine.size for engine in self.engines)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.trainer.home_rank.shape[0])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.trainer.home_rank.shape[1])

    @cached_property
    def parts_per_expert(self) -> int:
        """S = lcm(ETP, TP of all engines)."""
        return math.lcm(self.trainer.etp_size, *(engine.tp_size for engine in self.engines))

    @property
    def part_bytes(self) -> int:
        """Bytes of a part."""
        return self.expert_bytes // self.parts_per_expert

    @property
    def parts_per_atom(self) -> int:
        """S / U."""
        return self.parts_per_expert // self.atoms_per_expert

    @property
    def atom_bytes(self) -> int:
        """Bytes of an atom."""
        return self.part_bytes * self.parts_per_atom

    @property
    def num_atoms(self) -> int:
        """L * E * U."""
        return self.num_layers * self.num_experts * self.atoms_per_expert

    @cached_property
    def atoms_per_expert(self) -> int:
        """U, the fewest pieces of an expert whose parts all have the same trainers and the same engine nodes."""
        for count in range(1, self.parts_per_expert + 1):
            if self.parts_per_expert % count == 0 and self._is_uniform(count):
                return count
        return self.parts_per_expert

    def _is_uniform(self, count: int) -> bool:
        """Return whether cutting experts into `count` pieces leaves no piece with two sets of trainers or nodes."""
        if count % self.trainer.etp_size:
            return False
        first_rank = self.trainer.size
        width = self.parts_per_expert // count
        for engine in self.engines:
            nodes = np.array(self.node_of[first_rank : first_rank + engine.size]).reshape(
                engine.ep_size, engine.tp_size
            )
            first_rank += engine.size
            if engine.whole_tensors:
                continue
            of_part = np.repeat(nodes, self.parts_per_expert // engine.tp_size, axis=1)
            pieces = of_part.reshape(engine.ep_size, count, width)
            if (pieces != pieces[:, :, :1]).any():
                return False
        return True

    def engine_ranks(self) -> Iterator[EngineRank]:
        """Yield every rank of every engine."""
        rank = self.trainer.size
        for engine in self.engines:
            for index in range(engine.size):
                yield EngineRank(rank=rank, engine=engine, index=index)
                rank += 1

    def engine_rank(self, rank: int) -> EngineRank | None:
        """Return the engine rank of that number; None for a trainer's."""
        for engine_rank in self.engine_ranks():
            if engine_rank.rank == rank:
                return engine_rank
        return None

    def wanted_atoms(self) -> list[NDArray[np.int32]]:
        """Return, for every engine rank in order, the atoms that it needs at least a part of, ascending."""
        wanted: list[NDArray[np.int32]] = []
        row = np.arange(self.num_layers)[:, None] * self.num_experts
        for engine_rank in self.engine_ranks():
            experts = np.unique(row + engine_rank.engine.local_slots(engine_rank.index))
            parts = engine_rank.engine.parts_of(engine_rank.index, self.parts_per_expert)
            units = np.arange(parts.start // self.parts_per_atom, (parts.stop - 1) // self.parts_per_atom + 1)
            wanted.append((experts[:, None] * self.atoms_per_expert + units).ravel().astype(np.int32))
        return wanted

    def holders_of_atoms(self) -> NDArray[np.int32]:
        """Return [atoms, twins] trainers that hold each atom."""
        holders = self.trainer.holders()
        repeats = self.atoms_per_expert // self.trainer.etp_size
        return np.ascontiguousarray(np.repeat(holders, repeats, axis=2).reshape(self.num_atoms, self.trainer.edp_size))
