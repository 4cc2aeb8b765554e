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
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import gathered
from moe_rl.balancing.homes import ExpertHomes, GradientsWaitError, ImaginedHomes, MovableExperts
from moe_rl.balancing.loads import SOURCES, RankRows, RouteArray, Source
from moe_rl.balancing.migrate import ExpertGrid
from moe_rl.balancing.packing import RankSequences, packed_micro_batches
from moe_rl.balancing.pass_metrics import OBSERVED, PassMetrics, PassOutcome
from moe_rl.balancing.pass_planner import ROWS, PassPlanner, PassRequest, PlannedPass, joined, moved_since
from moe_rl.balancing.pass_source import (
    CountedRows,
    CountingRows,
    ExpectedOrReplayedRows,
    ExpectedRows,
    PassSource,
    ReadOnce,
    RowReader,
)
from moe_rl.balancing.route_counter import RouteCounter
from moe_rl.balancing.route_forecast import RouteForecast
from moe_rl.balancing.schedule import cluster_topology, require_useful_slots
from moe_rl.balancing.sequence_rows import PADDING, SequenceRows
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.base import COPIES, PLACEMENT, Levers
from moe_rl.profiling import ranges
from moe_rl.simulators.memory import MemoryForecast

logger = logging.getLogger(__name__)

Tables = TypeVar("Tables")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared(Generic[Tables]):
    """A pass whose planning has begun."""

    planned: list[Future[tuple[PlannedPass, Tables]]]
    """Of consecutive micro-batches: the first ones are ready first."""
    homes: Future[PlannedPass] | None
    """Where the experts move before it; None where they stay."""
    source: PassSource
    forward_only: bool
    counter: RouteCounter | None
    """Hears the routers in the pass; None where nobody asks what they choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogProbs:
    """Forward-only passes since the last update: they are of its rollout, or of a validation set."""

    sequences: tuple[frozenset[int], ...]
    """Of every pass, the keys of this rank's."""
    proposals: tuple[Future[PlannedPass] | None, ...]
    """Of every pass, the homes that were chosen by it; as many, or one fewer while the last one ends."""
    proposed: Future[PlannedPass] | None
    """Homes that were due before the first of them; so are the others."""
    postponed: Future[PlannedPass] | None
    are_usual: bool
    updates: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPass:
    """The pass that is under way."""

    planned: PlannedPass
    later: Sequence[Future[tuple[PlannedPass, Any]]] = ()
    """Of the micro-batches that come after those of `planned`."""
    forward_only: bool
    plan_wait_s: float
    num_micro_batches: int
    counter: RouteCounter | None = None


class PassCycle(ABC, Generic[Tables]):
    """Plans passes and tells the layers what to do in them."""

    in_order = False
    """Whether layers can do with the plan of the first micro-batch while those of the others are made."""

    def __init__(
        self,
        planner: PassPlanner,
        *,
        config: BalancerConfig,
        clocks: Sequence[MicroBatchClock],
        groups: ExpertGrid,
        movable: MovableExperts | str,
    ) -> None:
        """`movable` are the experts and their optimizer state, or why they cannot move."""
        require_useful_slots(config)
        contiguous = ExpertPlacement.contiguous(
            num_layers=planner.model.num_moe_layers,
            num_experts=planner.model.num_experts,
            ep_size=groups.ep_size,
            spare_slots=config.foreign_slots,
        )
        self.own_placement = replace(contiguous, resident_slots=config.resident_slots)
        """Homes where the framework puts the experts, and nobody resident."""
        self.homes_stay = movable if isinstance(movable, str) else None
        """Why experts must not move by themselves, where that is so."""
        self._homes = None
        if not isinstance(movable, str):
            scratch = config.reorder_scratch_bytes
            kind = ImaginedHomes if config.observe else ExpertHomes
            self._homes = kind(self.own_placement, movable, groups=groups, max_scratch_bytes=scratch)
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
        shape = len(planner.layers), planner.model.num_experts, planner.model.top_k
        self._known = RouteForecast(shape, lambda mine: np.sum(planner.exchange.gather_in_grid(mine), axis=(0, 1)))
        """Used on the thread alone, in the order of the passes."""
        self._source: Source | None = None
        """By what the last update was planned."""
        self._learned: Future[RankRows] | None = None
        """The loads of the last pass in which routers were heard."""
        self._proposed: Future[PlannedPass] | None = None
        """Homes and copies that stay, for the rollout whose log-prob pass has run, or like the last update."""
        self._postponed: Future[PlannedPass] | None = None
        """The same, where gradients waited when it was due: the next pass that nobody has prepared tries again."""
        self._reasons: dict[str, str] = {}
        """Notes of the plan by which experts have moved last, by how they begin."""
        self.memory: Callable[..., MemoryForecast] | None = None
        """`forecast_memory` of this run's updates; None where the framework does not say how it runs them."""
        self.fitting_tokens: int | None = None
        """Tokens of a micro-batch on a rank with which an update like the last pass would fit; None: not known yet."""
        self._warned: tuple[bool, int] | None = None
        """Whether the last forecast peak fits, and whose it is."""
        self._reordered = 0, 0.0
        """Bytes that this rank received before the pass that is under way, and seconds."""
        self._warned_of_micro_batches = False
        """Whether it was said that a pass ran more or fewer micro-batches than were announced."""
        self._warned_of_gradients = False
        """Whether it was said that experts stay because gradients wait."""
        self._log_probs = False
        """Whether passes without backward go before the updates."""
        self._last_log_probs: _LogProbs | None = None
        """None where an update has come since."""
        self._updates = 0, 1
        """Those since the last of these passes, and those of the rollout before."""

    @property
    def placement(self) -> ExpertPlacement:
        """Where the experts have their homes now, and which copies stay for the step."""
        return self.own_placement if self._homes is None else self._homes.placement

    @abstractmethod
    def _reader(self, routes: Sequence[RouteArray], layers: Sequence[int]) -> RowReader:
        """Return what counts these routes in these layers, on the planning thread; copies from a device begin now."""

    @abstractmethod
    def _tables(self, planned: PlannedPass, source: PassSource) -> Tables:
        """Return what depends on the plan of a pass alone, made beside the pass before."""

    @abstractmethod
    def _activate(
        self, planned: PlannedPass, tables: Tables, later: Sequence[Callable[[], Tables]], *, num_micro_batches: int
    ) -> None:
        """Tell every layer what it does in the pass; where there is a misfit, to run without replicas.

        `later` wait for the tables of the micro-batches after those of `planned`.
        """

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
        which the log-prob pass is asked where there are no `routes` [N, L, K] of it. Every micro-batch keeps a sequence
        and has at most `token_budget` tokens of its data-parallel rank. Where nothing is known of the sequences the
        given ones come back. Call it for the update that comes, before `begin_pass`: experts move first, where they
        will. A collective of all ranks.
        """
        self._require_no_pass("packed()")
        if self.config.observe:
            return [list(batch) for batch in micro_batches]
        held = [SequenceRows.of_tokens([each]) for each in tokens]
        self._forget_strange_passes(held)
        self._rearrange()
        reader: RowReader = ExpectedRows(self._known, held)
        if routes is not None:
            reader = self._reader(routes, self._planner.layers)
        homes = self.placement.home_rank[self._planner.layers]
        lengths = [len(each) for each in tokens]
        mine = self._thread.submit(lambda: self._own_sequences(reader.read(), homes, lengths, micro_batches)).result()
        budgets, sequences = zip(*gathered((token_budget, mine)), strict=True)
        for rank, budget in enumerate(budgets):
            require(
                budget == budgets[0],
                f"ranks must pack with one token_budget: rank {rank} has {budget}, rank 0 has {budgets[0]}.",
            )
        everyone = [of_rank for of_rank in sequences if of_rank is not None]
        packed = packed_micro_batches(
            everyone,
            config=self.config,
            model=self.model,
            ep_size=self._planner.exchange.size,
            num_ep_groups=self._planner.exchange.num_groups,
            token_budget=token_budget,
            setting=self._planner.setting,
        )
        given = [list(each) for each in micro_batches]
        if packed is None:
            return given
        of_rank = packed[self._data_parallel[0]]
        return [np.flatnonzero(of_rank == index).tolist() for index in range(len(given))]

    @property
    def _data_parallel(self) -> tuple[int, int, bool]:
        """This rank's data-parallel rank and pipeline stage, and whether it speaks for the ranks that share both."""
        return dist.get_rank(), 0, True

    def reorder(self, target: Plan | ExpertPlacement) -> int:
        """Move experts to the homes of `target`, with their optimizer state; return the bytes this rank received.

        Call it between an optimizer step and the next forward; a collective of all ranks of the run. Raises
        `InvalidInputError` where the framework's experts cannot move, and `GradientsWaitError`, which is one, while
        gradients of experts that would move wait for an optimizer step. Nothing moves where a rank cannot prepare
        (`ReorderError`); a connection that breaks later leaves every expert whole and `placement` telling, for the
        layers of this rank, where they are.
        """
        return self._movable_homes("reorder()").reorder(target.placement if isinstance(target, Plan) else target)

    def canonical(self, *, weights_only: bool = False) -> AbstractContextManager[None]:
        """Put every expert back where the framework expects it while a checkpoint or a weight export runs.

        `weights_only` leaves the optimizer state where it is: for an export, which does not look at it.
        """
        return self._movable_homes("canonical()").canonical(weights_only=weights_only)

    def _movable_homes(self, what: str) -> ExpertHomes:
        if self._homes is None:
            raise InvalidInputError(f"experts cannot be moved here: {self.homes_stay}")
        self._require_no_pass(what)
        return self._homes

    def _why_fixed(self) -> str | None:
        """Return why experts cannot move by themselves; None where they can."""
        return self.homes_stay

    def _of_all_stages(self, placement: ExpertPlacement) -> ExpertPlacement:
        """Return the placement in which every pipeline stage has its own layers as it says; a collective of the run."""
        return placement

    @property
    @abstractmethod
    def _device(self) -> torch.device:
        """Where routers choose."""

    @abstractmethod
    def _listen(self, counter: RouteCounter | None) -> None:
        """Let the layers tell the counter what their routers choose, until the pass ends."""

    def _add_up(self, counts: torch.Tensor) -> None:
        """Sum counts, in place, over the ranks of which each has some rows of every sequence."""

    def _set_capacity(self, planned: PlannedPass) -> None:
        """Size the experts' buffers for the whole pass, where `config.static_rows` asks for it."""
        raise InvalidInputError("static_rows needs Megatron's MoE layers.")

    @abstractmethod
    def _ran(self, running: RunningPass) -> dict[str, Any]:
        """Return what the pass did, as fields of `PassMetrics`: rows and bytes."""

    @abstractmethod
    def _stop(self, running: RunningPass, *, complete: bool = True) -> None:
        """Give every layer back to the framework until the next pass; `complete`: the pass came to its end.

        A pass that did not may have left this rank anywhere; no other rank may be waited for.
        """

    def load_of(self, routes: Sequence[RouteArray]) -> StepLoad:
        """Return the loads of all ranks from these routes: [N, L, K] ids per micro-batch of this rank, -1 if unknown.

        L counts the MoE layers of the whole model. N may differ between ranks and micro-batches, M may not.
        A collective of all ranks of the pipeline stage.
        """
        reader = self._reader(routes, self._planner.layers_of(PLACEMENT))
        return self._thread.submit(self._planner.load_of, reader).result()

    def plan(
        self, routes: Sequence[RouteArray], *, layout: BatchLayout | None = None, forward_only: bool = False
    ) -> Plan:
        """Return the policy's plan for these routes (see `load_of`) that leaves every expert where it is.

        It is the plan of this rank's EP group and pipeline stage.
        """
        return self._made(routes, layout=layout, forward_only=forward_only)

    def plan_reorder(self, routes: Sequence[RouteArray], *, layout: BatchLayout | None = None) -> Plan:
        """Return the policy's plan for these routes, which may move experts, for all EP groups and stages.

        It chooses the copies that stay for a step, too. Hand it to `reorder`, and then to `begin_pass` for the batch
        that the routes are of.
        """
        return self._made(routes, layout=layout, may=PLACEMENT)

    def _made(self, routes: Sequence[RouteArray], *, may: Levers = COPIES, **asked: Any) -> Plan:
        request = self._request(may=may, **asked)
        reader = self._reader(routes, self._planner.layers_of(may))
        self._last_made = self._thread.submit(self._planner.plan_pass, request, reader).result()
        return self._last_made.plan

    def prepare(self, source: PassSource, *, forward_only: bool = False) -> None:
        """Start to plan a pass, and to build its tables, beside whatever runs, and return at once.

        The arguments are those of `begin_pass`, which takes prepared passes in their order, without a source. Routes
        on a device are copied in the order of its stream. An update is planned for the homes that the balancer is about
        to choose by itself. Experts must not move otherwise: a pass that was prepared for another placement runs
        without replicas.
        """
        reader = self._reader_of(source, forward_only=forward_only)
        request = self._request(
            plan=source.plan,
            layout=source.layout,
            forward_only=forward_only,
            num_micro_batches=source.num_micro_batches,
        )
        last = self._last_made if source.routes is None else None
        parts = [slice(None)]
        waits_for_all = (
            self.config.observe
            or source.plan is not None
            or source.layout is not None
            or (source.routes is not None and not self.config.reorders)
        )
        if self.in_order and not waits_for_all and (source.num_micro_batches or 0) > 1:
            parts = [slice(1), slice(1, None)]  # the second is planned while the first one's micro-batch runs
        planned: list[Future[tuple[PlannedPass, Tables]]] = []
        homes = None if forward_only else self._proposed
        for part in parts:
            before = planned[-1] if planned else None
            reader_of_part = None if reader is None else reader.micro_batches(part)
            planned.append(self._thread.submit(self._prepare, request, reader_of_part, source, last, before, homes))
        sequences = source.sequences_to_count
        counter = None if sequences is None else RouteCounter(sequences, self._known.shape, self._device)
        self._prepared.append(
            _Prepared(planned=planned, homes=homes, source=source, forward_only=forward_only, counter=counter)
        )

    def _reader_of(self, source: PassSource, *, forward_only: bool) -> RowReader | None:
        """Return what reads the rows of a source; None if a plan is given and nothing is known of the rows."""
        if source.rows is not None:
            return CountedRows(source.rows)
        if source.routes is not None:
            replayed = self._reader(source.routes, self._planner.layers)
            # An update may be planned from the log-prob pass, but for static rows, which routes alone can certify.
            if source.sequences and not forward_only and not self.config.static_rows:
                return ReadOnce(ExpectedOrReplayedRows(self._known, source.sequences, replayed))
            return ReadOnce(replayed)
        if source.plan is not None:
            return None
        return ReadOnce(ExpectedRows(self._known, source.sequences_to_count or ()))

    @property
    def searches_homes(self) -> bool:
        """Whether experts may move when the next update begins."""
        return self._proposed is not None or self._postponed is not None

    def drop_prepared(self) -> None:
        """Forget the passes that were prepared: others come."""
        self._prepared.clear()  # what the thread has begun runs on, on all ranks alike

    def begin_pass(self, source: PassSource | None = None, *, forward_only: bool = False) -> Plan:
        """Make the M micro-batches that come next follow a plan and return it; experts never move here.

        `source` says from what the plan is made. Without one it is the pass that was prepared first (`prepare`), for
        which it waits only if it is not ready, as `PassMetrics.plan_wait_s` says.

        If the balancer reorders by itself, or no routes are known, micro-batches are planned in their order: the pass
        begins, and this returns, with the plan of the first one. The plan is a hint: whatever tokens come, the result
        is the framework's own. Where the ranks hold different plans, or a plan for another batch or another placement,
        all of them run the pass without replicas and say so in a warning. A plan for another model or another number of
        EP ranks or slots raises `InvalidInputError`, and so do routes that are none: on every rank, whichever it was.
        """
        self._require_ready()
        # A pass that was prepared for other homes than those proposed now keeps the experts where it expects them.
        if self._prepared:
            coming = self._prepared[0]
            if not coming.forward_only and self._forget_strange_passes(coming.source.sequences or ()):
                self._prepare_again()
            homes = self._prepared[0].homes
            if homes is not None and homes is self._proposed and not self._rearrange():
                self._prepare_again()
        elif not forward_only:
            self._forget_strange_passes(() if source is None else source.sequences or ())
            self._rearrange()
        if source is not None:
            require(not self._prepared, "a prepared pass waits: begin it first, by begin_pass() without a source.")
            self.prepare(source, forward_only=forward_only)
        require(bool(self._prepared), "a pass needs a PassSource, or a prepare() before it.")
        started = time.perf_counter()
        prepared = self._prepared.popleft()
        with ranges.range("plan"):
            planned, tables = prepared.planned[0].result()
        plan_wait_s = time.perf_counter() - started
        planned = replace(planned, misfit=planned.misfit or moved_since(planned, self.placement, self._planner.layers))
        if self.config.observe:
            planned = replace(planned, misfit=planned.misfit or OBSERVED)
        if planned.misfit not in (None, OBSERVED):
            logger.warning("moe_rl: this pass runs without replicas: %s.", planned.misfit.sentence)
        later = prepared.planned[1:]
        total = (later and prepared.source.num_micro_batches) or planned.plan.replicas.num_micro_batches
        if self.config.static_rows:
            self._set_capacity(joined([planned, *(each.result()[0] for each in later)]))
        self._running = RunningPass(
            planned=planned,
            forward_only=prepared.forward_only,
            plan_wait_s=plan_wait_s,
            later=later,
            num_micro_batches=total,
            counter=prepared.counter,
        )
        waits = [partial(self._waited_for, each) for each in later]
        try:
            self._activate(planned, tables, waits, num_micro_batches=total)
            self._listen(prepared.counter)
            for clock in self._clocks:
                clock.reset(training=not prepared.forward_only)
            self._say(self._notes(planned.plan))
            self._say_memory(planned)
        except BaseException:
            self.give_up()
            raise
        return planned.plan

    def _waited_for(self, planned: Future[tuple[PlannedPass, Tables]]) -> Tables:
        """Return the tables of later micro-batches of the pass that is under way."""
        started = time.perf_counter()
        part, tables = planned.result()
        self._say_memory(part)
        if self._running is not None:
            waited = self._running.plan_wait_s + time.perf_counter() - started
            self._running = replace(self._running, plan_wait_s=waited)
        return tables

    def end_pass(self) -> PassMetrics:
        """End the pass and return what it did; a collective of the EP group."""
        if self._running is None:
            raise InvalidInputError("no pass is under way: call begin_pass() first.")
        try:
            metrics = self._metrics_of(self._running)
        except BaseException:
            self.give_up()
            raise
        running, self._running = self._running, None
        self._reordered = 0, 0.0
        self._stop(running)
        if not running.forward_only:
            self._say_source(metrics.source)
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
            self._stop(running, complete=False)
            self._reordered = 0, 0.0

    def _metrics_of(self, running: RunningPass) -> PassMetrics:
        """Return what a pass did, and start to learn from it; a collective of the EP group."""
        parts = [running.planned, *(each.result()[0] for each in running.later)]
        planned, did = joined(parts), self._ran(running)
        ran = len(did["actual_rows"])
        self._say_micro_batches(running.num_micro_batches, ran)
        metrics = PassMetrics(
            policy=planned.plan.policy,
            source="plan" if planned.counted is None else planned.counted.source,
            known_share=1.0 if planned.counted is None else planned.counted.known,
            misfit=None if planned.misfit is OBSERVED else planned.misfit,
            notes=self._notes(planned.plan),
            predicted_rows=_first(planned.predicted_rows, ran) if planned.misfit in (None, OBSERVED) else None,
            static_rows=_first(planned.static_rows, ran),
            replicas=0 if planned.misfit else sum(part.here.replicas.copies for part in parts),
            residents=0 if self.config.observe else int((self.placement.resident_experts >= 0).sum()),
            plan_time_s=planned.plan_time_s,
            plan_wait_s=running.plan_wait_s,
            plan_cpu_s=planned.plan_cpu_s,
            memory=planned.memory,
            reordered_bytes=self._reordered[0],
            reorder_s=self._reordered[1],
            **did,
        )
        as_announced = ran == running.num_micro_batches
        if self.memory is not None and planned.held is not None and metrics.actual_rows.any() and as_announced:
            rows, tokens = (each[None].astype(float) for each in (metrics.actual_rows, planned.held))
            self.fitting_tokens = self.memory(rows, tokens, self.placement).largest_micro_batch
        if running.counter is not None:
            self._learned = self._learn(running, running.counter, planned.counted)
            self._last_log_probs = self._with_log_probs(running.counter.rows) if running.forward_only else None
            self._log_probs |= running.forward_only
            now, before = self._updates
            self._updates = (0, now or before) if running.forward_only else (now + 1, before)
            metrics = replace(metrics, would_be=self._would_be(planned, running, self._learned))
            if self.config.reorders and running.forward_only == self._log_probs:
                self._proposed, self._postponed = self._proposal(self._learned), None
            if self._last_log_probs is not None:
                proposals = (*self._last_log_probs.proposals, self._proposed)
                self._last_log_probs = replace(self._last_log_probs, proposals=proposals)
        return metrics

    def _would_be(self, planned: PlannedPass, running: RunningPass, loads: Future[RankRows]) -> PassOutcome | None:
        """Return what the plan would have made of the pass, whose loads are there soon; None in a run that it was."""
        if planned.misfit is not OBSERVED:
            return None
        request = self._request(forward_only=running.forward_only)
        return self._thread.submit(lambda: self._planner.outcome(request, planned, CountingRows(loads))).result()

    def _proposal(self, loads: Future[RankRows]) -> Future[PlannedPass] | None:
        """Start to choose homes and copies that stay for batches with these loads."""
        may = replace(PLACEMENT, move_homes=self._why_fixed() is None, choose_residents=self.config.resident_slots > 0)
        if not (may.move_homes or may.choose_residents):
            return None
        request = self._request(may=may, of_stage=True, updates=self._updates[1])
        return self._thread.submit(lambda: self._planner.plan_pass(request, CountingRows(loads)))

    def _own_sequences(
        self,
        rows: RankRows,
        homes: NDArray[np.int32],
        tokens: Sequence[int],
        micro_batches: Sequence[Sequence[int]],
    ) -> RankSequences | None:
        dp_rank, stage, speaks = self._data_parallel
        if not speaks:
            return None
        exchange = self._planner.exchange
        return RankSequences.of(
            rows.pairs,
            homes,
            tokens=tokens,
            topology=cluster_topology(self.config, ep_size=exchange.size, num_ep_groups=exchange.num_groups),
            by_rank=self.config.replica_slots == 0,
            dp_rank=dp_rank,
            stage=stage,
            micro_batches=micro_batches,
        )

    def _rearrange(self) -> bool:
        """Move experts and choose copies as was proposed; return False where gradients wait, and they go later."""
        proposed = self._proposed or self._postponed
        self._proposed = self._postponed = None
        if proposed is None:
            return True
        started = time.perf_counter()
        plan = proposed.result().plan
        try:
            received = self.reorder(self._of_all_stages(plan.placement))
        except GradientsWaitError:
            if not self._warned_of_gradients and dist.get_rank() == 0:
                logger.warning(
                    "moe_rl: experts stay where they are, because gradients of an earlier call wait for the optimizer "
                    "step; they move at the begin of a pass that finds none."
                )
            self._warned_of_gradients, self._postponed = True, proposed
            return False
        self._reasons = {note.partition(":")[0]: note for note in plan.notes}
        self._reordered = received, time.perf_counter() - started
        return True

    def _with_log_probs(self, held: Sequence[SequenceRows]) -> _LogProbs:
        """Return the forward-only passes since the last update, with one over these rows."""
        keys = frozenset(key for each in held for key in each.keys.tolist() if key != PADDING)
        if self._last_log_probs is not None:
            return replace(self._last_log_probs, sequences=(*self._last_log_probs.sequences, keys))
        return _LogProbs(
            sequences=(keys,),
            proposals=(),
            proposed=self._proposed,
            postponed=self._postponed,
            are_usual=self._log_probs,
            updates=self._updates,
        )

    def _forget_strange_passes(self, held: Sequence[SequenceRows]) -> bool:
        """Let the last forward-only pass that had sequences of this update say the homes; return whether others come.

        A later one was over a validation set. Where none had any, homes are chosen as if they had not been. A
        collective of the run, once after such passes; `held` are the rows of the update, on all ranks or on none.
        Between the two a driver may have handed sequences to other ranks.
        """
        passes = self._last_log_probs
        if passes is None or not held or self._homes is None or not self.config.reorders:
            return False
        self._last_log_probs = None
        coming = {key for each in held for key in each.keys.tolist() if key != PADDING}
        everyone = gathered((passes.sequences, coming))
        updated = set[int]().union(*(sequences for _, sequences in everyone))
        by_pass = zip(*(sequences for sequences, _ in everyone), strict=True)
        of_update = [any(sequences & updated for sequences in of_ranks) for of_ranks in by_pass]
        if of_update[-1]:
            return False
        if any(of_update):
            last = max(index for index, shares in enumerate(of_update) if shares)
            self._proposed, self._postponed = passes.proposals[last], None
        else:
            self._proposed, self._postponed = passes.proposed, passes.postponed
            self._log_probs, self._updates = passes.are_usual, passes.updates
        return True

    def _prepare_again(self) -> None:
        """Prepare anew the passes that were prepared for other homes than those that are due now."""
        prepared = list(self._prepared)
        self.drop_prepared()
        for each in prepared:
            self.prepare(each.source, forward_only=each.forward_only)

    def _learn(self, running: RunningPass, counter: RouteCounter, foretold: RankRows | None) -> Future[RankRows]:
        """Start to take what the routers chose in a pass, and return its loads when they are there."""
        if self._learned is not None:
            self._learned.result()  # what went wrong on the thread is said here
        ran = self._micro_batches_begun
        if 0 < ran < len(counter.rows):  # of those that were announced and did not come nothing was counted
            counter.forget_after(ran)
            foretold = None if foretold is None else foretold.micro_batches(slice(ran))
        heard = counter.start_fetch(self._add_up)
        update = not running.forward_only
        return self._thread.submit(
            lambda: self._known.record(heard.micro_batches(), prediction=foretold, is_update=update)
        )

    def _request(self, **asked: Any) -> PassRequest:
        return PassRequest(config=self.config, placement=self.placement, **asked)

    def _prepare(
        self,
        request: PassRequest,
        reader: RowReader | None,
        source: PassSource,
        last: PlannedPass | None,
        before: Future[Any] | None,
        homes: Future[PlannedPass] | None,
    ) -> tuple[PlannedPass, Tables]:
        """Plan a pass and build its tables; runs on the thread, on all ranks alike, and raises on all of them."""
        if before is not None:
            before.result()  # where the part before failed, other ranks may not come here
        if homes is not None:  # chosen on this thread before; `begin_pass` moves the experts there
            request = replace(request, placement=homes.result().plan.placement)
        started = time.thread_time()
        planned = self._planner.plan_pass(request, reader)
        if last is not None and last.plan is request.plan and planned.misfit is None:
            known = {name: getattr(last, name) for name in (*ROWS, "held", "plan_time_s")}
            planned = replace(planned, **known)
        rows = planned.predicted_rows if planned.most_rows is None else planned.most_rows
        if self.memory and not request.forward_only and planned.held is not None and rows is not None and rows.size:
            forecast = self.memory(rows[None].astype(float), planned.held[None].astype(float), request.placement)
            planned = replace(planned, memory=forecast)
        tables, _ = self._planner.exchange.together(lambda: self._tables(planned, source), lambda _: None)
        return replace(planned, plan_cpu_s=time.thread_time() - started), tables

    def _say_source(self, source: Source) -> None:
        """Say on one rank by what updates are planned, where that is another thing than before."""
        if dist.get_rank() == 0 and source != self._source:
            logger.info("moe_rl: updates are planned from %s.", SOURCES[source])
        self._source = source

    def _say_memory(self, planned: PlannedPass) -> None:
        """Say before micro-batches run whose forecast peak is highest, where that is another, or fits no longer."""
        memory = planned.memory
        if memory is None or self._planner.exchange.rank != 0:
            return
        now = memory.fits, -1 if memory.fits else memory.fullest_rank
        if now != self._warned:
            logger.log(logging.INFO if memory.fits else logging.WARNING, "moe_rl: %s.", memory)
        self._warned = now

    def _notes(self, plan: Plan) -> tuple[str, ...]:
        """Return the notes of a pass; of copies that stay, what the plan says that was free to choose them."""
        return tuple(self._reasons.get(note.partition(":")[0], note) for note in plan.notes)

    def _say(self, notes: tuple[str, ...]) -> None:
        """Warn once, on one rank, of each lever that plans make no use of."""
        beginnings = tuple(note.partition(":")[0] for note in notes)
        if dist.get_rank() == 0:
            for beginning, note in zip(beginnings, notes, strict=True):
                if beginning not in self._said:
                    logger.warning("moe_rl: %s", note)
        self._said = beginnings

    def _say_micro_batches(self, announced: int, ran: int) -> None:
        """Warn once, on one rank, that a pass had other micro-batches than it was planned for."""
        if ran == announced or self._warned_of_micro_batches:
            return
        self._warned_of_micro_batches = True
        if dist.get_rank() == 0:
            rest = "those beyond ran without copies" if ran > announced else "copies for the others served nobody"
            logger.warning(
                "moe_rl: a pass was planned for %d micro-batches and ran %d: %s. Results are right, metrics are of "
                "those that ran.", announced, ran, rest,
            )  # fmt: skip

    @property
    def _micro_batches_begun(self) -> int:
        return max(clock.micro_batches for clock in self._clocks)

    def _of_all_ranks(self, announced: int, of_part: Callable[[range], NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Return what `of_part` says on every rank of the EP group of the micro-batches that ran, [M, ...] each.

        `of_part(range)` is [len(range), ...]. In the exchange of the announced ones every rank says how many it began;
        where these are more, another exchange follows. Where no layer can tell, all that were announced are given.
        """
        mine = of_part(range(announced))
        told = self._gathered(np.append(mine.ravel(), self._micro_batches_begun))
        ran = max(int(each[-1]) for each in told) or announced
        found = [each[:-1].reshape(mine.shape) for each in told]
        if ran > announced:
            beyond = self._gathered(of_part(range(announced, ran)))
            found = [np.concatenate(parts) for parts in zip(found, beyond, strict=True)]
        return [each[:ran] for each in found]

    def _gathered(self, mine: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return what every rank of the EP group gave."""
        return self._thread.submit(self._planner.exchange.gather, mine).result()

    def _require_ready(self) -> None:
        """Raise where a pass cannot begin now."""
        self._require_no_pass("the next begin_pass()")

    def _require_no_pass(self, what: str) -> None:
        require(
            self._running is None,
            f"a pass is under way: call end_pass() before {what}, or give_up() where its code raised.",
        )


def _first(rows: NDArray[np.int64] | None, count: int) -> NDArray[np.int64] | None:
    """Return the rows of the first micro-batches."""
    return None if rows is None else rows[:count]
