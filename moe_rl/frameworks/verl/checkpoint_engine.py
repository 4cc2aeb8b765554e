"""verl's checkpoint engine `moe_rl`: weights reach rollout engines by a plan, experts from where the balancer has them.

actor_rollout_ref:
  rollout:
    checkpoint_engine:
      backend: moe_rl
      engine_kwargs: {moe_rl: {ep_size: 8, expert_map: maps/replica{replica}.npy}}

Each engine rank gets the experts in its own slots under the names that the framework's loader knows, and then
everything else. `expert_map` is a file with [MoE layers, slots], or what `moe-rl plan --export sglang` writes. It is
read at every sync, so that a map planned from the last rollout's routes comes with the weights: vLLM and SGLang then
change their own maps in place (`frameworks/vllm/sync_map.py`, `frameworks/sglang/weight_loader.py`). Without it
engines have the map that they start with. Ranks of an engine count expert-parallel index first, then slices of experts.

SGLang with ep_size above 1 loads the batches of all ranks under the names of the first. So names travel inside the
batches, by the way of verl's delta engine, and need its loader:

    rollout.engine_kwargs.sglang.custom_weight_loader: [verl.workers.rollout.sglang_rollout.delta_loader.apply_delta]
"""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.mappings import attributes
from moe_rl.core.post_import import wrap
from moe_rl.frameworks.sglang import weight_loader
from moe_rl.frameworks.sglang.expert_map import KEY as SGLANG_KEY
from moe_rl.frameworks.verl.export import ExportedWeights, SplitWeights
from moe_rl.frameworks.verl.sync_rollouts import BATCHES, NAME, ZIPPED_BY_POSITION, check_rollout
from moe_rl.frameworks.vllm import sync_map
from moe_rl.sync.dense import receive_dense, send_dense
from moe_rl.sync.errors import SyncError
from moe_rl.sync.executor import Traffic
from moe_rl.sync.expert_parts import ExpertShape
from moe_rl.sync.layouts import EngineLayout, EngineRank, SyncProblem, TrainerLayout
from moe_rl.sync.plan import SyncPlan, plan_sync
from moe_rl.sync.rank_plan import Parts
from moe_rl.sync.ranks import Address, SyncGroup
from moe_rl.sync.session import EngineSide, sync_experts
from moe_rl.sync.versions import SlotVersions

TENSORS_PER_EXPERT = 3  # gate, up, down
EXPERT_LAYER = re.compile(r"layers\.(\d+)\.")


def register(module: ModuleType) -> None:
    """Enter the engine into verl's registry; `module` is `verl.checkpoint_engine.base`.

    A rollout worker then refuses an engine that cannot take experts by name, before any weight travels, and packs names
    into the batches for one that would mix them up.
    """
    module.CheckpointEngineRegistry.register(NAME)(PlannedCheckpointEngine)

    def checked(made: Callable[..., None], self: Any, rollout_config: Any, *args: Any, **kwargs: Any) -> None:
        check_rollout(rollout_config)
        made(self, rollout_config, *args, **kwargs)
        if isinstance(self.checkpoint_engine, PlannedCheckpointEngine):
            self.checkpoint_engine.serve(rollout_config.name)

    wrap(module.CheckpointEngineWorker, "__init__", checked)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """`engine_kwargs` of the backend: what a rollout engine's launch says of its experts."""

    ep_size: int = 1
    tp_size: int | None = None
    """Slices of an expert; None: a replica's ranks divided by `ep_size`."""
    redundant_experts: int = 0
    """Slots beside one per expert, of an engine without `expert_map`."""
    expert_map: str = ""
    """File (.npy or SGLang's .json) with [MoE layers, slots], {replica} in its name is the replica's number."""
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

    def hidden_layers(self) -> list[int]:
        """Return [L] the hidden layer that each MoE layer is, by the names of its experts."""
        names = [self.names[str(layer)][0] for layer in range(len(self.names))]
        return [int(EXPERT_LAYER.findall(name)[0]) for name in names]

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
        self.rollout = ""

    def serve(self, rollout: str) -> None:
        """Take the name of the engine beside which this rank is, which decides how weights are handed over."""
        self.rollout = rollout
        if rollout in ZIPPED_BY_POSITION and self.settings.ep_size > 1:
            self.wire_format = BATCHES

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
            "checkpoint_engine.backend=moe_rl gets the experts from moe_rl's balancer: set MOE_RL, and train with "
            "Megatron.",
        )
        self.step = global_steps or 0
        split: SplitWeights = weights.split()
        return await asyncio.to_thread(self._send, split)

    def receive_weights(self, global_steps: int | None = None) -> Any:
        """Return the weights of this rank in the wire format: tensors by name, or (batch, is it the last?)."""
        self.step = global_steps or 0
        return self._batches() if self.wire_format == BATCHES else self._tensors()

    async def _tensors(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the experts of this rank's slots, then all other weights."""
        tensors = self._received()
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
        assert group is not None, "verl must call init_process_group before it sends weights"
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
            facts = TrainerFacts.of(layout, shape, split.names)
            if self.rank == 0:
                group.store.set("trainer", json.dumps(_as_dict(facts)))
            plan = self._plan(facts)
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

    def _received(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._together() as group:
            inflow = self._inflow(group)
            if self.settings.expert_map and self.rollout == "vllm":
                yield sync_map.MAP_NAME, torch.as_tensor(np.array(inflow.own.engine.slots))
            yield from self._experts(group, inflow)
            yield from self._dense(group, inflow)

    def _batches(self) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
        """Yield as many batches as the other ranks of the engine do: experts by number, then dense tensors by bytes."""
        with self._together() as group:
            inflow = self._inflow(group)
            slots = inflow.hidden_slots() if self.settings.expert_map else None
            per_batch = max(1, self.batch_bytes // inflow.plan.problem.expert_bytes)
            tensors = self._experts(group, inflow)
            yield _on_device(weight_loader.packed((), slots)), False
            for _ in range(-(-inflow.most_experts() // per_batch)):
                yield _on_device(weight_loader.packed(islice(tensors, TENSORS_PER_EXPERT * per_batch))), False
            require(
                next(tensors, None) is None, "a rank of the rollout engine received more experts than it has slots."
            )
            batch: list[tuple[str, torch.Tensor]] = []
            size = 0
            for name, tensor in self._dense(group, inflow):
                if batch and size + tensor.nbytes > self.batch_bytes:
                    yield _on_device(weight_loader.packed(batch)), False
                    batch, size = [], 0
                batch.append((name, tensor))
                size += tensor.nbytes
            yield _on_device(weight_loader.packed(batch)), True

    def _inflow(self, group: SyncGroup) -> "_Inflow":
        """Return the plan, and this rank's place in it."""
        facts = TrainerFacts(**json.loads(group.fetch("trainer", of=0)))
        plan = self._plan(facts)
        own = next(engine_rank for engine_rank in plan.problem.engine_ranks() if engine_rank.rank == self.rank)
        return _Inflow(facts=facts, plan=plan, own=own)

    def _experts(self, group: SyncGroup, inflow: "_Inflow") -> Iterator[tuple[str, torch.Tensor]]:
        plan, local = inflow.plan, inflow.own.engine.local_slots(inflow.own.index)
        if self.versions is None or not np.array_equal(self.versions.local_slots, local):
            self.versions = SlotVersions(local)
        ready: list[tuple[Parts, torch.Tensor]] = []
        side = EngineSide(write=lambda parts, body: ready.append((parts, body)), current_slots=lambda: local)
        rounds = sync_experts(group, plan, side, step=self.step, traffic=self.traffic)
        name_tensors = _Namer(inflow.facts, inflow.facts.shape(plan.problem.parts_per_expert))
        for _ in rounds:
            yield from self._handed_over(ready, name_tensors)
        yield from self._handed_over(ready, name_tensors)

    def _dense(self, group: SyncGroup, inflow: "_Inflow") -> Iterator[tuple[str, torch.Tensor]]:
        return receive_dense(
            group, inflow.plan.problem, step=self.step, batch_bytes=self.batch_bytes, traffic=self.traffic
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

    def _plan(self, facts: TrainerFacts) -> SyncPlan:
        """Return the plan, the same on every rank."""
        settings, layout, expert_bytes = self.settings, facts.layout(), facts.shape(1).expert_bytes
        per_replica = (len(self.node_of) - self.trainers) // settings.num_replicas
        tp_size = settings.tp_size or per_replica // settings.ep_size
        require(
            settings.num_replicas * settings.ep_size * tp_size == len(self.node_of) - self.trainers,
            f"engine_kwargs.moe_rl: {settings.num_replicas} engines with EP {settings.ep_size} and TP {tp_size} do "
            f"not use all {len(self.node_of) - self.trainers} rollout ranks.",
        )
        engines = tuple(
            EngineLayout(
                slots=self._slots(replica, facts), ep_size=settings.ep_size, tp_size=tp_size, whole_tensors=True
            )
            for replica in range(settings.num_replicas)
        )
        problem = SyncProblem(trainer=layout, engines=engines, node_of=tuple(self.node_of), expert_bytes=expert_bytes)
        return plan_sync(problem)

    def _slots(self, replica: int, facts: TrainerFacts) -> NDArray[np.int32]:
        """Return [L, W] the map of a replica."""
        num_layers, num_experts = len(facts.home_rank), len(facts.home_rank[0])
        if not self.settings.expert_map:
            row = np.arange(num_experts + self.settings.redundant_experts, dtype=np.int32) % num_experts
            return np.tile(row, (num_layers, 1))
        path = Path(self.settings.expert_map.format(replica=replica))
        require(path.is_file(), f"engine_kwargs.moe_rl.expert_map: there is no file {path}.")
        if path.suffix != ".json":
            return np.asarray(np.load(path), np.int32)
        rows = np.asarray(json.loads(path.read_text())[SGLANG_KEY], np.int32)
        hidden = facts.hidden_layers()
        require(
            len(rows) > max(hidden),
            f"engine_kwargs.moe_rl.expert_map: {path} has {len(rows)} layers, but the model has experts in "
            f"layer {max(hidden)}.",
        )
        return rows[hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inflow:
    """What an engine rank knows once the trainer has told its layout."""

    facts: TrainerFacts
    plan: SyncPlan
    own: EngineRank

    def most_experts(self) -> int:
        """Return the most different experts, over all layers, that a rank of this engine has in its slots."""
        engine = self.own.engine
        most = 0
        for index in range(0, engine.size, engine.tp_size):
            most = max(most, sum(len(np.unique(row)) for row in engine.local_slots(index)))
        return most

    def hidden_slots(self) -> NDArray[np.int32]:
        """Return [hidden layers, W]: the map with rows for dense layers, which nothing reads."""
        slots = self.own.engine.slots
        hidden = self.facts.hidden_layers()
        rows = np.tile(np.arange(slots.shape[1], dtype=np.int32) % (int(slots.max()) + 1), (max(hidden) + 1, 1))
        rows[hidden] = slots
        return rows


def _on_device(batch: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Move a batch to the GPU that this rank shares with its engine, if there is one: a handle reaches it there."""
    if not torch.cuda.is_available():
        return batch
    return [(name, tensor.cuda()) for name, tensor in batch]


class _Namer:
    """Turns an expert's bytes into gate, up and down under the engines' names."""

    def __init__(self, facts: TrainerFacts, shape: ExpertShape) -> None:
        self._names, self._shape = facts.names, shape

    def __call__(self, parts: Parts, body: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._shape.unpack(body, parts.num_parts)
        for template, tensor in zip(self._names[str(parts.layer)], tensors, strict=True):
            yield template.format(expert=parts.expert), tensor.contiguous()


def _as_dict(facts: TrainerFacts) -> dict[str, Any]:
    return attributes(facts, TrainerFacts.__dataclass_fields__)


def _free_address() -> tuple[str, int]:
    host = socket.gethostbyname(socket.gethostname())
    with socket.socket() as free:
        free.bind((host, 0))
        return host, int(free.getsockname()[1])
