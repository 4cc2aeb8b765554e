"""Holds the plan of the pass that is under way; made by `moe_rl.megatron.attach`."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange
from moe_rl.balancing.homes import ExpertHomes
from moe_rl.balancing.loads import EarlierLoads, count_routes, mean_micro_batch
from moe_rl.balancing.pass_metrics import PassMetrics
from moe_rl.balancing.pass_planner import (
    Counts,
    PassPlanner,
    PassRequest,
    PlannedPass,
    moved_since,
    rows_of_contiguous_homes,
)
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.megatron.activate import PassTables, activate, deactivate
from moe_rl.megatron.groups import ExpertGroups, plan_exchange
from moe_rl.megatron.homes import MegatronExperts
from moe_rl.megatron.layer import LayerState, dispatcher_over_slots
from moe_rl.megatron.residents import ResidentCopies
from moe_rl.megatron.routed_rows import replayed_rows
from moe_rl.megatron.transport import Transport
from moe_rl.profiling import ranges

logger = logging.getLogger(__name__)

Routes = Sequence[torch.Tensor | NDArray[np.integer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadePlan:
    """The last plan that was handed out, and what is known of the loads that it was made for."""

    plan: Plan
    known: dict[str, Any]
    """Fields of `PlannedPass`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedPass:
    """A pass whose planning has begun."""

    planned: Future[tuple[PlannedPass, PassTables]]
    forward_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningPass:
    """The pass that is under way."""

    planned: PlannedPass
    forward_only: bool
    plan_wait_s: float


class Balancer:
    """Plans passes and tells the layers what to do in them. Every method is called on all ranks alike."""

    def __init__(
        self,
        *,
        layers: Sequence[MoELayer],
        states: Sequence[LayerState],
        clocks: Sequence[MicroBatchClock],
        optimizer: Any,
        config: BalancerConfig,
        model: MoeModelSpec,
        groups: ExpertGroups,
        transport: Transport,
        residents: ResidentCopies,
        exchange: PlanExchange,
    ) -> None:
        self.config = config
        self.model = model
        # Every EP rank holds rows of its own, so it counts as a data-parallel rank.
        self.topology = cluster_topology(config, ep_size=groups.ep_size, num_ep_groups=groups.num_ep_groups)
        contiguous = ExpertPlacement.contiguous(
            num_layers=model.num_moe_layers,
            num_experts=model.num_experts,
            ep_size=groups.ep_size,
            spare_slots=config.foreign_slots,
        )
        self.megatron_placement = replace(contiguous, resident_slots=config.resident_slots)
        """Homes where Megatron puts experts, and nobody resident."""
        self._homes = ExpertHomes(
            self.megatron_placement,
            MegatronExperts(states, optimizer=optimizer, device=groups.device),
            groups=groups,
            max_scratch_bytes=config.reorder_scratch_bytes,
        )
        self.transport, self.residents = transport, residents
        self.layers = list(layers)
        self._states, self._clocks = list(states), list(clocks)
        self._groups = groups
        self._planner = PassPlanner(exchange, layers=[state.layer for state in states], model=model)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moe_rl-plan")
        """Does all that uses the exchange, one thing after the other, so that all ranks do it in one order."""
        self._prepared: deque[_PreparedPass] = deque()
        self._running: _RunningPass | None = None
        self._offloaded = False
        self._said_why = False
        """Whether the last pass said why it has no replicas."""
        self._last_made: _MadePlan | None = None
        self._earlier = EarlierLoads(config.history_steps)
        self._occurred: Counts | None = None
        """What the routers of this rank chose in the last pass; counted for forecasts alone."""

    @property
    def placement(self) -> ExpertPlacement:
        """Where the experts have their homes now, and which copies stay for the step."""
        return self._homes.placement

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's buffers: (R + 2C + S x its MoE layers) x (one expert + its fp32 gradient)."""
        return self.transport.buffers.num_bytes + self.residents.num_bytes

    def replayed_routes(self) -> list[NDArray[np.int64]]:
        """Return the routes [N, L, K] of every micro-batch that the model's `RouterReplay`s hold, for `begin_pass`.

        See `routed_rows.replayed_rows`.
        """
        ids = [state.layer for state in self._states]
        return replayed_rows(self.layers, layer_ids=ids, num_layers=self.model.num_moe_layers)

    def load_of(self, routes: Routes) -> StepLoad:
        """Return the loads of all ranks from these routes: [N, L, K] ids per micro-batch of this rank, -1 if unknown.

        L counts the MoE layers of the whole model. N may differ between ranks and micro-batches, M may not.
        A collective of all ranks of the pipeline stage.
        """
        return self._thread.submit(self._load_of, routes).result()

    def _load_of(self, routes: Routes) -> StepLoad:
        model = self.model
        return self._planner.load_of(
            count_routes(routes, num_layers=model.num_moe_layers, num_experts=model.num_experts)
        )

    def plan(self, routes: Routes, *, layout: BatchLayout | None = None, forward_only: bool = False) -> Plan:
        """Return the policy's plan for these routes (see `load_of`) that leaves every expert where it is.

        It is the plan of this rank's EP group and pipeline stage.
        """
        request = self._request(layout=layout, forward_only=forward_only)
        made = self._thread.submit(self._planner.plan_pass, request, self._count(routes)).result()
        known = {name: getattr(made, name) for name in ("predicted_rows", "static_rows", "plan_time_s")}
        self._last_made = _MadePlan(plan=made.plan, known=known)
        return made.plan

    def plan_reorder(self, routes: Routes, *, layout: BatchLayout | None = None) -> Plan:
        """Return the policy's plan for these routes, which may move experts, for all EP groups and stages.

        Hand it to `reorder`, and then to `begin_pass` for the batch that the routes are of.
        """
        started = time.perf_counter()
        load = self.load_of(routes)
        plan = plan_of_load(
            load,
            config=self.config,
            model=self.model,
            topology=self.topology,
            placement=self.placement,
            layout=layout,
            reorder=True,
            history=self._earlier.then(load) if self.config.steps_served > 1 else None,
        )
        group, mine = self._groups.ep_group_index, self._planner.layers
        known = {
            "predicted_rows": rank_load(plan, load)[group][:, mine],
            "static_rows": rows_of_contiguous_homes(load)[group][:, mine],
            "plan_time_s": time.perf_counter() - started,
        }
        self._last_made = _MadePlan(plan=plan, known=known)
        return plan

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
        if routes is not None:
            count = self._count(routes)
        elif num_micro_batches is not None:
            count = partial(mean_micro_batch, *(self._occurred or self._nothing_yet()), num_micro_batches)
        else:
            count = None
        request = self._request(plan=plan, layout=layout, forward_only=forward_only)
        last = self._last_made if routes is None else None
        planned = self._thread.submit(self._prepare, request, count, last)
        self._prepared.append(_PreparedPass(planned=planned, forward_only=forward_only))

    def begin_pass(
        self,
        routes: Routes | None = None,
        layout: BatchLayout | None = None,
        *,
        plan: Plan | None = None,
        num_micro_batches: int | None = None,
        forward_only: bool = False,
    ) -> Plan:
        """Make the next `forward_backward_func` call follow a plan and return it; experts never move here.

        Without arguments it is the pass that was prepared first (`prepare`), for which it waits only if it is not
        ready, as `PassMetrics.plan_wait_s` says. Else the plan is `plan`, or one made from `routes` (see `load_of`),
        or, with `num_micro_batches` alone, one made from the routing of the last pass (`BalancerConfig.forecast`).
        Beside a `plan`, `routes` say what the metrics call predicted.

        The plan is a hint: whatever tokens come, the result is Megatron's. Where the ranks hold different plans, or a
        plan for another batch or another placement, all of them run the pass without replicas and say so in a warning.
        A plan for another model or another number of EP ranks or slots raises `InvalidInputError`, and so do routes
        that are none: on every rank, whichever it was.
        """
        self._require_no_pass("the next begin_pass()")
        require(not self._offloaded, "the buffers are given back: call onload() before begin_pass().")
        if not (routes is None and plan is None and num_micro_batches is None and self._prepared):
            require(not self._prepared, "a prepared pass waits: begin it first, by begin_pass() without arguments.")
            self.prepare(routes, layout, plan=plan, num_micro_batches=num_micro_batches, forward_only=forward_only)
        started = time.perf_counter()
        prepared = self._prepared.popleft()
        with ranges.range("plan"):
            planned, tables = prepared.planned.result()
        plan_wait_s = time.perf_counter() - started
        misfit = planned.misfit or moved_since(planned, self.placement)
        planned = replace(planned, misfit=misfit)
        if misfit is None:
            activate(tables, self._states, transport=self.transport, residents=self.residents)
            self.residents.begin_pass(self.placement, num_micro_batches=planned.plan.replicas.num_micro_batches)
        else:
            logger.warning("moe_rl: this pass runs without replicas: %s.", misfit.sentence)
            deactivate(self._states)
        for clock in self._clocks:
            clock.reset()
        self.transport.reset()
        if planned.why_no_replicas and not self._said_why and dist.get_rank() == 0:
            logger.warning("moe_rl: %s", planned.why_no_replicas)
        self._said_why = bool(planned.why_no_replicas)
        self._running = _RunningPass(planned=planned, forward_only=prepared.forward_only, plan_wait_s=plan_wait_s)
        return planned.plan

    def _request(self, **asked: Any) -> PassRequest:
        return PassRequest(config=self.config, placement=self.placement, **asked)

    def _count(self, routes: Routes) -> Callable[[], Counts]:
        """Return what counts these routes, in the layers of this stage; the copy from a device begins now."""
        on_host, copied = copied_to_host(routes)
        model, layers = self.model, self._planner.layers

        def count() -> Counts:
            copied()
            return count_routes(on_host, num_layers=model.num_moe_layers, num_experts=model.num_experts, layers=layers)

        return count

    def _prepare(
        self, request: PassRequest, count: Callable[[], Counts] | None, last: _MadePlan | None
    ) -> tuple[PlannedPass, PassTables]:
        """Plan a pass and build its tables; runs on the thread, on all ranks alike."""
        planned = self._planner.plan_pass(request, count)
        if last is not None and last.plan is request.plan and planned.misfit is None:
            planned = replace(planned, **last.known)
        tables, _ = self._planner.exchange.together(
            lambda: PassTables.of_pass(planned, self._states, self.transport), lambda _: None
        )
        return planned, tables

    def _nothing_yet(self) -> Counts:
        """Return the counts of a micro-batch without rows: what is known before the first pass."""
        return np.zeros((1, len(self._states), self.model.num_experts), np.int32), np.zeros(1, np.int64)

    def end_pass(self) -> PassMetrics:
        """End the pass and return what it did; a collective of the EP group."""
        if self._running is None:
            raise InvalidInputError("no pass is under way: call begin_pass() first.")
        running, self._running = self._running, None
        if running.planned.misfit is None:
            self.residents.end_pass()
        planned, counters = running.planned, self.transport.counters
        num_micro_batches = planned.plan.replicas.num_micro_batches
        metrics = PassMetrics(
            policy=planned.plan.policy,
            misfit=planned.misfit,
            why_no_replicas=planned.why_no_replicas,
            actual_rows=self._rows_that_ran(num_micro_batches),
            predicted_rows=None if planned.misfit else planned.predicted_rows,
            static_rows=planned.static_rows,
            replicas=0 if planned.misfit else planned.here.replicas.copies,
            pushed_bytes=counters.pushed_bytes,
            returned_bytes=counters.returned_bytes,
            plan_time_s=planned.plan_time_s,
            plan_wait_s=running.plan_wait_s,
            micro_batches_in_flight=None if running.forward_only else _micro_batches_in_flight(),
        )
        if self.config.forecast:
            self._occurred = _count_routed(self._states, num_micro_batches=num_micro_batches, model=self.model)
        self._stop()
        return metrics

    def _stop(self) -> None:
        """Let every layer be Megatron's until the next pass."""
        deactivate(self._states)
        for layer, state in zip(self.layers, self._states, strict=True):
            layer.token_dispatcher = state.home_dispatcher
        for clock in self._clocks:
            clock.stop()

    def _rows_that_ran(self, num_micro_batches: int) -> NDArray[np.int64]:
        """Return [M, L, P] rows that every rank of the EP group computed; L counts the layers of this stage."""
        local = np.zeros((num_micro_batches, len(self._states)), np.int64)
        for index, state in enumerate(self._states):
            for micro_batch, rows in state.rows.items():
                if micro_batch < num_micro_batches:
                    local[micro_batch, index] = rows
        everyone = self._thread.submit(self._planner.exchange.gather, local).result()
        return np.stack(everyone, axis=2)

    def reorder(self, target: Plan | ExpertPlacement) -> int:
        """Move experts to the homes of `target`, with their optimizer state; return the bytes this rank received.

        Call it between an optimizer step and the next forward; a collective of all ranks of the run. Nothing moves
        where a rank cannot prepare (`ReorderError`); a connection that breaks later leaves every expert whole and
        `placement` telling, for the layers of this rank, where they are.
        """
        self._require_no_pass("reorder()")
        return self._homes.reorder(target.placement if isinstance(target, Plan) else target)

    def canonical(self, *, weights_only: bool = False) -> AbstractContextManager[None]:
        """Put every expert back where Megatron expects it while a checkpoint or a weight export runs.

        `weights_only` leaves the optimizer state where it is: for an export, which does not look at it.
        """
        self._require_no_pass("canonical()")
        return self._homes.canonical(weights_only=weights_only)

    def offload(self) -> None:
        """Give all memory of the balancer back while the parameters are away, for a rollout on the same device.

        Where experts are stays as it is. `onload` comes before the next pass.
        """
        self._require_no_pass("offload()")
        self._offloaded = True
        self.transport.buffers.release()
        self.residents.release()
        for state in self._states:
            state.experts.release()

    def onload(self) -> None:
        """Take the memory again that `offload` gave back."""
        self.transport.buffers.allocate()
        self.residents.allocate()
        self._offloaded = False

    def rebuild_groups(self) -> None:
        """Go on after the framework has destroyed Megatron's process groups and made them anew; a collective.

        The layers' own dispatchers must hold the new groups by then. Every group that the balancer uses is connected
        by a call of all its ranks before it returns.
        """
        self._require_no_pass("rebuild_groups()")
        before = self._groups
        self._groups = self._homes.groups = before.rebuilt()
        if self._groups is not before:
            self._planner.exchange.destroy()
            self._planner.exchange = plan_exchange(self._groups)
        self.transport.group = self._groups.replicas
        self.residents.use(self._groups)
        for layer, state in zip(self.layers, self._states, strict=True):
            num_slots = state.experts.num_local_experts + self.config.foreign_slots
            state.slot_dispatcher = dispatcher_over_slots(layer, num_slots=num_slots)

    def detach(self) -> None:
        """Give the layers back to Megatron as they were, with the balancer's memory and connections; a collective.

        Experts must be where Megatron expects them.
        """
        at_home = all(state.home_table is None for state in self._states)
        require(at_home, "the experts are reordered: call reorder(balancer.megatron_placement) before detach().")
        self._require_no_pass("detach()")
        self.offload()
        self._thread.shutdown()
        self._planner.exchange.destroy()
        self._groups.destroy()
        for layer, state in zip(self.layers, self._states, strict=True):
            if state.entry is not None:
                state.entry.remove()
            del layer._elastic
            layer.__class__ = state.original_class
        for clock in self._clocks:
            clock.remove()

    def _require_no_pass(self, what: str) -> None:
        require(self._running is None, f"a pass is under way: call end_pass() before {what}.")


def copied_to_host(routes: Routes) -> tuple[Routes, Callable[[], None]]:
    """Return the routes on the host, and what waits until those that were on a device have arrived."""
    if not any(isinstance(each, torch.Tensor) and each.is_cuda for each in routes):
        return routes, lambda: None
    on_host = []
    for each in routes:
        tensor = torch.as_tensor(each)
        on_host.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True))
    event = torch.cuda.Event()
    event.record()
    return on_host, event.synchronize


def _count_routed(states: Sequence[LayerState], *, num_micro_batches: int, model: MoeModelSpec) -> Counts:
    """Return ([M, l, E] pairs, [M] rows) that the routers of this rank chose in the layers of its stage."""
    pairs = np.zeros((num_micro_batches, len(states), model.num_experts), np.int32)
    counted = [
        (micro_batch, index, counts)
        for index, state in enumerate(states)
        for micro_batch, counts in (state.routed or {}).items()
        if micro_batch < num_micro_batches
    ]
    if counted:
        micro_batches, layers, counts = zip(*counted, strict=True)
        pairs[list(micro_batches), list(layers)] = torch.stack(counts).cpu().numpy()  # waits for the device once
    return pairs, pairs.sum(axis=2, dtype=np.int64).max(axis=1, initial=0) // model.top_k


def _micro_batches_in_flight() -> int | None:
    """Return how many micro-batches this pipeline stage holds under 1F1B; None under the interleaved schedule."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        return None
    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return int(stages - stage)
