"""What a weight sync takes, by the name of its transport, beside the bound that no transport beats.

The bound: each engine's ranks must take in the engine's weights once over their own NICs (once per node, where several
engines or ranks of a node share what came), and the trainers must send all weights once. A transport is a price on top
of it, with at most one constant of `FITTED`, fitted on published syncs (`python benchmarks/weight_syncs.py`), and the
loader's time per tensor is a line of its own.

Example: Qwen3-30B, 61 GB, 16 trainers and 16 engine ranks on H100. Every engine node takes in 61 GB over eight NICs of
43 GB/s: the bound is .18 s. NeMo-RL#2808, which resharded every tensor, is published with .51 to .67 s: 528 calls of
32 ranks at 27 us a rank are another .46 s.
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
    "gather": "bytes over a trainer node's links, at the bandwidth share that published broadcasts reach",
    "transfer": "bytes over NICs, or a time fitted for this transport",
    "calls": "host time of one call per tensor, fitted on published reshards",
    "loader": "30 us of Python per tensor, measured on a CPU core",
    "control": "pause, drain and metadata, set by --weight-sync-control-seconds; published values are 0.2 to 5 s",
}
# The constants of transports, at most one for each, fitted on the rows "fitted" of
# tests/simulators/weight_syncs.yaml. `python benchmarks/weight_syncs.py` fits them again, and prints between which
# values single rows leave each of them.
FITTED = {
    # Of a NIC's rate, what a broadcast of whole tensors reaches, gathering included. Gathers and broadcasts over
    # several NICs are taken to reach the same.
    "collective_share": 0.52,
    # Seconds by which a call of NCCL's reshard takes longer per rank of its group.
    "reshard_rank_s": 27e-6,
    # Seconds of a call of NeMo-RL's reshard in Python.
    "python_call_s": 6.5e-3,
    # Weights of a pipeline stage that a trainer gathers, cuts on the CPU and writes, GB per second.
    "staged_gb_per_s": 30.0,
    # Seconds of a request per tensor.
    "request_tensor_s": 1.51e-3,
    # Seconds per tensor that a trainer holds and compares.
    "compared_tensor_s": 2.4e-3,
    # Seconds over the bound.
    "blocks_over_bound": 1.3,
}
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
    trainer_pp_size: int = 1
    """Stages of the trainer's pipeline."""
    dense_bytes: float = 0.0
    """Of `weights_bytes`, those of no routed expert; 0 also if unknown."""
    dense_tensors: float = 0.0
    """Of `num_tensors`, those of no routed expert."""
    expert_stacks: float = 0.0
    """Expert tensors if the experts of a layer count as one: gate, up and down of every MoE layer."""
    gathered_bytes: float = 0.0
    """The weights as trainers hold them, if engines get them in fewer bits; 0: `weights_bytes`."""

    def __post_init__(self) -> None:
        require_positive(self, "weights_bytes")
        require_least(
            self, num_tensors=0, train_gpus=1, engine_gpus=1, engine_size=1, trainer_ep_size=1, trainer_pp_size=1,
            dense_bytes=0, dense_tensors=0, expert_stacks=0, gathered_bytes=0,
        )  # fmt: skip
        require(
            self.engine_gpus % self.engine_size == 0,
            f"engine_size ({self.engine_size}) does not divide the number of rollout GPUs ({self.engine_gpus}).",
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
        trainer_pp_size: int = 1,
        bytes_per_param: float = BF16_BYTES,
    ) -> "SyncSetting":
        """Return the sync of all weights of a model, which trainers hold in BF16."""
        experts = float(model.num_moe_layers * model.num_experts)
        dense = dense_params(model) + 2.0 * model.hidden_size * model.vocab_size
        params = dense + experts * model.expert_params
        dense_tensors = float(DENSE_TENSORS_PER_LAYER * model.num_layers)
        return cls(
            weights_bytes=bytes_per_param * params,
            gathered_bytes=BF16_BYTES * params,
            dense_bytes=bytes_per_param * dense,
            num_tensors=TENSORS_PER_EXPERT * experts + dense_tensors,
            dense_tensors=dense_tensors,
            expert_stacks=float(TENSORS_PER_EXPERT * model.num_moe_layers),
            train_gpus=train_gpus,
            engine_gpus=engine_gpus,
            engine_size=engine_size,
            trainer_ep_size=trainer_ep_size,
            trainer_pp_size=trainer_pp_size,
        )

    @property
    def stage_bytes(self) -> float:
        """Bytes of a pipeline stage's weights, as trainers hold them."""
        return (self.gathered_bytes or self.weights_bytes) / self.trainer_pp_size

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
        NIC. Example: DeepSeek-V3, 1342 GB, eight NICs of 43 GB/s at 0.52 of their rate: 7.5 s.
        """
        in_domain = self.train_gpus <= hardware.ranks_per_node
        link = hardware.nvlink_p2p_gb_per_s if in_domain else hardware.ranks_per_node * hardware.rdma_gb_per_s
        return weights_bytes / (FITTED["collective_share"] * link * 1e9)

    def packed_s(self, hardware: HardwareSpec, weights_bytes: float) -> float:
        """Return the seconds of a broadcast of so many bytes that uses all NICs of a node."""
        ports = min(hardware.ranks_per_node, self.train_gpus, self.engine_gpus)
        return weights_bytes / (FITTED["collective_share"] * ports * hardware.rdma_gb_per_s * 1e9)


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
    constant: ClassVar[str]
    """The entry of `FITTED` that was fitted on its published syncs; "": none."""
    num_fitted: ClassVar[int]
    """On how many published syncs; two for a constant that two transports share are the same two."""

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the seconds of each part."""


class Broadcast:
    """One rank gathers whole tensors and sends them to all engines, bucket by bucket (verl's `nccl` into vLLM)."""

    name: ClassVar[str] = "broadcast"
    help: ClassVar[str] = "one trainer sends whole tensors in buckets: verl's nccl into vLLM"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = "collective_share"
    num_fitted: ClassVar[int] = 2

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return transfer over one NIC, and a loader that sees every tensor."""
        transfer = setting.weights_bytes / (FITTED["collective_share"] * hardware.rdma_gb_per_s * 1e9)
        return {"transfer": transfer, "loader": LOADER_TENSOR_S * setting.num_tensors}


class StageBroadcast:
    """The first rank of every pipeline stage gathers its stage and sends it, one after the other (slime, miles).

    With one stage it is `Broadcast`: 1 / 0.52 of the bytes over a NIC are the bytes once, and 0.92 times for the
    gather. Stages gather side by side, and their turns of sending share the engines' NICs.

    Example: 61 GB, 43 GB/s. One stage: 1.42 s to send, 1.31 s to gather; four stages: 1.42 s and 0.33 s.
    """

    name: ClassVar[str] = "stage-broadcast"
    help: ClassVar[str] = "each pipeline stage gathers and sends its tensors in turn: slime, miles"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = "collective_share"
    num_fitted: ClassVar[int] = 2

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return a stage's gather, all bytes over one NIC, and a loader that sees every tensor."""
        nic = hardware.rdma_gb_per_s * 1e9
        gather = (1 / FITTED["collective_share"] - 1) * setting.stage_bytes / nic
        return {
            "gather": gather,
            "transfer": setting.weights_bytes / nic,
            "loader": LOADER_TENSOR_S * setting.num_tensors,
        }


class PackedBroadcast:
    """All trainers gather whole tensors, then one broadcast over a group of all trainers and engines (NeMo-RL's
    default between different GPUs).

    The group has all GPUs of the sender's node in it, so that NCCL's rings use all NICs of a node; `Broadcast`'s group
    has one trainer. Gather and broadcast use the same NICs, so they are taken one after the other. Without a constant
    of its own. Example: DeepSeek-V3, 1342 GB: 7.5 s twice, and 1.4 s for 45,000 tensors; 14.2 and 15.5 s are published.
    """

    name: ClassVar[str] = "packed-broadcast"
    help: ClassVar[str] = "trainers gather, then one broadcast over all NICs of a node: NeMo-RL's default"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = ""
    num_fitted: ClassVar[int] = 0

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return gather and broadcast, and a loader that sees every tensor."""
        return {
            "gather": setting.gather_s(hardware, setting.weights_bytes),
            "transfer": setting.packed_s(hardware, setting.weights_bytes),
            "loader": LOADER_TENSOR_S * setting.num_tensors,
        }


class PairedRdma:
    """All trainers gather whole tensors, and each engine GPU reads its slices from one of them (NeMo-RL's NIXL).

    Without a constant of its own. Example: DeepSeek-V3 into engines of 32 GPUs: 7.5 s of gather, 42 GB over a GPU's own
    NIC in 1.0 s, 1.4 s of loader; 9.3 s are published.
    """

    name: ClassVar[str] = "paired-rdma"
    help: ClassVar[str] = "trainers gather, each engine GPU reads its slices from one: NeMo-RL's NIXL"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = ""
    num_fitted: ClassVar[int] = 0

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
    constant: ClassVar[str] = ""
    num_fitted: ClassVar[int] = 0

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
    constant: ClassVar[str] = ""
    num_fitted: ClassVar[int] = 0

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the gather of dense weights, and a loader that sees a GPU's own tensors."""
        gather = setting.gather_s(hardware, setting.dense_bytes)
        return {"gather": gather, "loader": LOADER_TENSOR_S * setting.num_tensors / setting.engine_size}


class Requests:
    """As `Broadcast`, but engines take tensors by many small requests (verl's `nccl` into SGLang's server)."""

    name: ClassVar[str] = "requests"
    help: ClassVar[str] = "whole tensors in many requests: verl's nccl into SGLang's server"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = "request_tensor_s"
    num_fitted: ClassVar[int] = 2

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the transfer, which the requests' time covers."""
        return {"transfer": FITTED["request_tensor_s"] * setting.num_tensors}


class Delta:
    """Trainers compare what they hold with what was sent, and send what changed (verl's `delta_sharded`)."""

    name: ClassVar[str] = "delta"
    help: ClassVar[str] = "only the changed weights: verl's delta_sharded"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = "compared_tensor_s"
    num_fitted: ClassVar[int] = 2

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the trainers' time."""
        return {"transfer": FITTED["compared_tensor_s"] * setting.num_tensors / setting.trainer_ep_size}


class ReshardAll:
    """NCCL's reshard of every tensor, in place (NeMo-RL#2808, which was not merged).

    Every tensor is a call in which a stage's trainers and all engine ranks take part; the experts of a layer are
    stacked into one tensor per matrix. A call takes longer the more ranks its group has.

    Example: DeepSeek-V3 on 256 trainers of 16 stages and 256 engine ranks: the bound of 0.98 s, and 662 calls of
    16 + 256 ranks at 27 us, 4.9 s.
    """

    name: ClassVar[str] = "reshard-all"
    help: ClassVar[str] = "NCCL's reshard of every tensor: NeMo-RL#2808, not merged"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = "reshard_rank_s"
    num_fitted: ClassVar[int] = 4

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the bound, and a call per tensor."""
        calls_s = _reshard_calls_s(setting, setting.expert_stacks + setting.dense_tensors)
        return {"transfer": setting.bound_s(hardware), "calls": calls_s}


class Reshard:
    """NCCL's reshard of experts, in place; a packed broadcast of everything else (NeMo-RL's `nccl_reshard`).

    As `ReshardAll` without calls for small tensors, and without a constant of its own: DeepSeek-V3 makes 174 calls,
    1.3 s, and gathers and broadcasts 34 GB, .4 s.
    """

    name: ClassVar[str] = "reshard"
    help: ClassVar[str] = "NCCL's reshard of experts: NeMo-RL's nccl_reshard (#2971) where nccl.m2n is installed"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = ""
    num_fitted: ClassVar[int] = 0

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the bound and a call per stack of experts, and gather, broadcast and loader of the rest."""
        calls_s = _reshard_calls_s(setting, setting.expert_stacks)
        return {
            "gather": setting.gather_s(hardware, setting.dense_bytes),
            "transfer": setting.bound_s(hardware) + setting.packed_s(hardware, setting.dense_bytes),
            "calls": calls_s,
            "loader": LOADER_TENSOR_S * setting.dense_tensors,
        }


def _reshard_calls_s(setting: SyncSetting, calls: float) -> float:
    ranks = setting.train_gpus / setting.trainer_pp_size + setting.engine_gpus
    return FITTED["reshard_rank_s"] * calls * ranks


class ReshardInPython:
    """NeMo-RL's `nccl_reshard` where NCCL's reshard is not installed: its own send, receive and all-gather.

    Every engine GPU takes in its slices over its own NIC, a stripe from trainers and the others from engines that hold
    the same. Everything but experts is broadcast as by `Reshard`.

    Example: Qwen3-30B into TP 2: 29 GB over a NIC, .68 s, 144 calls of 6.5 ms, .94 s, and 3 GB of the rest.
    """

    name: ClassVar[str] = "reshard-python"
    help: ClassVar[str] = "NeMo-RL's nccl_reshard without nccl.m2n, in Python: its documented times"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = "python_call_s"
    num_fitted: ClassVar[int] = 1

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return what enters by a GPU's own NIC, a call per stack of experts, and the rest."""
        experts_bytes = setting.weights_bytes - setting.dense_bytes
        entering = experts_bytes / setting.engine_size / (hardware.rdma_gb_per_s * 1e9)
        return {
            "gather": setting.gather_s(hardware, setting.dense_bytes),
            "transfer": entering + setting.packed_s(hardware, setting.dense_bytes),
            "calls": FITTED["python_call_s"] * setting.expert_stacks,
            "loader": LOADER_TENSOR_S * setting.dense_tensors,
        }


class Rdma:
    """Every trainer gathers its stage, cuts it to an engine GPU's slices on the CPU and writes those (miles' p2p).

    Stages work side by side. Example: Qwen3-235B, 470 GB in four stages at 30 GB/s: 3.9 s; 3.2 s are published.
    """

    name: ClassVar[str] = "rdma"
    help: ClassVar[str] = "trainers gather, cut slices on the CPU and write into engines: miles' p2p"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = "staged_gb_per_s"
    num_fitted: ClassVar[int] = 1

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the time of a stage, or of the bytes over a GPU's own NIC if that is longer."""
        entering = setting.weights_bytes / setting.engine_size / (hardware.rdma_gb_per_s * 1e9)
        return {"transfer": max(setting.stage_bytes / (FITTED["staged_gb_per_s"] * 1e9), entering)}


class ExpertBlocks:
    """A group per block of experts (marin): a multiple of the bound."""

    name: ClassVar[str] = "expert-blocks"
    help: ClassVar[str] = "one process group per block of experts: marin"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = "blocks_over_bound"
    num_fitted: ClassVar[int] = 1

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return the transfer; slices are written in place."""
        return {"transfer": FITTED["blocks_over_bound"] * setting.bound_s(hardware)}


class Planned:
    """`moe_rl.sync`: its schedule over the bound, and a loader that sees the experts of its own slots alone."""

    name: ClassVar[str] = "planned"
    help: ClassVar[str] = "moe_rl.sync; computed from its schedules, not yet measured on a GPU"
    colocated: ClassVar[bool] = False
    constant: ClassVar[str] = ""
    num_fitted: ClassVar[int] = 0

    def parts_s(self, setting: SyncSetting, hardware: HardwareSpec) -> dict[str, float]:
        """Return transfer by the schedule, and the loader's time for a rank's share of the tensors."""
        transfer = PLANNED_OVER_BOUND * setting.bound_s(hardware)
        return {"transfer": transfer, "loader": LOADER_TENSOR_S * setting.num_tensors / setting.engine_size}


TRANSPORTS: Registry[SyncTransport] = Registry(
    "weight-sync transport",
    [
        Broadcast(), StageBroadcast(), PackedBroadcast(), PairedRdma(), Requests(), Delta(), Reshard(), ReshardAll(),
        ReshardInPython(), Rdma(), ExpertBlocks(), GatheredIpc(), RankLocalIpc(), Planned(),
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
