"""What the parts of a pass cycle share: configuration, planner, the framework's layers, homes, the planning thread.

`RunLayers` is what a framework implements: how its routes are read, what its layers are told, and what they did.
Axes: M micro-batches, L MoE layers of this stage, P EP ranks, E experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.homes import ExpertHomes, ImaginedHomes, MovableExperts
from moe_rl.balancing.loads import RouteArray
from moe_rl.balancing.migrate import ExpertGrid
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_request import PlannedPass
from moe_rl.balancing.pass_source import PassSource, RowReader
from moe_rl.balancing.route_counter import RouteCounter
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement import ExpertPlacement
from moe_rl.simulators.memory import MemoryForecast

# `forecast_memory` of a run's updates: (rows, tokens, placement) -> forecast.
MemoryOfUpdates = Callable[..., MemoryForecast]
Tables = TypeVar("Tables")
TablesOut = TypeVar("TablesOut", covariant=True)


class LaterTables(Protocol[TablesOut]):
    """The tables of later micro-batches of a pass, which are still planned when it begins."""

    def wait(self) -> TablesOut:
        """Return them when they are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelPlace:
    """Where this rank stands among those that share a batch."""

    dp_rank: int
    stage: int
    """Its pipeline stage."""
    speaks: bool
    """Whether it speaks for the ranks that share both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResults:
    """What the layers did in a pass, as the fields of `PassMetrics` say it."""

    actual_rows: NDArray[np.int64]
    """[M, L, P], in the micro-batches that ran."""
    pushed_bytes: int
    returned_bytes: int
    micro_batches_in_flight: int | None


class RunLayers(ABC, Generic[Tables]):
    """The MoE layers of one rank, as a framework has them."""

    in_order = False
    """Whether they can do with the plan of the first micro-batch while those of the others are made."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where routers choose."""

    @abstractmethod
    def reader(self, routes: Sequence[RouteArray], layers: Sequence[int]) -> RowReader:
        """Return what counts these routes in these layers, on the planning thread; copies from a device begin now."""

    @abstractmethod
    def tables(self, planned: PlannedPass, source: PassSource) -> Tables:
        """Return what depends on the plan of a pass alone, made beside the pass before."""

    @abstractmethod
    def activate(
        self, planned: PlannedPass, tables: Tables, later: Sequence[LaterTables[Tables]], *, num_micro_batches: int
    ) -> None:
        """Tell every layer what it does in the pass; if there is a misfit, to run without replicas.

        `later` are the tables of the micro-batches after those of `planned`.
        """

    @abstractmethod
    def count_routes(self, counter: RouteCounter | None) -> None:
        """Let the counter count what routers choose, until the pass ends."""

    @abstractmethod
    def results(self, planned: PlannedPass, gathering: "RowGathering[Tables]", *, forward_only: bool) -> PassResults:
        """Return what the layers did in the pass; a collective of the EP group."""

    @abstractmethod
    def stop(self, *, forward_only: bool, complete: bool) -> None:
        """Give every layer back to the framework until the next pass; `complete`: the pass came to its end.

        A pass that did not may have left this rank anywhere; no other rank may be waited for.
        """

    def set_capacity(self, planned: PlannedPass) -> None:
        """Size the experts' buffers for the whole pass, which `config.static_rows` asks for."""
        raise InvalidInputError("static_rows needs Megatron's MoE layers.")

    def sum_counts(self, counts: torch.Tensor) -> None:
        """Sum counts, in place, over the ranks of which each has some rows of every sequence."""

    def why_experts_stay(self) -> str | None:
        """Return why experts cannot move now; None if they can."""
        return None

    def of_all_stages(self, placement: ExpertPlacement) -> ExpertPlacement:
        """Return the placement in which every pipeline stage has its own layers as it says; a collective of the run."""
        return placement

    @property
    def data_parallel_place(self) -> DataParallelPlace:
        """Of this rank."""
        return DataParallelPlace(dp_rank=dist.get_rank(), stage=0, speaks=True)


class BalancedRun(Generic[Tables]):
    """One training run on this rank, as all parts of its pass cycle see it."""

    def __init__(
        self,
        planner: PassPlanner,
        layers: RunLayers[Tables],
        *,
        config: BalancerConfig,
        groups: ExpertGrid,
        movable: MovableExperts | str,
    ) -> None:
        """`movable` are the experts and their optimizer state, or why they cannot move."""
        self.config, self.planner, self.layers = config, planner, layers
        contiguous = ExpertPlacement.contiguous(
            num_layers=planner.model.num_moe_layers,
            num_experts=planner.model.num_experts,
            ep_size=groups.ep_size,
            spare_slots=config.slots.foreign,
        )
        self.own_placement = replace(contiguous, resident_slots=config.slots.resident_slots)
        """Homes where the framework puts the experts, and nobody resident."""
        self.homes_stay: str | None = None
        """Why experts must not move by themselves, if that is so."""
        self.homes: ExpertHomes | None = None
        if isinstance(movable, str):
            self.homes_stay = movable
        else:
            kind = ImaginedHomes if config.observe else ExpertHomes
            scratch = config.homes.reorder_scratch_bytes
            self.homes = kind(self.own_placement, movable, groups=groups, max_scratch_bytes=scratch)
        self.memory: MemoryOfUpdates | None = None
        """None if the framework does not say how it runs updates."""
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moe_rl-plan")
        """Does all that uses the exchange, one thing after the other, so that all ranks do it in one order."""

    @property
    def placement(self) -> ExpertPlacement:
        """Where the experts have their homes now, and which copies stay for the step."""
        return self.own_placement if self.homes is None else self.homes.placement

    @property
    def why_homes_stay(self) -> str | None:
        """Why experts cannot move by themselves; None if they can."""
        return self.homes_stay or self.layers.why_experts_stay()

    @property
    def route_shape(self) -> tuple[int, int, int]:
        """(L, E, K)"""
        model = self.planner.model
        return len(self.planner.layers), model.num_experts, model.top_k

    @property
    def num_residents(self) -> int:
        """Copies that stay, of all layers of the model; none in a run that is only observed."""
        return 0 if self.config.observe else int((self.placement.resident_experts >= 0).sum())

    def fitting_tokens(self, planned: PlannedPass, actual_rows: NDArray[np.int64]) -> int | None:
        """Return the tokens of a micro-batch with which an update like this would fit; None if nobody can tell."""
        if self.memory is None or planned.tokens is None or not actual_rows.any():
            return None
        rows, tokens = actual_rows[None].astype(float), planned.tokens[None].astype(float)
        return self.memory(rows, tokens, self.placement).largest_micro_batch

    def gather(self, own_counts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return what every rank of the EP group gave; a collective of it."""
        return self.thread.submit(self.planner.exchange.gather, own_counts).result()

    def finish_planning(self) -> None:
        """Wait until nothing is exchanged any more."""
        self.thread.submit(lambda: None).result()


class RowGathering(Generic[Tables]):
    """Gathers what the ranks of an EP group say of the micro-batches of one pass."""

    def __init__(self, run: BalancedRun[Tables], clocks: Sequence[MicroBatchClock], announced: int) -> None:
        self._run, self._clocks = run, clocks
        self.announced = announced
        """Micro-batches that the pass was planned for."""

    @property
    def begun(self) -> int:
        """Micro-batches that began on this rank."""
        return max(clock.micro_batches for clock in self._clocks)

    def of_all_ranks(self, count: Callable[[range], NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Return what `count` says on every rank of the EP group of the micro-batches that ran, [M, ...] each.

        `count(range)` is [len(range), ...]. With the counts of the announced micro-batches every rank says how many it
        began; if these are more, another exchange follows. If no layer can tell, all that were announced are counted.

        Example: announced 2, and ranks began 2 and 3. Both first send counts of 0 and 1, then of micro-batch 2.
        """
        own_counts = count(range(self.announced))
        messages = self._run.gather(np.append(own_counts.ravel(), self.begun))
        ran = max(int(message[-1]) for message in messages) or self.announced
        counts = [message[:-1].reshape(own_counts.shape) for message in messages]
        if ran > self.announced:
            counts_beyond = self._run.gather(count(range(self.announced, ran)))
            counts = [np.concatenate(parts) for parts in zip(counts, counts_beyond, strict=True)]
        return [of_rank[:ran] for of_rank in counts]
