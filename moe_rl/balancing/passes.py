"""A pass from its source to its metrics: prepared beside whatever runs, begun, ended, whatever the framework is.

`PassCycle` is what a training loop holds. It is made of

    BalancedRun      configuration, planner, the framework's layers (`RunLayers`), homes, the planning thread
    PassQueue        the passes whose planning has begun
    HomeChoice       which homes and resident copies the next update gets
    CountedRoutes    what the routers of passes chose, from which passes to come are predicted
    RunningPass      the pass that is under way

Every method is called on all ranks alike. M micro-batches, L MoE layers of this stage, P EP ranks.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Generic

from moe_rl.balancing.balanced_run import BalancedRun, RowGathering, RunLayers, Tables
from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.home_choice import ExpertMoves, HomeChoice
from moe_rl.balancing.homes import ExpertHomes, MovableExperts
from moe_rl.balancing.loads import RouteArray
from moe_rl.balancing.migrate import ExpertGrid
from moe_rl.balancing.pass_metrics import OBSERVED, PassMetrics
from moe_rl.balancing.pass_notices import PassNotices
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_queue import PassQueue
from moe_rl.balancing.pass_request import PassRequest, PlannedPass, joined, moved_since
from moe_rl.balancing.pass_source import CountingRows, ExpectedRows, PassSource, RowReader
from moe_rl.balancing.rank_packing import RankPacking
from moe_rl.balancing.running_pass import CountedRoutes, RunningPass, WaitedTables
from moe_rl.balancing.schedule import require_useful_slots
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.base import COPIES, PLACEMENT
from moe_rl.profiling import ranges

logger = logging.getLogger(__name__)


class RoutePlanner(Generic[Tables]):
    """Plans for routes that are at hand, whether or not a pass with them will come."""

    def __init__(self, run: BalancedRun[Tables], routes: CountedRoutes[Tables]) -> None:
        self.run = run
        self.model = run.planner.model
        self.own_placement = run.own_placement
        """Homes where the framework puts the experts, and nobody resident."""
        self._queue = PassQueue(run, routes.forecast)

    @property
    def config(self) -> BalancerConfig:
        """What the run was attached with."""
        return self.run.config

    @property
    def placement(self) -> ExpertPlacement:
        """Where the experts have their homes now, and which copies stay for the step."""
        return self.run.placement

    def load_of(self, routes: Sequence[RouteArray]) -> StepLoad:
        """Return the loads of all ranks from these routes: [N, L, K] ids per micro-batch of this rank, -1 if unknown.

        L counts the MoE layers of the whole model. N may differ between ranks and micro-batches, M may not.
        A collective of all ranks of the pipeline stage.
        """
        planner = self.run.planner
        reader = self.run.layers.reader(routes, planner.layers_of(PLACEMENT))
        return self.run.thread.submit(planner.load_of, reader).result()

    def plan(
        self, routes: Sequence[RouteArray], *, layout: BatchLayout | None = None, forward_only: bool = False
    ) -> Plan:
        """Return the policy's plan for these routes (see `load_of`) that leaves every expert where it is.

        It is the plan of this rank's EP group and pipeline stage.
        """
        request = PassRequest(
            config=self.config,
            placement=self.placement,
            may=COPIES,
            layout=layout,
            forward_only=forward_only,
            whole_plan=True,
        )
        return self._plan_for(request, routes)

    def plan_reorder(self, routes: Sequence[RouteArray], *, layout: BatchLayout | None = None) -> Plan:
        """Return the policy's plan for these routes, which may move experts, for all EP groups and stages.

        It chooses the copies that stay for a step, too. Hand it to `reorder`, and then to `begin_pass` for the batch
        that the routes are of.
        """
        request = PassRequest(
            config=self.config, placement=self.placement, may=PLACEMENT, layout=layout, whole_plan=True
        )
        return self._plan_for(request, routes)

    def _plan_for(self, request: PassRequest, routes: Sequence[RouteArray]) -> Plan:
        planner = self.run.planner
        reader = self.run.layers.reader(routes, planner.layers_of(request.may))
        planned = self.run.thread.submit(planner.plan_pass, request, reader).result()
        self._queue.last_plan = planned
        return planned.plan


class PassCycle(RoutePlanner[Tables]):
    """Plans passes and tells the layers what to do in them."""

    def __init__(
        self,
        planner: PassPlanner,
        layers: RunLayers[Tables],
        *,
        config: BalancerConfig,
        clocks: Sequence[MicroBatchClock],
        groups: ExpertGrid,
        movable: MovableExperts | str,
    ) -> None:
        """`movable` are the experts and their optimizer state, or why they cannot move."""
        require_useful_slots(config)
        run = BalancedRun(planner, layers, config=config, groups=groups, movable=movable)
        self.routes = CountedRoutes(run)
        super().__init__(run, self.routes)
        self.fitting_tokens: int | None = None
        """Tokens of a micro-batch on a rank with which an update like the last pass would fit; None: not known yet."""
        self._clocks = list(clocks)
        self._home_choice = HomeChoice(run)
        self._notices = PassNotices()
        self._running: RunningPass[Tables] | None = None

    def packed(
        self,
        micro_batches: Sequence[Sequence[int]],
        tokens: Sequence[Any],
        *,
        token_budget: int,
        routes: Sequence[RouteArray] | None = None,
    ) -> list[list[int]]:
        """Return this rank's sequences in as many micro-batches, so that those of all ranks complement each other.

        `micro_batches` are the framework's: which sequences are in each. `tokens` [N] are the ids of each sequence, by
        which the log-prob pass is asked if there are no `routes` [N, L, K] of it. Every micro-batch keeps a sequence
        and has at most `token_budget` tokens of its data-parallel rank. If nothing is known of the sequences the given
        micro-batches come back. Call it for the update that comes, before `begin_pass`: experts move first, if they
        will. A collective of all ranks.
        """
        self._require_no_pass("packed()")
        unchanged = [list(batch) for batch in micro_batches]
        if self.config.observe:
            return unchanged
        rows = [SequenceRows.of_tokens([sequence]) for sequence in tokens]
        self._home_choice.settle(rows)
        self._home_choice.move()
        reader: RowReader = ExpectedRows(self.routes.forecast, rows)
        if routes is not None:
            reader = self.run.layers.reader(routes, self.run.planner.layers)
        loads = self.run.thread.submit(reader.read).result()
        packing = RankPacking(self.run, token_budget=token_budget)
        return packing.packed(loads, [len(sequence) for sequence in tokens], unchanged) or unchanged

    def reorder(self, target: Plan | ExpertPlacement) -> int:
        """Move experts to the homes of `target`, with their optimizer state; return the bytes this rank received.

        Call it between an optimizer step and the next forward; a collective of all ranks of the run. Raises
        `InvalidInputError` if the framework's experts cannot move, and `GradientsWaitError`, which is one, while
        gradients of experts that would move wait for an optimizer step. Nothing moves if a rank cannot prepare
        (`ReorderError`); a connection that breaks later leaves every expert whole and `placement` telling, for the
        layers of this rank, where they are.
        """
        return self._movable_homes("reorder()").reorder(target.placement if isinstance(target, Plan) else target)

    def canonical(self, *, weights_only: bool = False) -> AbstractContextManager[None]:
        """Put every expert back where the framework expects it while a checkpoint or a weight export runs.

        `weights_only` leaves the optimizer state where it is: for an export, which does not look at it.
        """
        return self._movable_homes("canonical()").canonical(weights_only=weights_only)

    def prepare(self, source: PassSource, *, forward_only: bool = False) -> None:
        """Start to plan a pass, and to build its tables, beside whatever runs, and return at once.

        The arguments are those of `begin_pass`, which takes prepared passes in their order, without a source. Routes
        on a device are copied in the order of its stream. An update is planned for the homes that the balancer is about
        to choose by itself. Experts must not move otherwise: a pass that was prepared for another placement runs
        without replicas.
        """
        homes = None if forward_only else self._home_choice.proposed.fresh
        self._queue.prepare(source, forward_only=forward_only, homes=homes)

    @property
    def searches_homes(self) -> bool:
        """Whether experts may move when the next update begins."""
        return self._home_choice.searches

    def drop_prepared(self) -> None:
        """Forget the passes that were prepared: others come."""
        self._queue.clear()

    def begin_pass(self, source: PassSource | None = None, *, forward_only: bool = False) -> Plan:
        """Make the M micro-batches that come next follow a plan and return it.

        `source` says from what the plan is made. Without one it is the pass that was prepared first (`prepare`), for
        which it waits only if it is not ready, as `PassMetrics.plan_wait_s` says.

        If the balancer reorders by itself, or no routes are known, micro-batches are planned in their order: the pass
        begins, and this returns, with the plan of the first one. Of quotas it has this rank's alone: `plan` returns
        those of all ranks. The plan is a hint: whatever tokens come, the result
        is the framework's own. If the ranks hold different plans, or a plan for another batch or another placement, all
        of them run the pass without replicas and say so in a warning. A plan for another model or another number of EP
        ranks or slots raises `InvalidInputError`, and so do routes that are none: on every rank, whichever it was.
        """
        self._require_ready()
        self._settle_homes(source, forward_only=forward_only)
        if source is not None:
            require(not self._queue.passes, "the prepared pass must begin first: call begin_pass() without a source.")
            self.prepare(source, forward_only=forward_only)
        require(bool(self._queue.passes), "call begin_pass() with a PassSource, or call prepare() first.")
        started = time.perf_counter()
        prepared = self._queue.passes.popleft()
        with ranges.range("plan"):
            first_part = prepared.parts[0].result()
        plan_wait_s = time.perf_counter() - started
        running = RunningPass.of(prepared, self._carried_out(first_part.planned), plan_wait_s=plan_wait_s)
        if self.config.kernels.static_rows:
            self.run.layers.set_capacity(joined(running.parts))
        self._running = running
        try:
            self._activate(running, first_part.tables)
        except BaseException:
            self.give_up()
            raise
        return running.planned.plan

    def end_pass(self) -> PassMetrics:
        """End the pass and return what it did; a collective of the EP group."""
        if self._running is None:
            raise InvalidInputError("no pass has begun: call begin_pass() first.")
        try:
            metrics = self._metrics_of(self._running)
        except BaseException:
            self.give_up()
            raise
        running, self._running = self._running, None
        self._home_choice.moves = ExpertMoves()
        self.run.layers.stop(forward_only=running.forward_only, complete=True)
        if not running.forward_only:
            self._notices.say_source(metrics.source)
        return metrics

    def give_up(self) -> None:
        """End a pass whose code raised: on this rank alone, without a word to the others; nothing is learned of it.

        From then on experts can come home for a checkpoint or an export, and the next pass can begin, as after
        `end_pass`. Nothing waits here: weights and gradients of copies that are on their way arrive, or are dropped,
        when the next pass begins. Gradients that the pass has left in the parameters are the caller's. Passes that are
        prepared stay prepared (`drop_prepared`). Without a pass under way it does nothing.

            balancer.begin_pass(PassSource.replayed(routes))
            try:
                forward_backward_func(...)      # raises: the user's loss, memory, Ctrl-C
            except BaseException:
                balancer.give_up()
                raise
            balancer.end_pass()
        """
        running, self._running = self._running, None
        if running is not None:
            self.run.layers.stop(forward_only=running.forward_only, complete=False)
            self._home_choice.moves = ExpertMoves()

    def _settle_homes(self, source: PassSource | None, *, forward_only: bool) -> None:
        """Move experts before an update; passes that were prepared for other homes than those are prepared again."""
        choice, passes = self._home_choice, self._queue.passes
        if not passes:
            if not forward_only:
                choice.settle(() if source is None else source.sequences or ())
                choice.move()
            return
        next_pass = passes[0]
        if not next_pass.forward_only and choice.settle(next_pass.source.sequences or ()):
            self._queue.prepare_again(choice.proposed.fresh)
        # A pass that was prepared for other homes than those proposed now keeps the experts where it expects them.
        homes = passes[0].homes
        if homes is not None and homes is choice.proposed.fresh and not choice.move():
            self._queue.prepare_again(choice.proposed.fresh)

    def _carried_out(self, planned: PlannedPass) -> PlannedPass:
        """Return a plan as it will run: without replicas if it does not fit, or is only observed."""
        misfit = planned.misfit or moved_since(planned, self.placement, self.run.planner.layers)
        if misfit is None and self.config.observe:
            misfit = OBSERVED
        if misfit is not None and misfit is not OBSERVED:
            logger.warning("moe_rl: this pass runs without replicas: %s.", misfit.sentence)
        return replace(planned, misfit=misfit)

    def _activate(self, running: RunningPass[Tables], tables: Tables) -> None:
        """Tell the layers that the pass begins."""
        rank = self.run.planner.exchange.rank
        later = [
            WaitedTables(running=running, part=part, notices=self._notices, ep_rank=rank) for part in running.later
        ]
        self.run.layers.activate(running.planned, tables, later, num_micro_batches=running.num_micro_batches)
        self.run.layers.count_routes(running.counter)
        for clock in self._clocks:
            clock.reset(training=not running.forward_only)
        self._notices.say_notes(self._home_choice.notes_of(running.planned.plan))
        self._notices.say_memory(running.planned.memory, ep_rank=rank)

    def _metrics_of(self, running: RunningPass[Tables]) -> PassMetrics:
        """Return what a pass did, and start to learn from it; a collective of the EP group."""
        planned = joined(running.parts)
        gathering = RowGathering(self.run, self._clocks, running.num_micro_batches)
        results = self.run.layers.results(planned, gathering, forward_only=running.forward_only)
        num_ran = len(results.actual_rows)
        self._notices.say_micro_batches(running.num_micro_batches, num_ran)
        metrics = running.metrics(
            results,
            notes=self._home_choice.notes_of(planned.plan),
            moves=self._home_choice.moves,
            residents=self.run.num_residents,
        )
        if num_ran == running.num_micro_batches:
            fitting_tokens = self.run.fitting_tokens(planned, results.actual_rows)
            if fitting_tokens is not None:
                self.fitting_tokens = fitting_tokens
        counter = running.counter
        if counter is None:
            return metrics
        loads = self.routes.loads_of(running, counter, planned.counted, num_begun=gathering.begun)
        if planned.misfit is OBSERVED and self.routes.counted is not None:
            # What the plan would have made of the pass, whose loads are there soon.
            rows = CountingRows(loads, self.routes.counted.own_pairs)
            request = PassRequest(config=self.config, placement=self.placement, forward_only=running.forward_only)
            outcome = self.run.thread.submit(self.run.planner.outcome, request, planned, rows)
            metrics = replace(metrics, would_be=outcome.result())
        if running.is_learned:
            self._home_choice.after_pass(counter.rows, loads, forward_only=running.forward_only)
        return metrics

    def _movable_homes(self, what: str) -> ExpertHomes:
        if self.run.homes is None:
            raise InvalidInputError(f"experts cannot move to other ranks in this run: {self.run.homes_stay}")
        self._require_no_pass(what)
        return self.run.homes

    def _require_ready(self) -> None:
        """Raise if a pass cannot begin now."""
        self._require_no_pass("the next begin_pass()")

    def _require_no_pass(self, what: str) -> None:
        require(
            self._running is None,
            f"the current pass has not ended. Before {what}, call end_pass(), or give_up() if the code of the pass "
            "raised an error.",
        )
