"""Passes of a run whose experts are spread by the framework itself, without Megatron: plan, follow, count.

Same face as `moe_rl.megatron.Balancer`, less what such a framework does not allow. G EP groups, P EP ranks, M
micro-batches, L MoE layers, K choices, E experts.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange
from moe_rl.balancing.loads import count_routes
from moe_rl.balancing.pass_metrics import PassMetrics
from moe_rl.balancing.pass_planner import PassPlanner, PassRequest, PlannedPass
from moe_rl.balancing.slots import SlotTable, SlotTables
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.integrations.ep_exchange import ReplicaExchange, Traffic
from moe_rl.integrations.routes import of_moe_layers
from moe_rl.replay.hf_recorder import RoutingRecorder, record_routing
from moe_rl.replay.writer import TraceWriter

logger = logging.getLogger("moe_rl.integrations")

USED = ("policy", "parameters", "objective", "cluster", "replica_slots", "ranks_per_node")
"""Fields of `BalancerConfig` that mean something here; the others ask for what only the Megatron runtime has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpGroups:
    """The framework's EP group, whose ranks exchange weights, and what plans travel over.

    Every rank of the run is in one EP group, and all EP groups hold the same experts.
    """

    ep: Any
    exchange: PlanExchange

    @classmethod
    def of(cls, ep: Any) -> Self:
        """Return the groups from this rank's EP group; a collective of all ranks, in which groups are made."""
        mine = tuple(dist.get_process_group_ranks(ep))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        grid = np.array(sorted(set(everyone)))

        def own(parts: NDArray[np.int64]) -> Any:
            made = [(part.tolist(), dist.new_group(part.tolist(), backend="gloo")) for part in parts]
            return next(group for ranks, group in made if dist.get_rank() in ranks)

        return cls(ep=ep, exchange=PlanExchange(ep=own(grid), expert_dp=own(grid.T)))


@dataclass(slots=True, kw_only=True)
class LayerRun:
    """What one MoE layer of this rank does in the run of it that is under way, and what it did in the pass."""

    index: int
    """Among the model's MoE layers."""
    clock: MicroBatchClock
    targets: list[torch.Tensor | None] = field(default_factory=list)
    """Per micro-batch the replayed ids [T, K], -1 where the router chooses."""
    tables: list[SlotTable | None] = field(default_factory=list)
    exchanges: list[ReplicaExchange | None] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    """Rows that this rank's experts computed, by micro-batch."""
    micro_batch: int = -1
    """Of the run that is under way; -1 outside of passes and beyond the plan."""
    recomputing: bool = False

    def begin(self, targets: Sequence[torch.Tensor | None], num_micro_batches: int) -> None:
        """Start a pass of M micro-batches that replays `targets`, without replicas."""
        self.rows.clear()
        self.targets = [*targets, *[None] * (num_micro_batches - len(targets))]
        self.tables, self.exchanges = [None] * num_micro_batches, [None] * num_micro_batches

    def enter(self) -> torch.Tensor | None:
        """Note which micro-batch the layer is in now, once per run of it; return its replayed ids, if any."""
        self.micro_batch = -1
        if self.clock.current_pass is None:
            return None
        self.recomputing = self.clock.recomputing
        micro_batch = self.clock.micro_batch(self.index)
        if micro_batch >= len(self.targets):
            return None
        self.micro_batch = micro_batch
        return self.targets[micro_batch]

    @property
    def plan(self) -> tuple[SlotTable, ReplicaExchange] | None:
        """What the run of the layer that is under way does; None is the framework's own."""
        if self.micro_batch < 0:
            return None
        table, exchange = self.tables[self.micro_batch], self.exchanges[self.micro_batch]
        return None if table is None or exchange is None else (table, exchange)

    def count(self, rows: int) -> None:
        """Note how many rows the experts of this rank compute in this run of the layer."""
        if self.micro_batch >= 0 and not self.recomputing:
            self.rows[self.micro_batch] = rows


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

    def __init__(
        self,
        *,
        module: torch.nn.Module,
        layers: Sequence[LayerRun],
        clock: MicroBatchClock,
        groups: EpGroups,
        config: BalancerConfig,
        model: MoeModelSpec,
        replay: bool,
        release: Callable[[], None],
        device: torch.device,
    ) -> None:
        self.config, self.model = config, model
        self.placement = ExpertPlacement.contiguous(
            num_layers=model.num_moe_layers,
            num_experts=model.num_experts,
            ep_size=groups.exchange.size,
            spare_slots=config.spare_slots,
        )
        self._module, self._layers, self._clock, self._groups = module, list(layers), clock, groups
        self._replay, self._release, self._device = replay, release, device
        self._planner = PassPlanner(groups.exchange, layers=range(model.num_moe_layers), model=model)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moe_rl-plan")
        """Does all that uses the exchange, one thing after the other, so that all ranks do it in one order."""
        self._prepared: deque[_Prepared] = deque()
        self._running: _Running | None = None
        self._traffic = Traffic()
        self._recording: tuple[TraceWriter, RoutingRecorder] | None = None
        self._recorded_steps = 0

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
        plan_wait_s = time.perf_counter() - started
        if planned.misfit is not None:
            logger.warning("moe_rl: this pass runs without replicas: %s.", planned.misfit.sentence)
        elif planned.why_no_replicas and dist.get_rank() == 0:
            logger.warning("moe_rl: %s", planned.why_no_replicas)
        self._activate(planned, tables, rows)
        self._clock.reset()
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
        local = np.zeros((planned.plan.replicas.num_micro_batches, len(self._layers)), np.int64)
        for layer in self._layers:
            for micro_batch, rows in layer.rows.items():
                if micro_batch < len(local):
                    local[micro_batch, layer.index] = rows
        everyone = self._thread.submit(self._groups.exchange.gather, local).result()
        metrics = PassMetrics(
            policy=planned.plan.policy,
            misfit=planned.misfit,
            why_no_replicas=planned.why_no_replicas,
            actual_rows=np.stack(everyone, axis=2),
            predicted_rows=None if planned.misfit else planned.predicted_rows,
            static_rows=planned.static_rows,
            replicas=0 if planned.misfit else planned.here.replicas.copies,
            pushed_bytes=self._traffic.pushed,
            returned_bytes=self._traffic.returned,
            plan_time_s=planned.plan_time_s,
            plan_wait_s=running.plan_wait_s,
            micro_batches_in_flight=None if running.forward_only else 1,
        )
        self._clock.stop()
        self._record_step(running)
        return metrics

    def record(self, path: Path | str) -> None:
        """Record the routing of every pass with a backward from now on, as `path`/dp<rank>.moetrace of this rank."""
        require(self._recording is None, "routing is being recorded already.")
        require(self._running is None, "a pass is under way: call end_pass() before record().")
        recorder = record_routing(self._module)
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

    def detach(self) -> None:
        """Give the layers back to the framework, and close the recording."""
        require(self._running is None, "a pass is under way: call end_pass() before detach().")
        if self._recording is not None:
            self._recording[0].close()
            self._recording = None
        self._thread.shutdown()
        self._groups.exchange.destroy()
        self._clock.remove()
        self._release()

    def reorder(self, target: object) -> NoReturn:
        """Refuse: FSDP owns the shards that would have to move."""
        raise InvalidInputError("experts cannot be moved here: FSDP owns their shards and the optimizer's state.")

    canonical = reorder

    def _plan(
        self, request: PassRequest, routes: Sequence[Any] | None
    ) -> tuple[PlannedPass, SlotTables, list[NDArray[np.int64]]]:
        """Plan a pass; runs on the thread, on all ranks alike, and raises on all of them."""
        rows: list[NDArray[np.int64]] = []

        def count() -> tuple[NDArray[np.int32], NDArray[np.int64]]:
            rows.extend(rows_of(each, self.model) for each in routes or ())
            return count_routes(rows, num_layers=self.model.num_moe_layers, num_experts=self.model.num_experts)

        planned = self._planner.plan_pass(request, None if routes is None else count)
        return planned, SlotTables.of_plan(planned.here, group=0, source_rank=self._groups.exchange.rank), rows

    def _activate(self, planned: PlannedPass, tables: SlotTables, rows: Sequence[NDArray[np.int64]]) -> None:
        """Tell every layer what it does in every micro-batch; a plan that does not fit only replays."""
        given = [torch.from_numpy(each).to(self._device) for each in rows] if self._replay else []
        num_planned = 0 if planned.misfit else planned.here.replicas.num_micro_batches
        self._traffic = Traffic()
        tables = tables.to(self._device)
        for layer in self._layers:
            layer.begin([each[:, layer.index] for each in given], max(num_planned, len(given)))
            for micro_batch in range(num_planned):
                layer.tables[micro_batch] = tables.table(micro_batch, layer.index)
                layer.exchanges[micro_batch] = ReplicaExchange.of_cell(
                    planned.here,
                    ep_group=0,
                    micro_batch=micro_batch,
                    layer=layer.index,
                    rank=self._groups.exchange.rank,
                    device=self._device,
                    group=self._groups.ep,
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
        self._recording = writer, record_routing(self._module)


def rows_of(routes: Any, model: MoeModelSpec) -> NDArray[np.int64]:
    """Return [N, L, K] from [B, S, L, K] or [N, L, K], of the MoE layers or of all."""
    ids = of_moe_layers(routes, model)
    require(ids.ndim in (3, 4), f"routes must be [B, S, L, K] or [N, L, K], got {list(ids.shape)}.")
    return ids.reshape(-1, *ids.shape[-2:])


def require_supported(config: BalancerConfig) -> None:
    """Raise where the configuration asks for what only the Megatron runtime has."""
    plain = BalancerConfig()
    names = [each.name for each in fields(BalancerConfig) if each.name not in USED]
    asked = [name for name in names if getattr(config, name) != getattr(plain, name)]
    require(not asked, f"{', '.join(asked)}: only inside Megatron (moe_rl.megatron).")


class ReplayedTopK(torch.overrides.TorchFunctionMode):
    """Replays the choice where the router makes it: in its `topk` over the experts.

    Scores, normalization, scaling and the gradient through them stay the router's, whatever its family; only which
    experts it took is given. The groups of a group-limited router are chosen by other calls of `topk`.
    """

    def __init__(self, ids: torch.Tensor, scores_shape: tuple[int, ...], top_k: int) -> None:
        super().__init__()
        self._ids, self._shape, self._top_k = ids, scores_shape, top_k
        self.replayed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        if tuple(scores.shape) != self._shape or found.indices.shape[1] != self._top_k:
            return found
        self.replayed = True
        ids = torch.where((self._ids >= 0).all(dim=1, keepdim=True), self._ids, found.indices)
        return torch.return_types.topk((scores.gather(1, ids), ids))
