"""How the training step is run: what beside model, cluster and routing decides its time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moe_rl.core.cost import LayerCostParams, layer_cost_params
from moe_rl.core.errors import nearest_name, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology

DISPATCHERS = ("deepep", "hybridep", "alltoall")
"""deepep and hybridep: one copy per token and node, then per rank (Megatron's `flex`); alltoall: one copy per token and
expert. HybridEP is priced as DeepEP: its published bandwidths are what DeepEP's constants were fitted to."""
PRECISIONS = ("bf16", "fp8")
RECOMPUTE = ("none", "moe", "full")
"""What backward computes again: nothing, the MoE forward (with its all-to-all), or the whole layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """Options of a training step, in Megatron's words."""

    dispatcher: str = "deepep"
    recompute: str = "none"
    pipeline_model_parallel_size: int = 1
    """S, pipeline stages; layers are split evenly."""
    num_virtual_stages: int = 1
    """V, model chunks per pipeline stage (interleaved 1F1B)."""
    tensor_model_parallel_size: int = 1
    """TP, with sequence parallelism."""
    context_parallel_size: int = 1
    """CP; the ring of keys and values is taken as hidden under attention, so it costs nothing by itself."""
    precision: str = "bf16"
    """Of the matrix products; attention's core stays BF16."""
    fp8_dispatch: bool = False
    """True: forward's dispatch travels in FP8, as DeepEP offers and Megatron does not ask for."""
    forward_only: bool = False
    """True: a log-probability pass instead of an update."""
    log_prob_passes: int = 0
    """Forward-only passes over the same micro-batches that the step holds beside its update."""
    overlap_all_to_all: bool = False
    """True: forward of one micro-batch runs beside backward of another (`--overlap-moe-expert-parallel-comm`)."""
    overlap_left: float = 0.5
    """Share of the shorter of computation and communication that overlap does not hide. 0.5: Megatron's 1F1B overlap
    gained 245 -> 276 TFLOP/s on Qwen3-235B EP32; DualPipe's published trace leaves 0.1."""
    overlap_shared_experts: bool = False
    """True: shared experts run beside the all-to-all (`--moe-shared-expert-overlap`)."""
    sequence_length: int | None = None
    """Price attention as if every sequence had this length; None: the batch's own lengths."""
    a2a_congestion: float = 0.0
    """c: an all-to-all takes 1 + c (max / mean rank rows - 1) times its bandwidth's time. Incast under skew is not in
    the bandwidths, its size is not published: measure it before setting this. Planners do not know of it."""
    replica_exposed: float = 0.3
    """Share of replica traffic that does not hide under other work; 0.3 is an assumption."""
    perturbation: Mapping[str, float] = field(default_factory=dict)
    """Factors on fields of `HardwareSpec`, for sensitivity studies."""

    def __post_init__(self) -> None:
        for name, known in (("dispatcher", DISPATCHERS), ("recompute", RECOMPUTE), ("precision", PRECISIONS)):
            value = getattr(self, name)
            require(value in known, f"{name} {value!r} is unknown.{nearest_name(value, known)}")
        sizes = (
            "pipeline_model_parallel_size",
            "num_virtual_stages",
            "tensor_model_parallel_size",
            "context_parallel_size",
        )
        for name in sizes:
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        require(self.log_prob_passes >= 0, f"log_prob_passes must be at least 0, got {self.log_prob_passes}.")
        require(
            self.num_virtual_stages == 1 or self.pipeline_model_parallel_size > 1,
            f"num_virtual_stages ({self.num_virtual_stages}) needs pipeline_model_parallel_size above 1.",
        )
        require(
            not (self.forward_only and self.log_prob_passes),
            f"log_prob_passes ({self.log_prob_passes}) counts passes beside an update; forward_only has none.",
        )
        require(self.a2a_congestion >= 0.0, f"a2a_congestion must be at least 0, got {self.a2a_congestion}.")
        require(
            self.sequence_length is None or self.sequence_length >= 1,
            f"sequence_length must be at least 1, got {self.sequence_length}.",
        )
        for name in ("replica_exposed", "overlap_left"):
            require(0.0 <= getattr(self, name) <= 1.0, f"{name} must lie in [0, 1], got {getattr(self, name)}.")

    @property
    def forward_passes(self) -> int:
        """Forward passes over a layer's attention part in the main pass."""
        return 2 if self.recompute == "full" and not self.forward_only else 1

    def perturbed(self, topology: ClusterTopology) -> ClusterTopology:
        """Return the topology with this setting's factors on its hardware."""
        known = topology.hardware.__slots__
        for name in self.perturbation:
            require(name in known, f"perturbation: the hardware has no constant {name!r}.{nearest_name(name, known)}")
        return replace(topology, hardware=topology.hardware.perturbed(**self.perturbation))

    def layer_cost_params(
        self, model: MoeModelSpec, topology: ClusterTopology, *, prefetch_hidden_s: float = 0.0
    ) -> LayerCostParams:
        """Return the constants of one MoE layer in the main pass."""
        return layer_cost_params(
            model,
            self.perturbed(topology),
            hierarchical=self.dispatcher != "alltoall",
            recompute_moe=self.recompute != "none",
            forward_only=self.forward_only,
            replica_exposed=self.replica_exposed,
            prefetch_hidden_s=prefetch_hidden_s,
            fp8=self.precision == "fp8",
            fp8_dispatch=self.fp8_dispatch,
        )
