"""verl's checkpoint engine `moe_rl`: weights reach rollout engines by a plan, experts from where the balancer has them.

actor_rollout_ref:
  rollout:
    checkpoint_engine:
      backend: moe_rl
      engine_kwargs: {moe_rl: {ep_size: 8, expert_map: maps/replica{replica}.npy}}

Each engine rank gets the experts in its own slots under the names that the framework's loader knows, and then
everything else. `expert_map` [MoE layers, slots] is read at every sync, so that a map may change with the weights;
without it engines have the map that they start with. Ranks of an engine count expert-parallel index first, then slices
of experts.

SGLang is refused with ep_size above 1: verl gathers the batches of its ranks and loads all of them under the names of
the first, so that every rank would write other experts than its own.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.post_import import wrap
from moe_rl.frameworks.verl.export import ExportedWeights, SplitWeights
from moe_rl.sync.dense import receive_dense, send_dense
from moe_rl.sync.errors import SyncError
from moe_rl.sync.executor import Traffic
from moe_rl.sync.expert_parts import ExpertShape
from moe_rl.sync.layouts import EngineLayout, SyncProblem, TrainerLayout
from moe_rl.sync.plan import SyncPlan, plan_sync
from moe_rl.sync.rank_plan import Parts
from moe_rl.sync.ranks import Address, SyncGroup
from moe_rl.sync.session import EngineSide, sync_experts
from moe_rl.sync.versions import SlotVersions

NAME = "moe_rl"


def register(module: ModuleType) -> None:
    """Enter the engine into verl's registry; `module` is `verl.checkpoint_engine.base`.

    A rollout worker then refuses an engine that cannot take experts by name, before any weight travels.
    """
    module.CheckpointEngineRegistry.register(NAME)(PlannedCheckpointEngine)

    def checked(made: Callable[..., None], self: Any, rollout_config: Any, *args: Any, **kwargs: Any) -> None:
        check_rollout(rollout_config)
        made(self, rollout_config, *args, **kwargs)

    wrap(module.CheckpointEngineWorker, "__init__", checked)


# Rollout engines into which verl loads the batches of all ranks under the first rank's names
# (verl/workers/rollout/sglang_rollout, sglang.srt.weight_sync.utils.update_weights).
ZIPPED_BY_POSITION = ("sglang",)


def check_rollout(rollout_config: Any) -> None:
    """Raise for a rollout engine that would load a rank's experts under another rank's names."""
    chosen = rollout_config.checkpoint_engine
    if chosen.backend != NAME or rollout_config.name not in ZIPPED_BY_POSITION:
        return
    ep_size = chosen.engine_kwargs.get(NAME, {}).get("ep_size", 1)
    require(
        ep_size == 1,
        f"checkpoint_engine.backend=moe_rl with rollout.name={rollout_config.name} and ep_size={ep_size}: verl loads "
        "the batches of an engine's ranks under the names of the first, so each rank would get the experts of another. "
        "Leave engine_kwargs.moe_rl.ep_size out (every rank then gets all experts), or use vllm.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """`engine_kwargs` of the backend: what a rollout engine's launch says of its experts."""

    ep_size: int = 1
    tp_size: int | None = None
    """Slices of an expert; None: a replica's ranks divided by `ep_size`."""
    redundant_experts: int = 0
    """Slots beside one per expert, of an engine without `expert_map`."""
    expert_map: str = ""
    """File with [MoE layers, slots], {replica} in its name is the replica's number."""
    num_replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """What engine ranks must know of the trainer before they can plan."""

    home_rank: list[list[int]]
    stage_of_layer: list[int]
    ranks: list[Any]
    hidden_size: int
    ffn_size: int
    dtype: str
    names: dict[str, list[str]]
    """MoE layer -> names of gate, up and down, with {expert}."""

    @classmethod
    def of(cls, layout: TrainerLayout, shape: ExpertShape, names: dict[int, list[str]]) -> "TrainerFacts":
        """Return the facts of a trainer's layout."""
        return cls(
            home_rank=layout.home_rank.tolist(),
            stage_of_layer=list(layout.stage_of_layer),
            ranks=layout.ranks.tolist(),
            hidden_size=shape.hidden_size,
            ffn_size=shape.ffn_size,
            dtype=str(shape.dtype).removeprefix("torch."),
            names={str(layer): templates for layer, templates in names.items()},
        )

    def layout(self) -> TrainerLayout:
        """Return the layout."""
        return TrainerLayout(
            home_rank=np.array(self.home_rank, np.int32),
            stage_of_layer=tuple(self.stage_of_layer),
            ranks=np.array(self.ranks, np.int32),
        )

    def shape(self, parts_per_expert: int) -> ExpertShape:
        """Return the sizes of an expert."""
        return ExpertShape(
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            parts_per_expert=parts_per_expert,
            dtype=getattr(torch, self.dtype),
        )


class PlannedCheckpointEngine:
    """One rank's end of the sync, on a trainer or beside a rollout engine; verl's `CheckpointEngine` by its methods."""

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        node: str = "",
        connect_s: float = 600.0,
        silence_s: float = 5.0,
        **settings: Any,
    ) -> None:
        self.settings = EngineSettings(**settings)
        self.batch_bytes, self.is_master = bucket_size, is_master
        self.node = node or socket.gethostname()
        self.connect_s, self.silence_s = connect_s, silence_s
        self.group: SyncGroup | None = None
        self.versions: SlotVersions | None = None
        self.traffic = Traffic()
        self.step = 0

    # --- what verl's manager calls, on every rank -------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Return this rank's node, and from the master where the ranks meet."""
        return {"node": self.node, "address": _free_address() if self.is_master else None}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`: actors first, then the replicas' ranks in their order."""
        size = actor_wg_world_size + rollout_world_size
        numbers: dict[str, int] = {}
        for each in metadata:
            numbers.setdefault(each["node"], len(numbers))
        node_of = [numbers[each["node"]] for each in metadata]
        address = next(each["address"] for each in metadata if each["address"])

        def of(ranks: range) -> dict[str, list[Any]]:
            count = len(ranks)
            shared = {"trainers": actor_wg_world_size, "node_of": node_of, "address": address}
            return {"rank": list(ranks), **{name: [value] * count for name, value in shared.items()}}

        return of(range(actor_wg_world_size)), of(range(actor_wg_world_size, size))

    def init_process_group(self, rank: int, trainers: int, node_of: list[int], address: tuple[str, int]) -> None:
        """Meet the other ranks."""
        self.rank, self.trainers, self.node_of = rank, trainers, node_of
        host, port = address
        self.group = SyncGroup(
            rank=rank,
            size=len(node_of),
            address=Address(host=host, port=port),
            serves=self.is_master,
            connect_s=self.connect_s,
            silence_s=self.silence_s,
        )

    def finalize(self) -> None:
        """Part from the others. Raises `SyncError` on an engine whose slots do not all hold this step's weights."""
        if self.group is not None:
            self.group.__exit__(None, None, None)
            self.group = None
        if self.versions is not None:
            self.versions.require(self.step)

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send this trainer's part of the weights; return what the sync moved."""
        require(
            isinstance(weights, ExportedWeights),
            "checkpoint_engine.backend=moe_rl reads experts through moe_rl's balancer: set MOE_RL, and use Megatron.",
        )
        self.step = global_steps or 0
        split: SplitWeights = weights.split()
        return await asyncio.to_thread(self._send, split)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the experts of this rank's slots, then all other weights."""
        self.step = global_steps or 0
        tensors = self._receive()
        while True:
            pair = await asyncio.to_thread(next, tensors, None)
            if pair is None:
                break
            yield pair

    # --- one rank's work ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _together(self) -> Iterator[SyncGroup]:
        """The group; what is raised inside is told to all ranks."""
        group = self.group
        assert group is not None, "verl calls init_process_group before weights travel"
        try:
            yield group
        except Exception as error:
            group.fail(
                str(error) if isinstance(error, SyncError) else f"rank {self.rank}: {type(error).__name__}: {error}"
            )
            raise

    def _send(self, split: SplitWeights) -> dict[str, float]:
        from moe_rl.megatron.weight_sync import MegatronExpertReader

        with self._together() as group:
            reader = MegatronExpertReader(split.balancer)
            layout, shape = reader.trainer_layout(), reader.shape(1)
            if self.rank == 0:
                facts = TrainerFacts.of(layout, shape, split.names)
                group.store.set("trainer", json.dumps(_as_dict(facts)))
            plan = self._plan(layout, shape.expert_bytes)
            for _ in sync_experts(group, plan, reader.side(plan.problem), step=self.step, traffic=self.traffic):
                pass
            experts_sent = self.traffic.sent_bytes
            send_dense(
                group, plan.problem, split.dense, step=self.step, batch_bytes=self.batch_bytes, traffic=self.traffic
            )
        return {
            "moe_rl_sync/steps_over_bound": plan.num_steps / max(1, plan.least_steps),
            "moe_rl_sync/expert_bytes_sent": float(experts_sent),
            "moe_rl_sync/dense_bytes_sent": float(self.traffic.sent_bytes - experts_sent),
        }

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._together() as group:
            facts = TrainerFacts(**json.loads(group.fetch("trainer", of=0)))
            plan = self._plan(facts.layout(), facts.shape(1).expert_bytes)
            own = next(each for each in plan.problem.engine_ranks() if each.rank == self.rank)
            local = own.engine.local_slots(own.index)
            if self.versions is None or not np.array_equal(self.versions.local_slots, local):
                self.versions = SlotVersions(local)
            ready: list[tuple[Parts, torch.Tensor]] = []
            side = EngineSide(write=lambda parts, body: ready.append((parts, body)), current_slots=lambda: local)
            rounds = sync_experts(group, plan, side, step=self.step, traffic=self.traffic)
            name_tensors = _Namer(facts, facts.shape(plan.problem.parts_per_expert))
            for _ in rounds:
                yield from self._handed_over(ready, name_tensors)
            yield from self._handed_over(ready, name_tensors)
            yield from receive_dense(
                group, plan.problem, step=self.step, batch_bytes=self.batch_bytes, traffic=self.traffic
            )

    def _handed_over(
        self, ready: list[tuple[Parts, torch.Tensor]], tensors_of: "_Namer"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what has come; an expert counts as written once the loader has asked for what comes after it."""
        while ready:
            parts, body = ready.pop(0)
            yield from tensors_of(parts, body)
            assert self.versions is not None
            self.versions.wrote(parts.layer, parts.expert, self.step)

    def _plan(self, layout: TrainerLayout, expert_bytes: int) -> SyncPlan:
        """Return the plan, the same on every rank."""
        settings = self.settings
        per_replica = (len(self.node_of) - self.trainers) // settings.num_replicas
        tp_size = settings.tp_size or per_replica // settings.ep_size
        require(
            settings.num_replicas * settings.ep_size * tp_size == len(self.node_of) - self.trainers,
            f"engine_kwargs.moe_rl: {settings.num_replicas} replicas of EP {settings.ep_size} and TP {tp_size} are not "
            f"the {len(self.node_of) - self.trainers} rollout ranks there are.",
        )
        engines = tuple(
            EngineLayout(
                slots=self._slots(replica, layout), ep_size=settings.ep_size, tp_size=tp_size, whole_tensors=True
            )
            for replica in range(settings.num_replicas)
        )
        problem = SyncProblem(trainer=layout, engines=engines, node_of=tuple(self.node_of), expert_bytes=expert_bytes)
        return plan_sync(problem)

    def _slots(self, replica: int, layout: TrainerLayout) -> NDArray[np.int32]:
        """Return [L, W] the map of a replica."""
        num_layers, num_experts = layout.home_rank.shape
        if not self.settings.expert_map:
            row = np.arange(num_experts + self.settings.redundant_experts, dtype=np.int32) % num_experts
            return np.tile(row, (num_layers, 1))
        path = Path(self.settings.expert_map.format(replica=replica))
        require(path.is_file(), f"engine_kwargs.moe_rl.expert_map: there is no file {path}.")
        return np.asarray(np.load(path), np.int32)


class _Namer:
    """Turns an expert's bytes into gate, up and down under the engines' names."""

    def __init__(self, facts: TrainerFacts, shape: ExpertShape) -> None:
        self._names, self._shape = facts.names, shape

    def __call__(self, parts: Parts, body: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._shape.unpack(body, parts.num_parts)
        for template, tensor in zip(self._names[str(parts.layer)], tensors, strict=True):
            yield template.format(expert=parts.expert), tensor.contiguous()


def _as_dict(facts: TrainerFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in TrainerFacts.__dataclass_fields__}


def _free_address() -> tuple[str, int]:
    host = socket.gethostbyname(socket.gethostname())
    with socket.socket() as free:
        free.bind((host, 0))
        return host, int(free.getsockname()[1])
