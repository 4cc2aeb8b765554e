"""Passes of a run whose experts are spread by the framework itself, without Megatron: plan, follow, count.

Same face as `moe_rl.megatron.Balancer`, less what such a framework does not allow. G EP groups, P EP ranks, M
micro-batches, L MoE layers, K choices, E experts.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange
from moe_rl.balancing.homes import ExpertHomes, MovableExperts
from moe_rl.balancing.loads import EarlierLoads, count_routes
from moe_rl.balancing.local import gather
from moe_rl.balancing.pass_metrics import PassMetrics
from moe_rl.balancing.pass_planner import Counts, PassPlanner, PassRequest, PlannedPass, moved_since, same_places
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.balancing.slots import SlotTables
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.frameworks.ep_exchange import ReplicaExchange, Traffic
from moe_rl.frameworks.ep_layer import LayerRun
from moe_rl.frameworks.routes import of_moe_layers
from moe_rl.replay.hf_recorder import RoutingRecorder
from moe_rl.replay.writer import TraceWriter

logger = logging.getLogger("moe_rl.frameworks")

USED = ("policy", "parameters", "objective", "cluster", "replica_slots", "ranks_per_node")
"""Fields of `BalancerConfig` that mean something here; the others ask for what only the Megatron runtime has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpGroups:
    """The framework's EP group, whose ranks exchange weights, and what plans travel over.

    Every rank of the run is in one EP group, and all EP groups hold the same experts.
    """

    ep: Any
    exchange: PlanExchange
    grid: NDArray[np.int64]
    """[G, P] global ranks."""
    device: torch.device

    @classmethod
    def of(cls, ep: Any, *, device: torch.device) -> Self:
        """Return the groups from this rank's EP group; a collective of all ranks, in which groups are made."""
        mine = tuple(dist.get_process_group_ranks(ep))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        grid = np.array(sorted(set(everyone)))

        def own(parts: NDArray[np.int64]) -> Any:
            made = [(part.tolist(), dist.new_group(part.tolist(), backend="gloo")) for part in parts]
            return next(group for ranks, group in made if dist.get_rank() in ranks)

        return cls(ep=ep, exchange=PlanExchange(ep=own(grid), expert_dp=own(grid.T)), grid=grid, device=device)

    @property
    def grid_group(self) -> Any:
        """All ranks of the run."""
        return dist.group.WORLD

    @property
    def ep_size(self) -> int:
        """P, ranks that share the experts of a layer."""
        return self.exchange.size

    @property
    def ep_rank(self) -> int:
        """EP rank of this process."""
        return self.exchange.rank

    @property
    def num_ep_groups(self) -> int:
        """G, EP groups; each holds all experts."""
        return self.exchange.num_groups

    @property
    def ep_group_index(self) -> int:
        """Which of the G EP groups this process is in."""
        return self.exchange.group_index

    def gather_in_run(self, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [W, ...]: the int64 array `local` [...] of all ranks."""
        return gather(local, None)

    def all_true_in_run(self, mine: bool) -> bool:
        """Return whether `mine` is true on every rank."""
        return bool(self.gather_in_run(np.array([int(mine)], np.int64)).all())

    all_true = all_true_in_run


@dataclass(frozen=True, slots=True, kw_only=True)
class EpRun:
    """What an adapter hands over: where its framework's run is met."""

    layers: Sequence[LayerRun]
    clock: MicroBatchClock
    groups: EpGroups
    recorder: Callable[[], RoutingRecorder]
    """Makes what records the routing of one pass."""
    release: Callable[[], None]
    """Gives the layers back to the framework."""
    movable: MovableExperts | str
    """The experts and their optimizer state; why they cannot move, where they cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A pass whose planning has begun."""

    planned: Future[tuple[PlannedPass, SlotTables, list[NDArray[np.int64]]]]
    """The plan, its tables, and the routes of this rank's rows."""
    forward_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """The pass that is under way."""

    planned: PlannedPass
    forward_only: bool
    plan_wait_s: float


class EpBalancer:
    """Plans passes and tells the layers what to do in them. Every method is called on all ranks alike."""

    def __init__(self, run: EpRun, *, config: BalancerConfig, model: MoeModelSpec, replay: bool) -> None:
        self.config, self.model = config, model
        groups = run.groups
        self.own_placement = ExpertPlacement.contiguous(
            num_layers=model.num_moe_layers,
            num_experts=model.num_experts,
            ep_size=groups.ep_size,
            spare_slots=config.spare_slots,
        )
        """Homes where the framework puts the experts."""
        self._homes = None
        if not isinstance(run.movable, str):
            self._homes = ExpertHomes(
                self.own_placement, run.movable, groups=groups, max_scratch_bytes=config.reorder_scratch_bytes
            )
        self._run, self._replay = run, replay
        self._earlier = EarlierLoads(config.history_steps)
        self._planner = PassPlanner(groups.exchange, layers=range(model.num_moe_layers), model=model)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moe_rl-plan")
        """Does all that uses the exchange, one thing after the other, so that all ranks do it in one order."""
        self._prepared: deque[_Prepared] = deque()
        self._running: _Running | None = None
        self._said_why = False
        """Whether the last pass said why it has no replicas."""
        self._traffic = Traffic()
        self._recording: tuple[TraceWriter, RoutingRecorder] | None = None
        self._recorded_steps = 0

    @property
    def placement(self) -> ExpertPlacement:
        """Where the experts have their homes now."""
        return self.own_placement if self._homes is None else self._homes.placement

    @property
    def at_home(self) -> bool:
        """Whether every expert is where the framework puts it."""
        return same_places(self.placement, self.own_placement)

    def plan_reorder(self, routes: Sequence[Any]) -> Plan:
        """Return the policy's plan for these routes (see `prepare`), which may move experts.

        Hand it to `reorder`, and then to `begin_pass` with the routes. A collective of all ranks.
        """

        def planned() -> Plan:
            (_, counts), _ = self._planner.exchange.together(lambda: self._counted(routes), lambda _: None)
            load = self._planner.load_of(counts)
            return plan_of_load(
                load,
                config=self.config,
                model=self.model,
                topology=cluster_topology(
                    self.config, ep_size=load.ep_size, num_ep_groups=self._run.groups.num_ep_groups
                ),
                placement=self.placement,
                reorder=True,
                history=self._earlier.then(load) if self.config.steps_served > 1 else None,
            )

        return self._thread.submit(planned).result()

    def prepare(
        self, routes: Sequence[Any] | None = None, *, plan: Plan | None = None, forward_only: bool = False
    ) -> None:
        """Start to plan a pass beside whatever runs, and return at once; `begin_pass` without arguments takes it.

        `routes` are those of this rank's M micro-batches, [B, S, L, K] or [N, L, K] each: rows stand as the model has
        them, sequence by sequence; -1 marks a choice that is not known; L counts the MoE layers or all layers.
        """
        require(routes is not None or plan is not None, "a pass needs routes, a plan, or a prepare() before it.")
        request = PassRequest(config=self.config, placement=self.placement, plan=plan, forward_only=forward_only)
        planned = self._thread.submit(self._plan, request, routes)
        self._prepared.append(_Prepared(planned=planned, forward_only=forward_only))

    def begin_pass(
        self, routes: Sequence[Any] | None = None, *, plan: Plan | None = None, forward_only: bool = False
    ) -> Plan:
        """Make the next M forwards of the model (and their backwards) follow a plan, and replay `routes`.

        M is the number of micro-batches: of an optimizer step, the gradient accumulation steps. See `prepare` for
        `routes`; with a `plan` of a driver they are replayed and say what the metrics call predicted. Without arguments
        it is the pass that was prepared first. Plans are hints: whatever tokens come, the result is the framework's
        own. Where the ranks hold different plans, all of them run without replicas and say so.
        """
        require(self._running is None, "a pass is under way: call end_pass() before the next begin_pass().")
        if not (routes is None and plan is None and self._prepared):
            require(not self._prepared, "a prepared pass waits: begin it first, by begin_pass() without arguments.")
            self.prepare(routes, plan=plan, forward_only=forward_only)
        started = time.perf_counter()
        prepared = self._prepared.popleft()
        planned, tables, rows = prepared.planned.result()
        planned = replace(planned, misfit=planned.misfit or moved_since(planned, self.placement))
        plan_wait_s = time.perf_counter() - started
        if planned.misfit is not None:
            logger.warning("moe_rl: this pass runs without replicas: %s.", planned.misfit.sentence)
        elif planned.why_no_replicas and not self._said_why and dist.get_rank() == 0:
            logger.warning("moe_rl: %s", planned.why_no_replicas)
        self._said_why = bool(planned.why_no_replicas)
        self._activate(planned, tables, rows)
        self._run.clock.reset()
        if self._recording is not None and not prepared.forward_only:
            self._recording[1].__enter__()
        self._running = _Running(planned=planned, forward_only=prepared.forward_only, plan_wait_s=plan_wait_s)
        return planned.plan

    def end_pass(self) -> PassMetrics:
        """End the pass and return what it did; a collective of the EP group."""
        running, self._running = self._running, None
        if running is None:
            raise InvalidInputError("no pass is under way: call begin_pass() first.")
        planned = running.planned
        layers = self._run.layers
        sent = np.zeros((planned.plan.replicas.num_micro_batches, len(layers), self.placement.ep_size), np.int64)
        for layer in layers:
            for micro_batch, rows in layer.sent.items():
                if micro_batch < len(sent):
                    sent[micro_batch, layer.index] = rows.cpu().numpy()
        everyone = self._thread.submit(self._planner.exchange.gather, sent).result()
        metrics = PassMetrics(
            policy=planned.plan.policy,
            misfit=planned.misfit,
            why_no_replicas=planned.why_no_replicas,
            actual_rows=np.sum(everyone, axis=0),
            predicted_rows=None if planned.misfit else planned.predicted_rows,
            static_rows=planned.static_rows,
            replicas=0 if planned.misfit else planned.here.replicas.copies,
            pushed_bytes=self._traffic.pushed,
            returned_bytes=self._traffic.returned,
            plan_time_s=planned.plan_time_s,
            plan_wait_s=running.plan_wait_s,
            micro_batches_in_flight=None if running.forward_only else 1,
        )
        self._run.clock.stop()
        self._record_step(running)
        return metrics

    def record(self, path: Path | str) -> None:
        """Record the routing of every pass with a backward from now on, as `path`/dp<rank>.moetrace of this rank."""
        require(self._recording is None, "routing is being recorded already.")
        require(self._running is None, "a pass is under way: call end_pass() before record().")
        recorder = self._run.recorder()
        writer = TraceWriter(
            Path(path) / f"dp{dist.get_rank():05d}.moetrace",
            num_experts=self.model.num_experts,
            moe_layer_ids=self.model.moe_layer_ids,
            top_k=self.model.top_k,
            model=self.model.name,
            provenance="R3" if self._replay else "live",
            origin={"data_parallel_size": dist.get_world_size()},
        )
        self._recording = writer, recorder

    def reorder(self, target: Plan | ExpertPlacement) -> int:
        """Move experts to the homes of `target`, with their optimizer state; return the bytes this rank received.

        Call it between an optimizer step and the next forward; a collective of all ranks. Raises `InvalidInputError`
        where the framework's experts cannot move, and `ReorderError` where the move was given up.
        """
        return self._movable_homes("reorder()").reorder(target.placement if isinstance(target, Plan) else target)

    def canonical(self, *, weights_only: bool = False) -> AbstractContextManager[None]:
        """Put every expert back where the framework expects it while a checkpoint or a weight export runs.

        `weights_only` leaves the optimizer state where it is: for an export, which does not look at it.
        """
        return self._movable_homes("canonical()").canonical(weights_only=weights_only)

    def detach(self) -> None:
        """Give the layers back to the framework, and close the recording."""
        require(self._running is None, "a pass is under way: call end_pass() before detach().")
        require(self.at_home, "the experts are reordered: call reorder(balancer.own_placement) before detach().")
        if self._recording is not None:
            self._recording[0].close()
            self._recording = None
        self._thread.shutdown()
        self._planner.exchange.destroy()
        self._run.clock.remove()
        self._run.release()

    def _movable_homes(self, what: str) -> ExpertHomes:
        if isinstance(self._run.movable, str):
            raise InvalidInputError(f"experts cannot be moved here: {self._run.movable}")
        assert self._homes is not None
        require(self._running is None, f"a pass is under way: call end_pass() before {what}.")
        return self._homes

    def _counted(self, routes: Sequence[Any]) -> tuple[list[NDArray[np.int64]], Counts]:
        """Return the rows [N, L, K] of every micro-batch, and what is counted of them."""
        rows = [rows_of(each, self.model) for each in routes]
        counts = count_routes(rows, num_layers=self.model.num_moe_layers, num_experts=self.model.num_experts)
        return rows, counts

    def _plan(
        self, request: PassRequest, routes: Sequence[Any] | None
    ) -> tuple[PlannedPass, SlotTables, list[NDArray[np.int64]]]:
        """Plan a pass; runs on the thread, on all ranks alike, and raises on all of them."""
        rows: list[NDArray[np.int64]] = []

        def count() -> Counts:
            found, counts = self._counted(routes or ())
            rows.extend(found)
            return counts

        planned = self._planner.plan_pass(request, None if routes is None else count)
        return planned, SlotTables.of_plan(planned.here, group=0, source_rank=self._planner.exchange.rank), rows

    def _activate(self, planned: PlannedPass, tables: SlotTables, rows: Sequence[NDArray[np.int64]]) -> None:
        """Tell every layer what it does in every micro-batch; a plan that does not fit only replays."""
        given = [torch.from_numpy(each).to(self._run.groups.device) for each in rows] if self._replay else []
        num_planned = 0 if planned.misfit else planned.here.replicas.num_micro_batches
        self._traffic = Traffic()
        tables = tables.to(self._run.groups.device)
        for layer in self._run.layers:
            layer.begin([each[:, layer.index] for each in given], max(num_planned, len(given)))
            for micro_batch in range(num_planned):
                layer.tables[micro_batch] = tables.table(micro_batch, layer.index)
                layer.exchanges[micro_batch] = ReplicaExchange.of_cell(
                    planned.here,
                    ep_group=0,
                    micro_batch=micro_batch,
                    layer=layer.index,
                    rank=self._planner.exchange.rank,
                    device=self._run.groups.device,
                    group=self._run.groups.ep,
                    traffic=self._traffic,
                )

    def _record_step(self, running: _Running) -> None:
        if self._recording is None or running.forward_only:
            return
        writer, recorder = self._recording
        recorder.__exit__(None, None, None)
        count = len(recorder.sequences())
        numbers = (self._recorded_steps * count + np.arange(count)) * dist.get_world_size() + dist.get_rank()
        writer.append(
            recorder.trace(
                model=self.model.name,
                provenance="R3" if self._replay else "live",
                step=np.full(count, self._recorded_steps),
                micro_batch=np.repeat(np.arange(len(recorder.batch_sizes)), recorder.batch_sizes),
                dp_rank=np.full(count, dist.get_rank()),
                sample_id=numbers,
                group_id=numbers,
            )
        )
        self._recorded_steps += 1
        self._recording = writer, self._run.recorder()


def rows_of(routes: Any, model: MoeModelSpec) -> NDArray[np.int64]:
    """Return [N, L, K] from [B, S, L, K] or [N, L, K], of the MoE layers or of all."""
    ids = of_moe_layers(routes, model)
    require(ids.ndim in (3, 4), f"routes must be [B, S, L, K] or [N, L, K], got {list(ids.shape)}.")
    return ids.reshape(-1, *ids.shape[-2:])


def require_supported(config: BalancerConfig, *also: str) -> None:
    """Raise where the configuration asks for what only the Megatron runtime has; `also` are further fields in use."""
    plain = BalancerConfig()
    names = [each.name for each in fields(BalancerConfig) if each.name not in (*USED, *also)]
    asked = [name for name in names if getattr(config, name) != getattr(plain, name)]
    require(not asked, f"{', '.join(asked)}: only inside Megatron (moe_rl.megatron).")
