"""Passes of a run whose experts are spread by the framework itself, without Megatron: plan, follow, count.

Same face as `moe_rl.megatron.Balancer`, less what such a framework does not allow. G EP groups, P EP ranks, M
micro-batches, L MoE layers, K choices, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.balanced_run import LaterTables, PassResults, RowGathering, RunLayers
from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange, gathered, own_group
from moe_rl.balancing.homes import MovableExperts
from moe_rl.balancing.loads import RankRows, RouteArray
from moe_rl.balancing.migrate import ExpertGrid
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_request import PlannedPass, same_places
from moe_rl.balancing.pass_source import PassSource, RowReader
from moe_rl.balancing.passes import PassCycle
from moe_rl.balancing.route_counter import RouteCounter
from moe_rl.balancing.slots import SlotTables
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.step_words import Dispatcher
from moe_rl.frameworks.ep_exchange import ReplicaExchange, SlotTraffic
from moe_rl.frameworks.ep_layer import LayerRun
from moe_rl.frameworks.routes import of_moe_layers
from moe_rl.replay.hf_recorder import TransformersRecorder
from moe_rl.replay.writer import TraceWriter
from moe_rl.simulators.setting import StepSetting

# Fields of `BalancerConfig` that mean something here; the others ask for what only the Megatron runtime has.
USED = ("policy", "parameters", "objective", "cluster", "dispatcher", "replica_slots", "ranks_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpGroups(ExpertGrid):
    """The framework's EP group, whose ranks exchange weights, and what plans travel over.

    Every rank of the run is in one EP group, and all EP groups hold the same experts.
    """

    ep: Any
    exchange: PlanExchange

    @classmethod
    def of(cls, ep: Any, *, device: torch.device) -> Self:
        """Return the groups from this rank's EP group; a collective of all ranks, in which groups are made."""
        # Sorted: all ranks make the same groups in the same order, or the first collective of one waits for ever.
        rows = sorted(set(gathered(tuple(dist.get_process_group_ranks(ep)))))
        ep_group, expert_dp_group = (own_group(ranks, backend="gloo") for ranks in (rows, zip(*rows, strict=True)))
        # What follows on the framework's group are messages between some ranks; NCCL wants a first call of all.
        dist.all_reduce(torch.zeros(1, device=device), group=ep)
        exchange = PlanExchange(ep=ep_group, expert_dp=expert_dp_group)
        return cls(ep=ep, exchange=exchange, grid=np.array(rows), grid_group=dist.group.WORLD, device=device)


class PaddedRows(RowReader):
    """Rows whose routes are [B, S, L, K] or [N, L, K], of the MoE layers or of all."""

    def __init__(self, routes: Sequence[RouteArray], *, model: MoeModelSpec, layers: Sequence[int]) -> None:
        self._routes, self._model, self._layers = routes, model, layers

    def read(self) -> RankRows:
        """Return what the routes say in these layers."""
        rows = [rows_of(routes, self._model) for routes in self._routes]
        return RankRows.of(rows, model=self._model, layers=self._layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpTables:
    """What depends on the plan of a pass alone."""

    slots: SlotTables
    routes: Sequence[NDArray[np.int64]]
    """[N, L, K] of every micro-batch, to replay."""


class PassRecording:
    """Records the routing of every pass with a backward, as one trace of this rank."""

    def __init__(
        self, path: Path | str, recorder: Callable[[], TransformersRecorder], *, model: MoeModelSpec, provenance: str
    ) -> None:
        """Write `path`/dp<rank>.moetrace; `recorder` makes what records one pass."""
        self._new_recorder, self._model, self._provenance = recorder, model, provenance
        self._writer = TraceWriter(
            Path(path) / f"dp{dist.get_rank():05d}.moetrace",
            num_experts=model.num_experts,
            moe_layer_ids=model.moe_layer_ids,
            top_k=model.top_k,
            model=model.name,
            provenance=provenance,
            origin={"data_parallel_size": dist.get_world_size()},
        )
        self._recorder = recorder()
        self._num_steps = 0

    def begin_pass(self) -> None:
        """Record from here on; the pass is bracketed by two calls instead of a `with`."""
        self._recorder.__enter__()

    def end_pass(self, *, complete: bool) -> None:
        """Write what was recorded, if the pass came to its end."""
        recorder = self._recorder
        recorder.__exit__(None, None, None)
        # A recorder numbers sequences from its own start: every step gets a new one.
        self._recorder = self._new_recorder()
        if not complete:
            return
        count = len(recorder.sequences())
        # Distinct over steps and ranks without a word between them, as long as all ranks have as many sequences.
        numbers = (self._num_steps * count + np.arange(count)) * dist.get_world_size() + dist.get_rank()
        self._writer.append(
            recorder.trace(
                model=self._model.name,
                provenance=self._provenance,
                step=np.full(count, self._num_steps),
                micro_batch=np.repeat(np.arange(len(recorder.batch_sizes)), recorder.batch_sizes),
                dp_rank=np.full(count, dist.get_rank()),
                sample_id=numbers,
                group_id=numbers,
            )
        )
        self._num_steps += 1

    def close(self) -> None:
        """Complete the file."""
        self._writer.close()


class EpLayers(RunLayers[EpTables]):
    """The layers of a model that the framework itself spreads over ranks."""

    def __init__(
        self,
        layers: Sequence[LayerRun],
        *,
        clock: MicroBatchClock,
        groups: EpGroups,
        model: MoeModelSpec,
        replay: bool,
    ) -> None:
        self._layers, self._clock, self._groups = layers, clock, groups
        self._model, self._replay = model, replay
        self._traffic = SlotTraffic()
        self.recording: PassRecording | None = None

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self._groups.device

    def reader(self, routes: Sequence[RouteArray], layers: Sequence[int]) -> RowReader:
        """Return what counts [B, S, L, K] or [N, L, K] routes; see `RunLayers.reader`."""
        return PaddedRows(routes, model=self._model, layers=layers)

    def tables(self, planned: PlannedPass, source: PassSource) -> EpTables:
        """Return the slot tables of a plan, and the routes to replay."""
        slots = SlotTables.of_plan(planned.local_plan, group=0, source_rank=self._groups.exchange.rank)
        return EpTables(slots=slots, routes=[rows_of(routes, self._model) for routes in source.routes or ()])

    def activate(
        self,
        planned: PlannedPass,
        tables: EpTables,
        later: Sequence[LaterTables[EpTables]],
        *,
        num_micro_batches: int,
    ) -> None:
        """Tell every layer what it does in every micro-batch; a plan that does not fit only replays."""
        routes: list[torch.Tensor] = []
        if self._replay:
            routes = [torch.from_numpy(of_batch).to(self.device) for of_batch in tables.routes]
        num_planned = 0
        if not planned.misfit:
            num_planned = planned.local_plan.replicas.num_micro_batches
        self._traffic = SlotTraffic()
        slots = tables.slots.to(self.device)
        for layer in self._layers:
            layer.begin([of_batch[:, layer.index] for of_batch in routes], max(num_planned, len(routes)))
            for micro_batch in range(num_planned):
                layer.tables[micro_batch] = slots.table(micro_batch, layer.index)
                layer.exchanges[micro_batch] = ReplicaExchange.of_cell(
                    planned.local_plan,
                    ep_group=0,
                    micro_batch=micro_batch,
                    layer=layer.index,
                    rank=self._groups.exchange.rank,
                    device=self.device,
                    group=self._groups.ep,
                    traffic=self._traffic,
                )

    def count_routes(self, counter: RouteCounter | None) -> None:
        """Let the counter count what the layers' routers choose."""
        for layer in self._layers:
            layer.counter = counter

    def results(self, planned: PlannedPass, gathering: RowGathering[EpTables], *, forward_only: bool) -> PassResults:
        """Return rows and bytes."""
        return PassResults(
            actual_rows=np.sum(gathering.of_all_ranks(self._sent), axis=0),
            pushed_bytes=self._traffic.pushed,
            returned_bytes=self._traffic.returned,
            micro_batches_in_flight=None if forward_only else 1,
        )

    def stop(self, *, forward_only: bool, complete: bool) -> None:
        """Give every layer back to the framework, and write what was recorded."""
        self.count_routes(None)
        self._clock.stop()
        if not complete:
            for layer in self._layers:
                layer.leave()
        if self.recording is not None and not forward_only:
            self.recording.end_pass(complete=complete)

    def _sent(self, micro_batches: range) -> NDArray[np.int64]:
        """Return [M, L, P] rows that this rank sent to every rank."""
        rows = np.zeros((len(micro_batches), len(self._layers), self._groups.ep_size), np.int64)
        for layer in self._layers:
            for index, micro_batch in enumerate(micro_batches):
                if micro_batch in layer.sent:
                    rows[index, layer.index] = layer.sent[micro_batch].cpu().numpy()
        return rows


class EpBalancer(PassCycle[EpTables]):
    """Plans passes and tells the framework's layers what to do in them. Every method is called on all ranks alike.

    Routes are those of this rank's M micro-batches (the gradient accumulation steps of an optimizer step), each
    [B, S, L, K] or [N, L, K]: rows stand as the model has them, sequence by sequence; -1 marks a choice that is not
    known; L counts the MoE layers or all layers. `begin_pass` replays them.
    """

    def __init__(
        self,
        layers: Sequence[LayerRun],
        *,
        clock: MicroBatchClock,
        groups: EpGroups,
        recorder: Callable[[], TransformersRecorder],
        release: Callable[[], None],
        movable: MovableExperts | str,
        config: BalancerConfig,
        model: MoeModelSpec,
        replay: bool,
    ) -> None:
        """Balance `layers`; adapters call it.

        `recorder` makes what records the routing of one pass, `release` gives the layers back to the framework, and
        `movable` are the experts and their optimizer state, or why they cannot move.
        """
        # These frameworks send a row to every expert of a token: no rank or node takes a token once for several.
        planner = PassPlanner(
            groups.exchange,
            layers=range(model.num_moe_layers),
            model=model,
            setting=StepSetting(dispatcher=Dispatcher.ALLTOALL),
        )
        self._run_layers = EpLayers(layers, clock=clock, groups=groups, model=model, replay=replay)
        super().__init__(planner, self._run_layers, config=config, clocks=[clock], groups=groups, movable=movable)
        self._clock, self._recorder, self._release = clock, recorder, release
        self._provenance: str = "R3" if replay else "live"

    @property
    def at_home(self) -> bool:
        """Whether every expert is where the framework puts it."""
        return same_places(self.placement, self.own_placement)

    def begin_pass(self, source: PassSource | None = None, *, forward_only: bool = False) -> Plan:
        """Begin a pass (`PassCycle.begin_pass`) that replays its routes, and record it if `record` was called."""
        plan = super().begin_pass(source, forward_only=forward_only)
        recording = self._run_layers.recording
        if recording is not None and self._running is not None and not self._running.forward_only:
            recording.begin_pass()
        return plan

    def record(self, path: Path | str) -> None:
        """Record the routing of every pass with a backward from now on, as `path`/dp<rank>.moetrace of this rank."""
        require(self._run_layers.recording is None, "routing is already being recorded.")
        self._require_no_pass("record()")
        self._run_layers.recording = PassRecording(path, self._recorder, model=self.model, provenance=self._provenance)

    def detach(self) -> None:
        """Give the layers back to the framework, and close the recording."""
        self._require_no_pass("detach()")
        require(
            self.at_home,
            "some experts are no longer on the ranks where attach found them: call reorder(balancer.own_placement) "
            "before detach().",
        )
        if self._run_layers.recording is not None:
            self._run_layers.recording.close()
            self._run_layers.recording = None
        self.run.thread.shutdown()
        self.run.planner.exchange.destroy()
        self._clock.remove()
        self._release()


def rows_of(routes: Any, model: MoeModelSpec) -> NDArray[np.int64]:
    """Return [N, L, K] from [B, S, L, K] or [N, L, K], of the MoE layers or of all."""
    ids = of_moe_layers(routes, model)
    require(
        ids.ndim in (3, 4),
        "the routes must have shape [batch, sequence, layers, top-k] or [tokens, layers, top-k], got "
        f"{list(ids.shape)}.",
    )
    return ids.reshape(-1, *ids.shape[-2:])


def require_supported(config: BalancerConfig, *also: str) -> None:
    """Raise where the configuration asks for what only the Megatron runtime has; `also` are further fields in use."""
    default, supported = BalancerConfig(), (*USED, *also)
    unsupported = []
    for word, value in config.words().items():
        if value != default.value_of(word) and word not in supported:
            unsupported.append(word)
    require(not unsupported, f"only Megatron (moe_rl.megatron) supports {', '.join(unsupported)}.")
