"""A pass from its routes to its metrics: prepared beside whatever runs, begun, ended, whatever the framework is.

`PassCycle` does what all frameworks share; a balancer of one of them says how its routes are read, what its layers are
told, and what they did. Every method is called on all ranks alike. M micro-batches, l MoE layers of this stage, P EP
ranks.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import RankRows, mean_micro_batch
from moe_rl.balancing.pass_metrics import PassMetrics
from moe_rl.balancing.pass_planner import PassPlanner, PassRequest, PlannedPass, moved_since
from moe_rl.balancing.schedule import require_useful_slots
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.base import COPIES, PLACEMENT, Levers
from moe_rl.profiling import ranges

logger = logging.getLogger(__name__)

Routes = Sequence[Any]
"""Of this rank's micro-batches, a tensor or an array each."""
Tables = TypeVar("Tables")
Read = Callable[[], RankRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared(Generic[Tables]):
    """A pass whose planning has begun."""

    planned: Future[tuple[PlannedPass, Tables]]
    forward_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPass:
    """The pass that is under way."""

    planned: PlannedPass
    forward_only: bool
    plan_wait_s: float

    @property
    def num_micro_batches(self) -> int:
        """M of its plan."""
        return self.planned.plan.replicas.num_micro_batches


class PassCycle(ABC, Generic[Tables]):
    """Plans passes and tells the layers what to do in them."""

    def __init__(self, planner: PassPlanner, *, config: BalancerConfig, clocks: Sequence[MicroBatchClock]) -> None:
        require_useful_slots(config)
        self.config, self.model = config, planner.model
        self._planner, self._clocks = planner, list(clocks)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moe_rl-plan")
        """Does all that uses the exchange, one thing after the other, so that all ranks do it in one order."""
        self._prepared: deque[_Prepared[Tables]] = deque()
        self._running: RunningPass | None = None
        self._said: tuple[str, ...] = ()
        """What the plan of the last pass said of levers that it makes no use of."""
        self._last_made: PlannedPass | None = None
        """The last plan that was handed out, and what is known of the loads that it was made for."""
        self._occurred: RankRows | None = None
        """What the routers of this rank chose in the last pass; counted for forecasts alone."""

    @property
    @abstractmethod
    def placement(self) -> ExpertPlacement:
        """Where the experts have their homes now, and which copies stay for the step."""

    @abstractmethod
    def _reader(self, routes: Routes, layers: Sequence[int]) -> Read:
        """Return what counts these routes in these layers, on the planning thread; copies from a device begin now."""

    @abstractmethod
    def _tables(self, planned: PlannedPass, routes: Routes | None) -> Tables:
        """Return what depends on the plan of a pass alone, made beside the pass before."""

    @abstractmethod
    def _activate(self, planned: PlannedPass, tables: Tables) -> None:
        """Tell every layer what it does in the pass; where there is a misfit, to run without replicas."""

    @abstractmethod
    def _ran(self, running: RunningPass) -> dict[str, Any]:
        """Return what the pass did, as fields of `PassMetrics`: rows and bytes."""

    @abstractmethod
    def _stop(self, running: RunningPass) -> None:
        """Give every layer back to the framework until the next pass."""

    def load_of(self, routes: Routes) -> StepLoad:
        """Return the loads of all ranks from these routes: [N, L, K] ids per micro-batch of this rank, -1 if unknown.

        L counts the MoE layers of the whole model. N may differ between ranks and micro-batches, M may not.
        A collective of all ranks of the pipeline stage.
        """
        read = self._reader(routes, self._planner.layers_of(PLACEMENT))
        return self._thread.submit(self._planner.load_of, read).result()

    def plan(self, routes: Routes, *, layout: BatchLayout | None = None, forward_only: bool = False) -> Plan:
        """Return the policy's plan for these routes (see `load_of`) that leaves every expert where it is.

        It is the plan of this rank's EP group and pipeline stage.
        """
        return self._made(routes, layout=layout, forward_only=forward_only)

    def plan_reorder(self, routes: Routes, *, layout: BatchLayout | None = None) -> Plan:
        """Return the policy's plan for these routes, which may move experts, for all EP groups and stages.

        It chooses the copies that stay for a step, too. Hand it to `reorder`, and then to `begin_pass` for the batch
        that the routes are of.
        """
        return self._made(routes, layout=layout, may=PLACEMENT)

    def _made(self, routes: Routes, *, may: Levers = COPIES, **asked: Any) -> Plan:
        request = self._request(may=may, **asked)
        read = self._reader(routes, self._planner.layers_of(may))
        self._last_made = self._thread.submit(self._planner.plan_pass, request, read).result()
        return self._last_made.plan

    def prepare(
        self,
        routes: Routes | None = None,
        layout: BatchLayout | None = None,
        *,
        plan: Plan | None = None,
        num_micro_batches: int | None = None,
        forward_only: bool = False,
    ) -> None:
        """Start to plan a pass, and to build its tables, beside whatever runs, and return at once.

        The arguments are those of `begin_pass`, which takes prepared passes in their order, without arguments. Routes
        on a device are copied in the order of its stream. Experts must not move in between: a pass that was prepared
        for another placement runs without replicas.
        """
        known = routes is not None or plan is not None
        require(
            known != (num_micro_batches is not None),
            "a pass needs routes, a plan, or num_micro_batches alone, or a prepare() before it.",
        )
        require(
            known or self.config.forecast,
            "a pass without routes needs BalancerConfig(forecast=True), which counts routing.",
        )
        read = None
        if routes is not None:
            read = self._reader(routes, self._planner.layers)
        elif num_micro_batches is not None:
            read = partial(mean_micro_batch, self._occurred or self._nothing_yet(), num_micro_batches)
        request = self._request(plan=plan, layout=layout, forward_only=forward_only)
        last = self._last_made if routes is None else None
        planned = self._thread.submit(self._prepare, request, read, routes, last)
        self._prepared.append(_Prepared(planned=planned, forward_only=forward_only))

    def begin_pass(
        self,
        routes: Routes | None = None,
        layout: BatchLayout | None = None,
        *,
        plan: Plan | None = None,
        num_micro_batches: int | None = None,
        forward_only: bool = False,
    ) -> Plan:
        """Make the M micro-batches that come next follow a plan and return it; experts never move here.

        Without arguments it is the pass that was prepared first (`prepare`), for which it waits only if it is not
        ready, as `PassMetrics.plan_wait_s` says. Else the plan is `plan`, or one made from `routes` (see `load_of`),
        or, with `num_micro_batches` alone, one made from the routing of the last pass (`BalancerConfig.forecast`).
        Beside a `plan`, `routes` say what the metrics call predicted.

        The plan is a hint: whatever tokens come, the result is the framework's own. Where the ranks hold different
        plans, or a plan for another batch or another placement, all of them run the pass without replicas and say so in
        a warning. A plan for another model or another number of EP ranks or slots raises `InvalidInputError`, and so do
        routes that are none: on every rank, whichever it was.
        """
        self._require_ready()
        if not (routes is None and plan is None and num_micro_batches is None and self._prepared):
            require(not self._prepared, "a prepared pass waits: begin it first, by begin_pass() without arguments.")
            self.prepare(routes, layout, plan=plan, num_micro_batches=num_micro_batches, forward_only=forward_only)
        started = time.perf_counter()
        prepared = self._prepared.popleft()
        with ranges.range("plan"):
            planned, tables = prepared.planned.result()
        plan_wait_s = time.perf_counter() - started
        planned = replace(planned, misfit=planned.misfit or moved_since(planned, self.placement))
        if planned.misfit is not None:
            logger.warning("moe_rl: this pass runs without replicas: %s.", planned.misfit.sentence)
        self._activate(planned, tables)
        for clock in self._clocks:
            clock.reset()
        self._say(planned.plan.notes)
        self._running = RunningPass(planned=planned, forward_only=prepared.forward_only, plan_wait_s=plan_wait_s)
        return planned.plan

    def end_pass(self) -> PassMetrics:
        """End the pass and return what it did; a collective of the EP group."""
        if self._running is None:
            raise InvalidInputError("no pass is under way: call begin_pass() first.")
        running, self._running = self._running, None
        planned = running.planned
        metrics = PassMetrics(
            policy=planned.plan.policy,
            misfit=planned.misfit,
            notes=planned.plan.notes,
            predicted_rows=None if planned.misfit else planned.predicted_rows,
            static_rows=planned.static_rows,
            replicas=0 if planned.misfit else planned.here.replicas.copies,
            plan_time_s=planned.plan_time_s,
            plan_wait_s=running.plan_wait_s,
            **self._ran(running),
        )
        self._stop(running)
        return metrics

    def _request(self, **asked: Any) -> PassRequest:
        return PassRequest(config=self.config, placement=self.placement, **asked)

    def _prepare(
        self, request: PassRequest, read: Read | None, routes: Routes | None, last: PlannedPass | None
    ) -> tuple[PlannedPass, Tables]:
        """Plan a pass and build its tables; runs on the thread, on all ranks alike, and raises on all of them."""
        planned = self._planner.plan_pass(request, read)
        if last is not None and last.plan is request.plan and planned.misfit is None:
            planned = replace(
                planned,
                predicted_rows=last.predicted_rows,
                static_rows=last.static_rows,
                plan_time_s=last.plan_time_s,
            )
        tables, _ = self._planner.exchange.together(lambda: self._tables(planned, routes), lambda _: None)
        return planned, tables

    def _nothing_yet(self) -> RankRows:
        """Return a micro-batch without rows: what is known before the first pass."""
        layers, experts = len(self._planner.layers), self.model.num_experts
        return RankRows(pairs=np.zeros((1, layers, experts), np.int32), rows=np.zeros(1, np.int64))

    def _say(self, notes: tuple[str, ...]) -> None:
        """Warn once, on one rank, of each lever that plans make no use of."""
        beginnings = tuple(note.partition(":")[0] for note in notes)
        if dist.get_rank() == 0:
            for beginning, note in zip(beginnings, notes, strict=True):
                if beginning not in self._said:
                    logger.warning("moe_rl: %s", note)
        self._said = beginnings

    def _gathered(self, mine: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return what every rank of the EP group gave."""
        return self._thread.submit(self._planner.exchange.gather, mine).result()

    def _require_ready(self) -> None:
        """Raise where a pass cannot begin now."""
        self._require_no_pass("the next begin_pass()")

    def _require_no_pass(self, what: str) -> None:
        require(self._running is None, f"a pass is under way: call end_pass() before {what}.")
