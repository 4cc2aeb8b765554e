"""Passes of a run whose experts are spread by the framework itself, without Megatron: plan, follow, count.

Same face as `moe_rl.megatron.Balancer`, less what such a framework does not allow. G EP groups, P EP ranks, M
micro-batches, L MoE layers, K choices, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange, gathered, own_group
from moe_rl.balancing.homes import MovableExperts
from moe_rl.balancing.loads import RankRows, RouteArray
from moe_rl.balancing.migrate import ExpertGrid
from moe_rl.balancing.pass_planner import PassPlanner, PlannedPass, same_places
from moe_rl.balancing.pass_source import PassSource, RowReader
from moe_rl.balancing.passes import PassCycle, RunningPass
from moe_rl.balancing.route_counter import RouteCounter
from moe_rl.balancing.slots import SlotTables
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.frameworks.ep_exchange import ReplicaExchange, SlotTraffic
from moe_rl.frameworks.ep_layer import LayerRun
from moe_rl.frameworks.routes import of_moe_layers
from moe_rl.replay.hf_recorder import RoutingRecorder
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
        made = [own_group(ranks, backend="gloo") for ranks in (rows, zip(*rows, strict=True))]
        # What follows on the framework's group are messages between some ranks; NCCL wants a first call of all.
        dist.all_reduce(torch.zeros(1, device=device), group=ep)
        exchange = PlanExchange(ep=made[0], expert_dp=made[1])
        return cls(ep=ep, exchange=exchange, grid=np.array(rows), grid_group=dist.group.WORLD, device=device)


class PaddedRows(RowReader):
    """Rows whose routes are [B, S, L, K] or [N, L, K], of the MoE layers or of all."""

    def __init__(self, routes: Sequence[RouteArray], *, model: MoeModelSpec, layers: Sequence[int]) -> None:
        self._routes, self._model, self._layers = routes, model, layers

    def read(self) -> RankRows:
        """Return what the routes say in these layers."""
        rows = [rows_of(routes, self._model) for routes in self._routes]
        return RankRows.of(rows, model=self._model, layers=self._layers)


# The tables of a plan, and the routes of this rank's rows.
Tables = tuple[SlotTables, list[NDArray[np.int64]]]


class EpBalancer(PassCycle[Tables]):
    """Plans passes and tells the framework's layers what to do in them. Every method is called on all ranks alike.

    `routes` are those of this rank's M micro-batches (the gradient accumulation steps of an optimizer step), each
    [B, S, L, K] or [N, L, K]: rows stand as the model has them, sequence by sequence; -1 marks a choice that is not
    known; L counts the MoE layers or all layers. `begin_pass` replays them.
    """

    def __init__(
        self,
        layers: Sequence[LayerRun],
        *,
        clock: MicroBatchClock,
        groups: EpGroups,
        recorder: Callable[[], RoutingRecorder],
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
            setting=StepSetting(dispatcher="alltoall"),
        )
        super().__init__(planner, config=config, clocks=[clock], groups=groups, movable=movable)
        self._layers, self._clock, self._groups, self._replay = layers, clock, groups, replay
        self._recorder, self._release = recorder, release
        self._traffic = SlotTraffic()
        self._recording: tuple[TraceWriter, RoutingRecorder] | None = None
        self._recorded_steps = 0

    @property
    def at_home(self) -> bool:
        """Whether every expert is where the framework puts it."""
        return same_places(self.placement, self.own_placement)

    def begin_pass(self, source: PassSource | None = None, *, forward_only: bool = False) -> Plan:
        """Begin a pass (`PassCycle.begin_pass`) that replays its routes, and record it if `record` was called."""
        plan = super().begin_pass(source, forward_only=forward_only)
        # Open over the pass, which begin_pass and end_pass bracket instead of a `with`.
        if self._recording is not None and self._running is not None and not self._running.forward_only:
            self._recording[1].__enter__()
        return plan

    def _reader(self, routes: Sequence[RouteArray], layers: Sequence[int]) -> RowReader:
        return PaddedRows(routes, model=self.model, layers=layers)

    def _tables(self, planned: PlannedPass, source: PassSource) -> Tables:
        slots = SlotTables.of_plan(planned.here, group=0, source_rank=self._planner.exchange.rank)
        return slots, [rows_of(routes, self.model) for routes in source.routes or ()]

    @property
    def _device(self) -> torch.device:
        return self._groups.device

    def _listen(self, counter: RouteCounter | None) -> None:
        for layer in self._layers:
            layer.counter = counter

    def _ran(self, running: RunningPass) -> dict[str, Any]:
        def sent(part: range) -> NDArray[np.int64]:
            found = np.zeros((len(part), len(self._layers), self.placement.ep_size), np.int64)
            for layer in self._layers:
                for row, micro_batch in enumerate(part):
                    if micro_batch in layer.sent:
                        found[row, layer.index] = layer.sent[micro_batch].cpu().numpy()
            return found

        return {
            "actual_rows": np.sum(self._of_all_ranks(running.num_micro_batches, sent), axis=0),
            "pushed_bytes": self._traffic.pushed,
            "returned_bytes": self._traffic.returned,
            "micro_batches_in_flight": None if running.forward_only else 1,
        }

    def _stop(self, running: RunningPass, *, complete: bool = True) -> None:
        self._listen(None)
        self._clock.stop()
        for layer in self._layers if not complete else ():
            layer.leave()
        self._record_step(running, complete=complete)

    def record(self, path: Path | str) -> None:
        """Record the routing of every pass with a backward from now on, as `path`/dp<rank>.moetrace of this rank."""
        require(self._recording is None, "routing is being recorded already.")
        self._require_no_pass("record()")
        writer = TraceWriter(
            Path(path) / f"dp{dist.get_rank():05d}.moetrace",
            num_experts=self.model.num_experts,
            moe_layer_ids=self.model.moe_layer_ids,
            top_k=self.model.top_k,
            model=self.model.name,
            provenance="R3" if self._replay else "live",
            origin={"data_parallel_size": dist.get_world_size()},
        )
        self._recording = writer, self._recorder()

    def detach(self) -> None:
        """Give the layers back to the framework, and close the recording."""
        self._require_no_pass("detach()")
        require(self.at_home, "the experts are reordered: call reorder(balancer.own_placement) before detach().")
        if self._recording is not None:
            self._recording[0].close()
            self._recording = None
        self._thread.shutdown()
        self._planner.exchange.destroy()
        self._clock.remove()
        self._release()

    def _activate(
        self, planned: PlannedPass, tables: Tables, later: Sequence[Callable[[], Tables]], *, num_micro_batches: int
    ) -> None:
        """Tell every layer what it does in every micro-batch; a plan that does not fit only replays."""
        slots, rows = tables
        given = [torch.from_numpy(each).to(self._device) for each in rows] if self._replay else []
        num_planned = 0 if planned.misfit else planned.here.replicas.num_micro_batches
        self._traffic = SlotTraffic()
        slots = slots.to(self._device)
        for layer in self._layers:
            layer.begin([each[:, layer.index] for each in given], max(num_planned, len(given)))
            for micro_batch in range(num_planned):
                layer.tables[micro_batch] = slots.table(micro_batch, layer.index)
                layer.exchanges[micro_batch] = ReplicaExchange.of_cell(
                    planned.here,
                    ep_group=0,
                    micro_batch=micro_batch,
                    layer=layer.index,
                    rank=self._planner.exchange.rank,
                    device=self._device,
                    group=self._groups.ep,
                    traffic=self._traffic,
                )

    def _record_step(self, running: RunningPass, *, complete: bool) -> None:
        if self._recording is None or running.forward_only:
            return
        writer, recorder = self._recording
        recorder.__exit__(None, None, None)
        if not complete:
            self._recording = writer, self._recorder()
            return
        count = len(recorder.sequences())
        # Distinct over steps and ranks without a word between them, as long as all ranks have as many sequences.
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
        # A recorder numbers sequences from its own start: every step gets a new one.
        self._recording = writer, self._recorder()


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
