"""Holds the plan of the pass that is under way; made by `moe_rl.megatron.attach`."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.idle import why_no_replicas
from moe_rl.balancing.loads import count_routes, forecast_load, gather_load
from moe_rl.balancing.pass_metrics import Misfit, PassMetrics
from moe_rl.balancing.schedule import cluster_topology, home_experts, plan_of_load
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import ExpertLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.megatron.activate import activate, deactivate
from moe_rl.megatron.groups import ExpertGroups
from moe_rl.megatron.homes import ExpertHomes
from moe_rl.megatron.layer import LayerState
from moe_rl.megatron.routed_rows import replayed_rows
from moe_rl.megatron.transport import Transport
from moe_rl.profiling import ranges

logger = logging.getLogger(__name__)

Routes = Sequence[torch.Tensor | NDArray[np.integer]]
NO_HASH = "00" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedPass:
    """A plan, and what is known of how it came to be."""

    plan: Plan
    load: ExpertLoad | None = None
    """The loads that the pass is expected to have; None where nobody told."""
    plan_time_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningPass:
    """The pass that is under way."""

    planned: _PlannedPass
    misfit: Misfit | None
    why_no_replicas: str
    forward_only: bool


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
    ) -> None:
        self.config = config
        self.model = model
        # Every EP rank holds rows of its own, so it counts as a data-parallel rank.
        self.topology = cluster_topology(config, ep_size=groups.ep_size, num_ep_groups=groups.num_ep_groups)
        self.megatron_placement = ExpertPlacement.contiguous(
            num_layers=model.num_moe_layers,
            num_experts=model.num_experts,
            ep_size=groups.ep_size,
            spare_slots=config.spare_slots,
        )
        self._homes = ExpertHomes(
            self.megatron_placement,
            states=states,
            groups=groups,
            optimizer=optimizer,
            max_scratch_bytes=config.reorder_scratch_bytes,
        )
        self.transport = transport
        self.layers = list(layers)
        self._states, self._clocks = list(states), list(clocks)
        self._groups = groups
        self._running: _RunningPass | None = None
        self._why_no_replicas = ""
        """Of the last pass."""
        self._last_planned: _PlannedPass | None = None
        self._occurred: ExpertLoad | None = None
        """What the routers chose in the last pass; counted for forecasts alone."""

    @property
    def placement(self) -> ExpertPlacement:
        """Where the experts have their homes now."""
        return self._homes.placement

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the replica buffers of this rank: (R + 2C) x (one expert + its fp32 gradient)."""
        return self.transport.buffers.num_bytes

    def replayed_routes(self) -> list[NDArray[np.int64]]:
        """Return the routes [N, L, K] of every micro-batch that the model's `RouterReplay`s hold, for `begin_pass`.

        See `routed_rows.replayed_rows`.
        """
        ids = [state.layer for state in self._states]
        return replayed_rows(self.layers, layer_ids=ids, num_layers=self.model.num_moe_layers)

    def load_of(self, routes: Routes) -> ExpertLoad:
        """Return the loads of all ranks from these routes: [N, L, K] ids per micro-batch of this rank, -1 if unknown.

        L counts the MoE layers of the whole model. N may differ between ranks and micro-batches, M may not.
        A collective of all ranks of the pipeline stage.
        """
        pairs, rows = count_routes(routes, num_layers=self.model.num_moe_layers, num_experts=self.model.num_experts)
        return gather_load(pairs, rows, gather=self._groups.gather, top_k=self.model.top_k)

    def plan(self, routes: Routes, *, layout: BatchLayout | None = None, forward_only: bool = False) -> Plan:
        """Return the policy's plan for these routes (see `load_of`) that leaves every expert where it is."""
        return self._planned(lambda: self.load_of(routes), layout=layout, forward_only=forward_only).plan

    def plan_reorder(self, routes: Routes, *, layout: BatchLayout | None = None) -> Plan:
        """Return the policy's plan for these routes, which may move experts.

        Hand it to `reorder`, and then to `begin_pass` for the batch that the routes are of.
        """
        return self._planned(lambda: self.load_of(routes), layout=layout, reorder=True).plan

    def _planned(self, load_of_pass: Callable[[], ExpertLoad], **how: Any) -> _PlannedPass:
        started = time.perf_counter()
        with ranges.range("plan"):
            load = load_of_pass()
            plan = plan_of_load(
                load, config=self.config, model=self.model, topology=self.topology, placement=self.placement, **how
            )
        self._last_planned = _PlannedPass(plan=plan, load=load, plan_time_s=time.perf_counter() - started)
        return self._last_planned

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

        The plan is `plan`, or one made from `routes` (see `load_of`), or, with `num_micro_batches` alone, one made from
        the routing of the last pass (`BalancerConfig.forecast`). Beside a `plan`, `routes` say what the metrics call
        predicted.

        The plan is a hint: whatever tokens come, the result is Megatron's. Where the ranks hold different plans, or a
        plan for another batch or another placement, all of them run the pass without replicas and say so in a warning.
        A plan for another model or another number of EP ranks or slots raises `InvalidInputError`.
        """
        self._require_no_pass("the next begin_pass()")
        planned = self._planned_pass(routes, layout, plan, num_micro_batches, forward_only)
        plan = planned.plan
        try:
            self._check_shape(plan)
        except InvalidInputError:
            self._groups.agree(NO_HASH)  # the others wait for this rank's answer
            raise
        misfit = self._misfit(planned, layout)
        if not self._groups.agree(NO_HASH if misfit else plan.hash) and misfit is None:
            misfit = Misfit(kind="ranks", sentence="the ranks hold different plans")
        if misfit is None:
            activate(plan, self._states, group=self._groups.ep_group_index, transport=self.transport)
        else:
            logger.warning("moe_rl: this pass runs without replicas: %s.", misfit.sentence)
            deactivate(self._states)
        for clock in self._clocks:
            clock.reset()
        self.transport.reset()
        why = self._say_why_no_replicas(planned, forward_only) if misfit is None else ""
        self._running = _RunningPass(planned=planned, misfit=misfit, why_no_replicas=why, forward_only=forward_only)
        return plan

    def _say_why_no_replicas(self, planned: _PlannedPass, forward_only: bool) -> str:
        """Return why a pass that follows its plan has no replica; looked up and logged once per run of such passes."""
        if planned.load is None or len(planned.plan.replicas.expert):
            self._why_no_replicas = ""
        elif not self._why_no_replicas:
            self._why_no_replicas = why_no_replicas(
                planned.plan,
                planned.load,
                config=self.config,
                model=self.model,
                topology=self.topology,
                forward_only=forward_only,
            )
            if self._why_no_replicas and dist.get_rank() == 0:
                logger.warning("moe_rl: %s", self._why_no_replicas)
        return self._why_no_replicas

    def _planned_pass(
        self,
        routes: Routes | None,
        layout: BatchLayout | None,
        plan: Plan | None,
        num_micro_batches: int | None,
        forward_only: bool,
    ) -> _PlannedPass:
        """Return the plan of a pass from what `begin_pass` was given."""
        known = routes is not None or plan is not None
        require(
            known != (num_micro_batches is not None), "begin_pass needs routes, a plan, or num_micro_batches alone."
        )
        if plan is not None:
            ours = self._last_planned
            planned = ours if ours is not None and ours.plan is plan else _PlannedPass(plan=plan)
            return planned if routes is None else replace(planned, load=self.load_of(routes))
        if routes is not None:
            return self._planned(lambda: self.load_of(routes), layout=layout, forward_only=forward_only)
        require(
            self.config.forecast, "a pass without routes needs BalancerConfig(forecast=True), which counts routing."
        )
        return self._planned(
            lambda: forecast_load(self._occurred or self._nothing_yet(), num_micro_batches or 0),
            forward_only=forward_only,
        )

    def _nothing_yet(self) -> ExpertLoad:
        """Return the load of a micro-batch without rows: what is known before the first pass."""
        groups, ranks = self._groups.num_ep_groups, self._groups.ep_size
        return ExpertLoad(
            pairs=np.zeros((groups, 1, self.model.num_moe_layers, ranks, self.model.num_experts), np.int32),
            tokens=np.zeros((groups, 1, ranks), np.int64),
            top_k=self.model.top_k,
        )

    def end_pass(self) -> PassMetrics:
        """End the pass and return what it did; a collective of the EP group."""
        if self._running is None:
            raise InvalidInputError("no pass is under way: call begin_pass() first.")
        running, group = self._running, self._groups.ep_group_index
        plan, load = running.planned.plan, running.planned.load
        num_micro_batches = plan.replicas.num_micro_batches
        mine = [state.layer for state in self._states]
        counters = self.transport.counters
        metrics = PassMetrics(
            policy=plan.policy,
            misfit=running.misfit,
            why_no_replicas=running.why_no_replicas,
            actual_rows=self._rows_that_ran(num_micro_batches),
            predicted_rows=None if load is None or running.misfit else rank_load(plan, load)[group][:, mine],
            static_rows=None if load is None else _rows_of_contiguous_homes(load)[group][:, mine],
            replicas=0
            if running.misfit
            else sum(_length(plan.replicas.cell(group, m, layer)) for m in range(num_micro_batches) for layer in mine),
            pushed_bytes=counters.pushed_bytes,
            returned_bytes=counters.returned_bytes,
            plan_time_s=running.planned.plan_time_s,
            micro_batches_in_flight=None if running.forward_only else _micro_batches_in_flight(),
        )
        self._running = None
        if self.config.forecast:
            pairs, rows = _count_routed(self._states, num_micro_batches=num_micro_batches, model=self.model)
            self._occurred = gather_load(pairs, rows, gather=self._groups.gather, top_k=self.model.top_k)
        deactivate(self._states)
        for clock in self._clocks:
            clock.stop()
        return metrics

    def _rows_that_ran(self, num_micro_batches: int) -> NDArray[np.int64]:
        """Return [M, L, P] rows that every rank of the EP group computed; L counts the layers of this stage."""
        local = np.zeros((num_micro_batches, len(self._states)), np.int64)
        for index, state in enumerate(self._states):
            for micro_batch, rows in state.rows.items():
                if micro_batch < num_micro_batches:
                    local[micro_batch, index] = rows
        return self._groups.gather_in_ep(local).transpose(1, 2, 0)

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

    def detach(self) -> None:
        """Give the layers back to Megatron as they were; experts must be where Megatron expects them."""
        at_home = all(state.home_table is None for state in self._states)
        require(at_home, "the experts are reordered: call reorder(balancer.megatron_placement) before detach().")
        self._require_no_pass("detach()")
        for layer, state in zip(self.layers, self._states, strict=True):
            layer.token_dispatcher = state.home_dispatcher
            if state.entry is not None:
                state.entry.remove()
            del layer._elastic
            layer.__class__ = state.original_class
        for clock in self._clocks:
            clock.remove()

    def _require_no_pass(self, what: str) -> None:
        require(self._running is None, f"a pass is under way: call end_pass() before {what}.")

    def _check_shape(self, plan: Plan) -> None:
        ours, theirs = self.placement, plan.placement
        for name in ("ep_size", "num_layers", "num_experts", "slots_per_rank"):
            given, needed = getattr(theirs, name), getattr(ours, name)
            require(given == needed, f"the plan has {name} {given}, this run has {needed}.")
        groups = plan.replicas.num_ep_groups
        require(
            groups == self._groups.num_ep_groups,
            f"the plan is for {groups} EP groups, this run has {self._groups.num_ep_groups}.",
        )

    def _misfit(self, planned: _PlannedPass, layout: BatchLayout | None) -> Misfit | None:
        """Return why the plan is not for this batch or placement; None when it is."""
        plan, load = planned.plan, planned.load
        if not np.array_equal(home_experts(plan.placement), home_experts(self.placement)):
            sentence = "the plan is for another placement of the experts: call reorder() with it first"
            return Misfit(kind="placement", sentence=sentence)
        count = plan.replicas.num_micro_batches
        if load is not None and load.num_micro_batches != count:
            sentence = f"the plan is for {count} micro-batches, the routes are of {load.num_micro_batches}"
            return Misfit(kind="micro-batches", sentence=sentence)
        if layout is None:
            return None
        same = all(
            np.array_equal(getattr(plan.layout, name), getattr(layout, name))
            for name in ("micro_batch", "dp_rank", "order")
        )
        return None if same else Misfit(kind="layout", sentence="the plan is for another batch layout")


def _count_routed(
    states: Sequence[LayerState], *, num_micro_batches: int, model: MoeModelSpec
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ([M, L, E] pairs, [M] rows) that the routers of this rank chose; layers of other stages have none."""
    pairs = np.zeros((num_micro_batches, model.num_moe_layers, model.num_experts), np.int64)
    for state in states:
        for micro_batch, counts in (state.routed or {}).items():
            if micro_batch < num_micro_batches:
                pairs[micro_batch, state.layer] = counts.cpu().numpy()
    return pairs, pairs.sum(axis=2).max(axis=1, initial=0) // model.top_k


def _rows_of_contiguous_homes(load: ExpertLoad) -> NDArray[np.int64]:
    """Return [G, M, L, P] rows where Megatron puts the experts: rank p has the p-th equal share of their ids."""
    per_expert = load.per_expert()
    rows: NDArray[np.int64] = per_expert.reshape(*per_expert.shape[:3], load.ep_size, -1).sum(axis=4)
    return rows


def _length(cell: slice) -> int:
    return int(cell.stop - cell.start)


def _micro_batches_in_flight() -> int | None:
    """Return how many micro-batches this pipeline stage holds under 1F1B; None under the interleaved schedule."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        return None
    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return int(stages - stage)
