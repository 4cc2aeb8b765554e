"""What a weight sync takes, by the name of its transport, beside the bound that no transport beats.

The bound: each engine's ranks must take in the engine's weights once over their own NICs (once per node, where several
engines or ranks of a node share what came), and the trainers must send all weights once. A transport is a price on top
of it, with at most one constant, fitted on published syncs (`python benchmarks/weight_syncs.py`), and the loader's time
per tensor is a line of its own.

Example: Qwen3-30B, 61 GB, 16 trainers and 16 engine ranks on H100. Every engine node takes in 61 GB over eight NICs of
43 GB/s: the bound is .18 s. NeMo-RL's reshard is published with .51 to .67 s, three times of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from moe_rl.core.cost import BF16_BYTES
from moe_rl.core.errors import require, require_least, require_positive
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.registry import Registry
from moe_rl.core.topology import HardwareSpec
from moe_rl.simulators.memory import dense_params

# Seconds that an engine's loader works per tensor, in Python: SGLang 0.5.23 takes 23 to 39 us, vLLM 0.33 7 to 18 us, on
# a CPU core with tensors of no size.
LOADER_TENSOR_S = 30e-6
# gate, up and down.
TENSORS_PER_EXPERT = 3
# Beside experts: projections, norms, router.
DENSE_TENSORS_PER_LAYER = 8
# Where the seconds of a part come from.
PART_SOURCES = {
    "gather": "bytes over a trainer node's links, at the share that published broadcasts reach",
    "transfer": "bytes over NICs, by the transport's form",
    "loader": "30 us of Python per tensor, measured on a CPU core",
    "control": "pause, drain and metadata as --weight-sync-control-seconds says: 0.2 to 5 s are published",
}
# Share of a link that a collective over a model's tensors reaches. Fitted on three published broadcasts of three models
# (`Broadcast`); gathers and broadcasts over several NICs are taken to reach the same.
COLLECTIVE_SHARE = 0.54
# Steps of a planned sync over the bound: 1.00 to 1.06 in benchmarks/bench_sync.py.
PLANNED_OVER_BOUND = 1.06


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSetting:
    """The bytes of a sync, and between how many GPUs they travel."""

    weights_bytes: float
    num_tensors: float
    train_gpus: int
    engine_gpus: int
    engine_size: int = 1
    """GPUs that share out one engine's weights."""
    trainer_ep_size: int = 1
    """Ranks that share out a trainer's experts."""
    dense_bytes: float = 0.0
    """Of `weights_bytes`, those of no routed expert; 0 also if unknown."""

    def __post_init__(self) -> None:
        require_positive(self, "weights_bytes")
        require_least(self, num_tensors=0, train_gpus=1, engine_gpus=1, engine_size=1, trainer_ep_size=1, dense_bytes=0)
        require(
            self.engine_gpus % self.engine_size == 0,
            f"engine_size {self.engine_size} does not divide the {self.engine_gpus} engine GPUs.",
        )

    @classmethod
    def of_model(
        cls,
        model: MoeModelSpec,
        *,
        train_gpus: int,
        engine_gpus: int,
        engine_size: int = 1,
        trainer_ep_size: int = 1,
        bytes_per_param: float = BF16_BYTES,
    ) -> "SyncSetting":
        """Return the sync of all weights of a model."""
        experts = float(model.num_moe_layers * model.num_experts)
        dense = dense_params(model) + 2.0 * model.hidden_size * model.vocab_size
        return cls(
            weights_bytes=bytes_per_param * (dense + experts * model.expert_params),
            dense_bytes=bytes_per_param * dense,
            num_tensors=TENSORS_PER_EXPERT * experts + DENSE_TENSORS_PER_LAYER * model.num_layers,
            train_gpus=train_gpus,
            engine_gpus=engine_gpus,
            engine_size=engine_size,
            trainer_ep_size=trainer_ep_size,
        )

    def bound_s(self, hardware: HardwareSpec) -> float:
        """Return the seconds that no sync between different GPUs goes below."""
        nic = hardware.rdma_gb_per_s * 1e9
        ports = min(hardware.ranks_per_node, self.engine_gpus)
        nodes_per_engine = max(1.0, self.engine_size / hardware.ranks_per_node)
        entering = self.weights_bytes / nodes_per_engine / (ports * nic)
        return max(entering, self.weights_bytes / (self.train_gpus * nic))

    def gather_s(self, hardware: HardwareSpec, weights_bytes: float) -> float:
        """Return the seconds in which so many bytes, spread over all trainers, become whole on every trainer.

        They enter every node once over all its NICs, and NVLink hands them on; trainers of one NVLink domain need no
        NIC. Example: DeepSeek-V3, 1342 GB, eight NICs of 43 GB/s at 0.54 of their rate: 7.2 s.
        """
        in_domain = self.train_gpus <= hardware.ranks_per_node
        link = hardware.nvlink_p2p_gb_per_s if in_domain else hardware.ranks_per_node * hardware.rdma_gb_per_s
        return weights_bytes / (COLLECTIVE_SHARE * link * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPrice:
    """Seconds of a sync by part, in their order."""

    parts_s: Mapping[str, float]
    """gather: among trainers; transfer: into engines; loader: the engine's Python per tensor; control: pause, drain,
    metadata. `PART_SOURCES` says where each comes from."""
    bound_s: float

    @property
    def seconds(self) -> float:
        """Seconds of all parts."""
        return sum(self.parts_s.values())


class SyncTransport(Protocol):
    """How weights travel. An entry of `TRANSPORTS`."""

    name: ClassVar[str]
    help: ClassVar[str]
    """What it is, and whose."""
    colocated: ClassVar[bool]
    """Whether it is between processes on the same GPUs. Then no NIC need carry a byte, and the bound is 0."""

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the seconds of each part."""


class Broadcast:
    """One rank sends whole tensors to all engines, bucket by bucket (verl's `nccl` into vLLM, slime, miles)."""

    name: ClassVar[str] = "broadcast"
    help: ClassVar[str] = "one trainer sends whole tensors in buckets: verl's nccl into vLLM, slime, miles"
    colocated: ClassVar[bool] = False

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return transfer over one NIC, and a loader that sees every tensor."""
        transfer = setting.weights_bytes / (COLLECTIVE_SHARE * hardware.rdma_gb_per_s * 1e9)
        return {"transfer": transfer, "loader": LOADER_TENSOR_S * setting.num_tensors}


class PackedBroadcast:
    """All trainers gather whole tensors, then one broadcast over a group of all trainers and engines (NeMo-RL's
    default between different GPUs).

    The group has all GPUs of the sender's node in it, so that NCCL's rings use all NICs of a node; `Broadcast`'s group
    has one trainer. Gather and broadcast use the same NICs, so they are taken one after the other. Without a constant
    of its own. Example: DeepSeek-V3, 1342 GB: 7.2 s twice, and 1.4 s for 45,000 tensors; 14.2 and 15.5 s are published.
    """

    name: ClassVar[str] = "packed-broadcast"
    help: ClassVar[str] = "trainers gather, then one broadcast over all NICs of a node: NeMo-RL's default"
    colocated: ClassVar[bool] = False

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return gather and broadcast, and a loader that sees every tensor."""
        ports = min(hardware.ranks_per_node, setting.train_gpus, setting.engine_gpus)
        broadcast = setting.weights_bytes / (COLLECTIVE_SHARE * ports * hardware.rdma_gb_per_s * 1e9)
        return {
            "gather": setting.gather_s(hardware, setting.weights_bytes),
            "transfer": broadcast,
            "loader": LOADER_TENSOR_S * setting.num_tensors,
        }


class PairedRdma:
    """All trainers gather whole tensors, and each engine GPU reads its slices from one of them (NeMo-RL's NIXL).

    Without a constant of its own. Example: DeepSeek-V3 into engines of 32 GPUs: 7.2 s of gather, 42 GB over a GPU's own
    NIC in 1.0 s, 1.4 s of loader; 9.3 s are published.
    """

    name: ClassVar[str] = "paired-rdma"
    help: ClassVar[str] = "trainers gather, each engine GPU reads its slices from one: NeMo-RL's NIXL"
    colocated: ClassVar[bool] = False

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return gather, what enters by a GPU's own NIC, and a loader that sees a slice of every tensor."""
        entering = setting.weights_bytes / setting.engine_size / (hardware.rdma_gb_per_s * 1e9)
        return {
            "gather": setting.gather_s(hardware, setting.weights_bytes),
            "transfer": entering,
            "loader": LOADER_TENSOR_S * setting.num_tensors,
        }


class GatheredIpc:
    """All trainers gather whole tensors and hand them to the engine on their own GPU (verl, slime, NeMo-RL colocated).

    Without a constant of its own, and without a published sync that is not mostly quantization.
    """

    name: ClassVar[str] = "gathered-ipc"
    help: ClassVar[str] = "shared GPUs, whole tensors gathered on all trainers: verl, slime, NeMo-RL"
    colocated: ClassVar[bool] = True

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the gather, and a loader that sees every tensor."""
        gather = setting.gather_s(hardware, setting.weights_bytes)
        return {"gather": gather, "loader": LOADER_TENSOR_S * setting.num_tensors}


class RankLocalIpc:
    """Engines take experts from the trainer on their own GPU; dense weights alone are gathered (slime's local path).

    Only where trainer and engine place experts alike. Without a constant of its own or a published sync.
    """

    name: ClassVar[str] = "rank-local-ipc"
    help: ClassVar[str] = "shared GPUs, experts from the trainer on the same GPU: slime's rank-local path"
    colocated: ClassVar[bool] = True

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the gather of dense weights, and a loader that sees a GPU's own tensors."""
        gather = setting.gather_s(hardware, setting.dense_bytes)
        return {"gather": gather, "loader": LOADER_TENSOR_S * setting.num_tensors / setting.engine_size}


class Requests:
    """As `Broadcast`, but engines take tensors by many small requests (verl's `nccl` into SGLang's server)."""

    name: ClassVar[str] = "requests"
    help: ClassVar[str] = "whole tensors by many requests: verl's nccl into SGLang's server"
    colocated: ClassVar[bool] = False
    # Seconds per tensor; fitted on two published syncs of one model.
    tensor_s: ClassVar[float] = 1.53e-3

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the transfer, which the requests' time covers."""
        return {"transfer": self.tensor_s * setting.num_tensors}


class Delta:
    """Trainers compare what they hold with what was sent, and send what changed (verl's `delta_sharded`)."""

    name: ClassVar[str] = "delta"
    help: ClassVar[str] = "what changed alone: verl's delta_sharded"
    colocated: ClassVar[bool] = False
    # Seconds per tensor that a trainer holds; fitted on two published syncs of one model.
    held_tensor_s: ClassVar[float] = 2.5e-3

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the trainers' time."""
        return {"transfer": self.held_tensor_s * setting.num_tensors / setting.trainer_ep_size}


class _OverBound:
    """A transport between many ranks: a multiple of the bound."""

    over_bound: ClassVar[float]
    colocated: ClassVar[bool] = False

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the transfer; slices are written in place."""
        return {"transfer": self.over_bound * setting.bound_s(hardware)}


class Reshard(_OverBound):
    """NCCL between all ranks, slices written in place (NeMo-RL's m-to-n reshard)."""

    name: ClassVar[str] = "reshard"
    help: ClassVar[str] = "NCCL between all ranks, in place: NeMo-RL's m-to-n"
    # Fitted on four published syncs of three models: 2.6 to 3.4.
    over_bound: ClassVar[float] = 3.1


class ReshardInPython(_OverBound):
    """NeMo-RL's reshard without its compiled part."""

    name: ClassVar[str] = "reshard-python"
    help: ClassVar[str] = "NeMo-RL's reshard without its compiled part"
    # One published sync.
    over_bound: ClassVar[float] = 7.5


class Rdma(_OverBound):
    """Engines read trainers' memory (miles' point to point)."""

    name: ClassVar[str] = "rdma"
    help: ClassVar[str] = "engines read trainers' memory: miles' point to point"
    # One published sync.
    over_bound: ClassVar[float] = 11.5


class ExpertBlocks(_OverBound):
    """A group per block of experts (marin)."""

    name: ClassVar[str] = "expert-blocks"
    help: ClassVar[str] = "a group per block of experts: marin"
    # One published sync.
    over_bound: ClassVar[float] = 1.3


class Planned:
    """`moe_rl.sync`: its schedule over the bound, and a loader that sees the experts of its own slots alone."""

    name: ClassVar[str] = "planned"
    help: ClassVar[str] = "moe_rl.sync; computed from its schedules, not yet measured on a GPU"
    colocated: ClassVar[bool] = False

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return transfer by the schedule, and the loader's time for a rank's share of the tensors."""
        transfer = PLANNED_OVER_BOUND * setting.bound_s(hardware)
        return {"transfer": transfer, "loader": LOADER_TENSOR_S * setting.num_tensors / setting.engine_size}


TRANSPORTS: Registry[SyncTransport] = Registry(
    "weight-sync transport",
    [
        Broadcast(), PackedBroadcast(), PairedRdma(), Requests(), Delta(), Reshard(), ReshardInPython(), Rdma(),
        ExpertBlocks(), GatheredIpc(), RankLocalIpc(), Planned(),
    ],
)  # fmt: skip


def price_sync(transport: str, setting: SyncSetting, hardware: HardwareSpec, *, control_s: float = 0.0) -> SyncPrice:
    """Return what a sync takes by a transport of `TRANSPORTS`, and beside it `control_s` of pause, drain and metadata.

    Raises `InvalidInputError` for another name.
    """
    by_name = TRANSPORTS[transport]
    parts = {**by_name.parts_s(setting, hardware), "control": control_s}
    return SyncPrice(parts_s=parts, bound_s=0.0 if by_name.colocated else setting.bound_s(hardware))


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTimeline:
    """A schedule as data: how many steps of one atom each, between nodes and in the fullest rank's node."""

    num_steps: int
    atom_bytes: int
    inside_bytes: int = 0
    """Bytes that the busiest rank hands on inside its node."""


def timeline_seconds(timeline: SyncTimeline, hardware: HardwareSpec) -> float:
    """Return the seconds of a schedule: its steps over a NIC, or what its busiest rank hands on by NVLink."""
    by_nic = timeline.num_steps * timeline.atom_bytes / (hardware.rdma_gb_per_s * 1e9)
    nvlink_s = timeline.inside_bytes / (hardware.nvlink_p2p_gb_per_s * 1e9)
    return max(by_nic, nvlink_s)
