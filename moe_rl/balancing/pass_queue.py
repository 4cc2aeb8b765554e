"""The passes whose planning has begun, in the order in which they will run.

A pass is prepared on the planning thread beside whatever runs: its plan is made by all ranks together, then its tables
are built. Micro-batches may be planned in two parts, so that the pass begins when the first one's plan is ready.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Generic

from moe_rl.balancing.balanced_run import BalancedRun, MemoryOfUpdates, Tables
from moe_rl.balancing.pass_request import PassRequest, PlannedPass
from moe_rl.balancing.pass_source import (
    CountedRows,
    ExpectedOrReplayedRows,
    ExpectedRows,
    PassSource,
    ReadOnce,
    RowReader,
)
from moe_rl.balancing.route_counter import RouteCounter
from moe_rl.balancing.route_forecast import RouteForecast
from moe_rl.balancing.sequence_rows import SequenceRows


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPart(Generic[Tables]):
    """Consecutive micro-batches of a pass, planned."""

    planned: PlannedPass
    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPass(Generic[Tables]):
    """A pass whose planning has begun."""

    parts: Sequence[Future[PreparedPart[Tables]]]
    """Of consecutive micro-batches: the first ones are ready first."""
    homes: Future[PlannedPass] | None
    """Where the experts move before it; None if they stay."""
    source: PassSource
    forward_only: bool
    counter: RouteCounter | None
    """Counts what routers choose in the pass; None if nobody asks."""


class PassQueue(Generic[Tables]):
    """Prepares passes and hands them out in their order."""

    def __init__(self, run: BalancedRun[Tables], forecast: RouteForecast) -> None:
        self._run, self._forecast = run, forecast
        self.passes: deque[PreparedPass[Tables]] = deque()
        self.last_plan: PlannedPass | None = None
        """The last plan that was handed out for a pass to come, with the rows that it was made for."""

    def prepare(self, source: PassSource, *, forward_only: bool, homes: Future[PlannedPass] | None) -> None:
        """Start to plan a pass, and return at once; `homes` are the ones that experts will have moved to by then."""
        run, reader = self._run, self._reader_of(source, forward_only=forward_only)
        request = PassRequest(
            config=run.config,
            placement=run.placement,
            plan=source.plan,
            layout=source.layout,
            forward_only=forward_only,
            num_micro_batches=source.num_micro_batches,
        )
        parts: list[Future[PreparedPart[Tables]]] = []
        last_plan = self.last_plan if source.routes is None else None
        for part in self._parts_of(source):
            task = _PlanningTask(
                run=run,
                request=request,
                reader=None if reader is None else reader.micro_batches(part),
                source=source,
                last_plan=last_plan,
                part_before=parts[-1] if parts else None,
                homes=homes,
                memory=run.memory,
            )
            parts.append(run.thread.submit(task.prepare))
        rows = source.sequences_to_count
        if rows is None and run.config.observe and source.num_micro_batches:
            # Nothing is learned from rows that nobody named; they say what the plan would have made of the pass.
            rows = (SequenceRows.unannounced(),) * source.num_micro_batches
        counter = None if rows is None else RouteCounter(rows, run.route_shape, run.layers.device)
        self.passes.append(
            PreparedPass(parts=parts, homes=homes, source=source, forward_only=forward_only, counter=counter)
        )

    def prepare_again(self, homes: Future[PlannedPass] | None) -> None:
        """Prepare anew what was prepared for other homes than those that are due now."""
        passes = list(self.passes)
        self.clear()
        for prepared in passes:
            self.prepare(
                prepared.source,
                forward_only=prepared.forward_only,
                homes=None if prepared.forward_only else homes,
            )

    def clear(self) -> None:
        """Forget all of them; what the thread has begun runs on, on all ranks alike."""
        self.passes.clear()

    def _parts_of(self, source: PassSource) -> list[slice]:
        """Return the micro-batches that are planned together: all, or the first one and then the others."""
        config = self._run.config
        is_planned_whole = (
            config.observe
            or source.plan is not None
            or source.layout is not None
            or (source.routes is not None and not config.homes.reorders)
        )
        if not self._run.layers.in_order or is_planned_whole or (source.num_micro_batches or 0) <= 1:
            return [slice(None)]
        return [slice(1), slice(1, None)]  # the second is planned while the first one's micro-batch runs

    def _reader_of(self, source: PassSource, *, forward_only: bool) -> RowReader | None:
        """Return what reads the rows of a source; None if a plan is given and nothing is known of the rows."""
        run = self._run
        if source.rows is not None:
            return CountedRows(source.rows)
        if source.routes is not None:
            replayed = run.layers.reader(source.routes, run.planner.layers)
            # An update may be planned from the log-prob pass, but not with static rows, which routes alone can certify.
            if source.sequences and not forward_only and not run.config.kernels.static_rows:
                return ReadOnce(ExpectedOrReplayedRows(self._forecast, source.sequences, replayed))
            return ReadOnce(replayed)
        if source.plan is not None:
            return None
        return ReadOnce(ExpectedRows(self._forecast, source.sequences_to_count or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanningTask(Generic[Tables]):
    """Plans a part of a pass and builds its tables, on the planning thread."""

    run: BalancedRun[Tables]
    request: PassRequest
    reader: RowReader | None
    source: PassSource
    last_plan: PlannedPass | None
    part_before: Future[PreparedPart[Tables]] | None
    homes: Future[PlannedPass] | None
    memory: MemoryOfUpdates | None

    def prepare(self) -> PreparedPart[Tables]:
        """Return the part; on all ranks alike, and what fails on one is raised on all."""
        request = self.request
        if self.part_before is not None:
            self.part_before.result()  # if the part before failed, other ranks may not come here
        if self.homes is not None:  # chosen on this thread before; `begin_pass` moves the experts there
            request = replace(request, placement=self.homes.result().plan.placement)
        started = time.thread_time()
        planned = self._with_memory(self._with_rows_of_last(self.run.planner.plan_pass(request, self.reader)), request)
        tables, _ = self.run.planner.exchange.together(
            lambda: self.run.layers.tables(planned, self.source), lambda _: None
        )
        return PreparedPart(planned=replace(planned, plan_cpu_s=time.thread_time() - started), tables=tables)

    def _with_rows_of_last(self, planned: PlannedPass) -> PlannedPass:
        """Return a plan that was made here with what was known of the rows when it was made."""
        last_plan = self.last_plan
        if last_plan is None or last_plan.plan is not self.request.plan or planned.misfit is not None:
            return planned
        return replace(
            planned,
            predicted_rows=last_plan.predicted_rows,
            static_rows=last_plan.static_rows,
            most_rows=last_plan.most_rows,
            tokens=last_plan.tokens,
            plan_time_s=last_plan.plan_time_s,
        )

    def _with_memory(self, planned: PlannedPass, request: PassRequest) -> PlannedPass:
        """Return an update's plan with the forecast of its memory, if rows and tokens are known."""
        rows = planned.predicted_rows if planned.most_rows is None else planned.most_rows
        if self.memory is None or request.forward_only or planned.tokens is None or rows is None or not rows.size:
            return planned
        forecast = self.memory(rows[None].astype(float), planned.tokens[None].astype(float), request.placement)
        return replace(planned, memory=forecast)
