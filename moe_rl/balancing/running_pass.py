"""The pass that is under way, and what is counted of it when it ends."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.balanced_run import BalancedRun, PassResults, Tables
from moe_rl.balancing.home_choice import ExpertMoves
from moe_rl.balancing.loads import RankRows, Source
from moe_rl.balancing.pass_metrics import OBSERVED, PassMetrics
from moe_rl.balancing.pass_notices import PassNotices
from moe_rl.balancing.pass_queue import PreparedPart, PreparedPass
from moe_rl.balancing.pass_request import PlannedPass, joined
from moe_rl.balancing.route_counter import CountedPass, RouteCounter
from moe_rl.balancing.route_forecast import RouteForecast


@dataclass(slots=True, kw_only=True)
class RunningPass(Generic[Tables]):
    """The pass that is under way."""

    planned: PlannedPass
    """Of its first micro-batches."""
    later: Sequence[Future[PreparedPart[Tables]]]
    """Of the micro-batches that come after those of `planned`."""
    forward_only: bool
    plan_wait_s: float
    """How long the training loop waited for plans so far."""
    num_micro_batches: int
    """M that were announced."""
    counter: RouteCounter | None
    is_learned: bool
    """Whether passes to come are planned from what this one counts."""

    @classmethod
    def of(cls, prepared: PreparedPass[Tables], planned: PlannedPass, *, plan_wait_s: float) -> Self:
        """Return a prepared pass that begins now, with the plan of its first part as it will be carried out."""
        later_parts = prepared.parts[1:]
        num_micro_batches = planned.plan.replicas.num_micro_batches
        if later_parts and prepared.source.num_micro_batches is not None:
            num_micro_batches = prepared.source.num_micro_batches
        return cls(
            planned=planned,
            later=later_parts,
            forward_only=prepared.forward_only,
            plan_wait_s=plan_wait_s,
            num_micro_batches=num_micro_batches,
            counter=prepared.counter,
            is_learned=prepared.source.sequences_to_count is not None,
        )

    @property
    def parts(self) -> list[PlannedPass]:
        """The plans of all micro-batches, as soon as all are made."""
        return [self.planned, *(part.result().planned for part in self.later)]

    def metrics(
        self, results: PassResults, *, notes: tuple[str, ...], moves: ExpertMoves, residents: int
    ) -> PassMetrics:
        """Return what the pass was planned to do beside what it did."""
        parts = self.parts
        planned, num_ran = joined(parts), len(results.actual_rows)
        source: Source = "plan"
        known_share, misfit, predicted_rows, num_replicas = 1.0, planned.misfit, None, 0
        if planned.counted is not None:
            source, known_share = planned.counted.source, planned.counted.known
        if misfit is None:
            num_replicas = sum(part.local_plan.replicas.copies for part in parts)
        if misfit is OBSERVED:
            misfit = None
        if misfit is None:
            predicted_rows = _of_first(num_ran, planned.predicted_rows)
        return PassMetrics(
            policy=planned.plan.policy,
            source=source,
            known_share=known_share,
            misfit=misfit,
            notes=notes,
            actual_rows=results.actual_rows,
            predicted_rows=predicted_rows,
            static_rows=_of_first(num_ran, planned.static_rows),
            replicas=num_replicas,
            residents=residents,
            pushed_bytes=results.pushed_bytes,
            returned_bytes=results.returned_bytes,
            plan_time_s=planned.plan_time_s,
            plan_wait_s=self.plan_wait_s,
            plan_cpu_s=planned.plan_cpu_s,
            memory=planned.memory,
            reordered_bytes=moves.received_bytes,
            reorder_s=moves.seconds,
            micro_batches_in_flight=results.micro_batches_in_flight,
        )


def _of_first(num_micro_batches: int, rows: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    return None if rows is None else rows[:num_micro_batches]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitedTables(Generic[Tables]):
    """The tables of later micro-batches; waiting for them counts as waiting for the pass's plan."""

    running: RunningPass[Tables]
    part: Future[PreparedPart[Tables]]
    notices: PassNotices
    ep_rank: int

    def wait(self) -> Tables:
        """Return the tables when they are ready."""
        started = time.perf_counter()
        prepared = self.part.result()
        self.notices.say_memory(prepared.planned.memory, ep_rank=self.ep_rank)
        self.running.plan_wait_s += time.perf_counter() - started
        return prepared.tables


class CountedRoutes(Generic[Tables]):
    """What the routers of passes chose, counted and kept for passes to come."""

    def __init__(self, run: BalancedRun[Tables]) -> None:
        self._run = run
        self.forecast = RouteForecast(run.route_shape, self._sum_over_grid)
        """Used on the planning thread alone, in the order of the passes."""
        self.loads: Future[RankRows] | None = None
        """Of the last pass whose routers were counted; under tensor parallelism by a rank's share of the sequences."""
        self.counted: CountedPass | None = None
        """The counts of that pass."""

    def loads_of(
        self, running: RunningPass[Tables], counter: RouteCounter, prediction: RankRows | None, *, num_begun: int
    ) -> Future[RankRows]:
        """Return the loads to be of a pass that has ended; they are kept if passes to come are planned from them."""
        if running.is_learned:
            return self.record(counter, prediction, num_begun=num_begun, is_update=not running.forward_only)
        return self.count(counter, num_begun=num_begun)

    def record(
        self, counter: RouteCounter, prediction: RankRows | None, *, num_begun: int, is_update: bool
    ) -> Future[RankRows]:
        """Start to keep what a pass counted, of which `num_begun` micro-batches came; return its loads to be."""
        if self.loads is not None:
            self.loads.result()  # what went wrong on the thread is raised here
        if 0 < num_begun < len(counter.rows):
            counter.forget_after(num_begun)
            if prediction is not None:
                prediction = prediction.micro_batches(slice(num_begun))
        counted = self.counted = counter.start_fetch(self._run.layers.sum_counts)
        self.loads = self._run.thread.submit(
            lambda: self.forecast.record(counted.micro_batches(), prediction=prediction, is_update=is_update)
        )
        return self.loads

    def count(self, counter: RouteCounter, *, num_begun: int) -> Future[RankRows]:
        """Return the loads to be of a pass, of which `num_begun` micro-batches came; nothing is kept of it."""
        if 0 < num_begun < len(counter.rows):
            counter.forget_after(num_begun)
        counted = self.counted = counter.start_fetch(self._run.layers.sum_counts)
        return self._run.thread.submit(lambda: self.forecast.loads_of(counted.micro_batches()))

    def _sum_over_grid(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        total: NDArray[np.int64] = np.sum(self._run.planner.exchange.gather_in_grid(counts), axis=(0, 1))
        return total
