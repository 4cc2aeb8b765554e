"""How the training step is run: the options that decide its time beside model, cluster and routing."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import REPLICA_CONTENTION, LayerCostParams, SoftwareCosts, layer_cost_params
from moe_rl.core.errors import (
    require,
    require_known,
    require_least,
    require_shares,
    require_word_or_none,
    require_words,
)
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.step_words import CudaGraph, Dispatcher, Recompute
from moe_rl.core.topology import ClusterTopology

DISPATCHERS: tuple[Dispatcher, ...] = tuple(Dispatcher)
PRECISIONS = ("bf16", "fp8")
RECOMPUTE: tuple[Recompute, ...] = tuple(Recompute)
# Single modules that backward computes again (`--recompute-modules`).
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act")
# Modules whose kept inputs wait in host memory (`--fine-grained-activation-offloading --offload-modules`).
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
CUDA_GRAPHS: tuple[CudaGraph, ...] = tuple(CudaGraph)

# How context-parallel ranks exchange keys and values: a ring, an exchange of heads, both, or all at once.
CP_COMM_TYPES = ("p2p", "a2a", "a2a+p2p", "allgather")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """Options of a training step, in Megatron's words."""

    dispatcher: Dispatcher = Dispatcher.DEEPEP
    recompute: Recompute = Recompute.NONE
    pipeline_model_parallel_size: int = 1
    """S, pipeline stages; layers are split evenly."""
    num_virtual_stages: int = 1
    """V, model chunks per pipeline stage (interleaved 1F1B)."""
    tensor_model_parallel_size: int = 1
    """TP, with sequence parallelism."""
    context_parallel_size: int = 1
    """CP, ranks that share each sequence."""
    cp_comm_type: str | None = None
    """One of `CP_COMM_TYPES` (`--cp-comm-type`); None: as a tuned run would choose, see
    `base_time.default_cp_comm_type`."""
    precision: str = "bf16"
    """Of the matrix products; attention's core stays BF16."""
    cuda_graph: CudaGraph = CudaGraph.NONE
    fused_grouped_mlp: bool = False
    """True: one kernel computes an expert's products, activation and casts (`--use-transformer-engine-op-fuser`)."""
    recompute_modules: tuple[str, ...] = ()
    """Any of `RECOMPUTE_MODULES`, beside `recompute`."""
    offload_modules: tuple[str, ...] = ()
    """Any of `OFFLOAD_MODULES`; their copies to and from the host are taken as hidden."""
    optimizer_offload_fraction: float = 0.0
    """Share of the optimizer's state and step on the host's CPUs (`--optimizer-cpu-offload`)."""
    mtp_num_layers: int = 0
    """Layers of multi-token prediction: each is one more MoE layer and output layer, on the last pipeline stage."""
    grad_reduce_in_fp32: bool = True
    """False: gradients are kept and reduced in BF16."""
    bf16_moments: bool = False
    """True: both Adam moments in BF16 (`--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16`)."""
    use_megatron_fsdp: bool = False
    """True: weights and gradients, too, are shared out over data-parallel ranks."""
    forward_only: bool = False
    """True: a log-probability pass instead of an update."""
    log_prob_passes: int = 0
    """Forward-only passes over the same micro-batches that the step holds beside its update."""
    overlap_all_to_all: bool = False
    """True: forward of one micro-batch runs beside backward of another (`--overlap-moe-expert-parallel-comm`)."""
    overlap_shared_experts: bool = False
    """True: shared experts run beside the all-to-all (`--moe-shared-expert-overlap`)."""
    sequence_length: int | None = None
    """Price attention as if every sequence had this length; None: the batch's own lengths."""
    packed_sequences: bool = False
    """True: a micro-batch is one row of sequences without padding. Only models with attention sinks are priced by it,
    see `base_time.attends_to_rows`."""
    reorder_interval: int = 1
    """Steps that share the cost of moving homes."""
    replica_exposed: float = REPLICA_CONTENTION
    """Share of replica traffic that costs time although other work runs beside it."""
    overlap_grad_reduce: bool = True
    """True: gradients are reduced beside the last micro-batch's backward (`--overlap-grad-reduce`)."""
    overlap_param_gather: bool = True
    """True: weights are gathered beside the first micro-batch's forward (`--overlap-param-gather`)."""
    software: SoftwareCosts = field(default_factory=SoftwareCosts)
    perturbation: Mapping[str, float] = field(default_factory=dict)
    """Factors on fields of `HardwareSpec`, for sensitivity studies."""

    def __post_init__(self) -> None:
        require_words(
            self, dispatcher=DISPATCHERS, recompute=RECOMPUTE, precision=PRECISIONS, cuda_graph=CUDA_GRAPHS,
            recompute_modules=RECOMPUTE_MODULES, offload_modules=OFFLOAD_MODULES,
        )  # fmt: skip
        # A file has the words.
        object.__setattr__(self, "dispatcher", Dispatcher(self.dispatcher))
        object.__setattr__(self, "recompute", Recompute(self.recompute))
        object.__setattr__(self, "cuda_graph", CudaGraph(self.cuda_graph))
        require_word_or_none(self, "cp_comm_type", CP_COMM_TYPES)
        require_shares(self, "optimizer_offload_fraction", "replica_exposed")
        require_least(
            self, pipeline_model_parallel_size=1, num_virtual_stages=1, tensor_model_parallel_size=1,
            context_parallel_size=1, reorder_interval=1, sequence_length=1, mtp_num_layers=0, log_prob_passes=0,
        )  # fmt: skip
        require(
            not self.cuda_graph.spares_all_launches or self.dispatcher.can_be_captured,
            "cuda_graph 'full_iteration' does not work with the alltoall dispatcher, which reads token counts on "
            "the host in every layer.",
        )
        require(
            not self.fused_grouped_mlp or self.precision == "fp8",
            f"fused_grouped_mlp needs precision 'fp8', got {self.precision!r}.",
        )
        require(
            self.num_virtual_stages == 1 or self.pipeline_model_parallel_size > 1,
            f"num_virtual_stages ({self.num_virtual_stages}) needs a pipeline_model_parallel_size above 1.",
        )
        require(
            not (self.forward_only and self.log_prob_passes),
            f"log_prob_passes ({self.log_prob_passes}) are passes in addition to the update, but forward_only means "
            "that there is no update.",
        )

    @property
    def forward_passes(self) -> int:
        """Forward passes over a layer's attention part in the main pass."""
        if self.recompute.repeats_layer and not self.forward_only:
            return 2
        return 1

    def perturbed(self, topology: ClusterTopology) -> ClusterTopology:
        """Return the topology with this setting's factors on its hardware."""
        if not self.perturbation:
            return topology
        names = topology.hardware.__slots__
        for name in self.perturbation:
            require_known(name, names, f"perturbation: {name!r} is not a constant of the hardware.")
        return replace(topology, hardware=topology.hardware.perturbed(**self.perturbation))

    def layer_cost_params(self, model: MoeModelSpec, topology: ClusterTopology) -> LayerCostParams:
        """Return the constants of one MoE layer in the main pass, as if no other work hid replicas across nodes."""
        return layer_cost_params(
            model,
            self.perturbed(topology),
            hierarchical=not self.dispatcher.sends_rows,
            recompute_moe=self.recompute.repeats_experts,
            forward_only=self.forward_only,
            replica_exposed=self.replica_exposed,
            fp8=self.precision == "fp8",
            fused_mlp=self.fused_grouped_mlp,
            activation_again="moe_act" in self.recompute_modules,
            software=self.software,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A model that is trained on a cluster in some setting."""

    model: MoeModelSpec
    topology: ClusterTopology
    setting: StepSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep(TrainingRun):
    """One step to price: a batch of the run, laid out over ranks."""

    load: StepLoad
    """Of the step under `layout`."""
    layout: BatchLayout
    lengths: NDArray[np.int64]
    """[S] tokens of the step's sequences."""
