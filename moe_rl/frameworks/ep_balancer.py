"""Passes of a run whose experts are spread by the framework itself, without Megatron: plan, follow, count.

Same face as `moe_rl.megatron.Balancer`, less what such a framework does not allow. G EP groups, P EP ranks, M
micro-batches, L MoE layers, K choices, E experts.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange
from moe_rl.balancing.heard import RouteCounter
from moe_rl.balancing.homes import ExpertHomes, MovableExperts
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.local import gather
from moe_rl.balancing.pass_planner import PassPlanner, PlannedPass, same_places
from moe_rl.balancing.passes import PassCycle, Read, Routes, RunningPass
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
from moe_rl.simulators.setting import StepSetting

USED = ("policy", "parameters", "objective", "cluster", "dispatcher", "replica_slots", "ranks_per_node")
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

        # What follows on the framework's group are messages between some ranks; NCCL wants a first call of all.
        dist.all_reduce(torch.zeros(1, device=device), group=ep)
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


Tables = tuple[SlotTables, list[NDArray[np.int64]]]
"""The tables of a plan, and the routes of this rank's rows."""


class EpBalancer(PassCycle[Tables]):
    """Plans passes and tells the framework's layers what to do in them. Every method is called on all ranks alike.

    `routes` are those of this rank's M micro-batches (the gradient accumulation steps of an optimizer step), each
    [B, S, L, K] or [N, L, K]: rows stand as the model has them, sequence by sequence; -1 marks a choice that is not
    known; L counts the MoE layers or all layers. `begin_pass` replays them.
    """

    def __init__(self, run: EpRun, *, config: BalancerConfig, model: MoeModelSpec, replay: bool) -> None:
        groups = run.groups
        # These frameworks send a row to every expert of a token.
        planner = PassPlanner(
            groups.exchange,
            layers=range(model.num_moe_layers),
            model=model,
            setting=StepSetting(dispatcher="alltoall"),
        )
        super().__init__(planner, config=config, clocks=[run.clock])
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

    def begin_pass(self, *routes: Any, **asked: Any) -> Plan:
        """Begin a pass (`PassCycle.begin_pass`) that replays its routes, and record it where that was asked for."""
        plan = super().begin_pass(*routes, **asked)
        if self._recording is not None and self._running is not None and not self._running.forward_only:
            self._recording[1].__enter__()
        return plan

    def _reader(self, routes: Routes, layers: Sequence[int]) -> Read:
        return lambda: RankRows.of(self._rows(routes), model=self.model, layers=layers)

    def _rows(self, routes: Routes) -> list[NDArray[np.int64]]:
        return [rows_of(each, self.model) for each in routes]

    def _tables(self, planned: PlannedPass, routes: Routes | None) -> Tables:
        slots = SlotTables.of_plan(planned.here, group=0, source_rank=self._planner.exchange.rank)
        return slots, self._rows(routes or ())

    @property
    def _device(self) -> torch.device:
        return self._run.groups.device

    def _listen(self, counter: RouteCounter | None) -> None:
        for layer in self._run.layers:
            layer.counter = counter

    def _why_fixed(self) -> str | None:
        return self._run.movable if isinstance(self._run.movable, str) else None

    def _ran(self, running: RunningPass) -> dict[str, Any]:
        layers = self._run.layers
        sent = np.zeros((running.num_micro_batches, len(layers), self.placement.ep_size), np.int64)
        for layer in layers:
            for micro_batch, rows in layer.sent.items():
                if micro_batch < len(sent):
                    sent[micro_batch, layer.index] = rows.cpu().numpy()
        return {
            "actual_rows": np.sum(self._gathered(sent), axis=0),
            "pushed_bytes": self._traffic.pushed,
            "returned_bytes": self._traffic.returned,
            "micro_batches_in_flight": None if running.forward_only else 1,
        }

    def _stop(self, running: RunningPass) -> None:
        self._listen(None)
        self._run.clock.stop()
        self._record_step(running)

    def record(self, path: Path | str) -> None:
        """Record the routing of every pass with a backward from now on, as `path`/dp<rank>.moetrace of this rank."""
        require(self._recording is None, "routing is being recorded already.")
        self._require_no_pass("record()")
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
        self._require_no_pass("detach()")
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
        self._require_no_pass(what)
        return self._homes

    def _activate(
        self, planned: PlannedPass, tables: Tables, later: Sequence[Callable[[], Tables]], *, num_micro_batches: int
    ) -> None:
        """Tell every layer what it does in every micro-batch; a plan that does not fit only replays."""
        slots, rows = tables
        given = [torch.from_numpy(each).to(self._run.groups.device) for each in rows] if self._replay else []
        num_planned = 0 if planned.misfit else planned.here.replicas.num_micro_batches
        self._traffic = Traffic()
        slots = slots.to(self._run.groups.device)
        for layer in self._run.layers:
            layer.begin([each[:, layer.index] for each in given], max(num_planned, len(given)))
            for micro_batch in range(num_planned):
                layer.tables[micro_batch] = slots.table(micro_batch, layer.index)
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

    def _record_step(self, running: RunningPass) -> None:
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
