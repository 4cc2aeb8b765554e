"""How a training stack differs from tuned benchmarks: what its host, its graphs and its kernels cost.

`moe_rl/configs/software` holds two kinds by name. `tuned` is what a vendor's own benchmarks run: their published steps
are met with it. `typical` is what other people run: 50 of 52 of their published steps are slower than `tuned` says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

from moe_rl.core.errors import InvalidInputError, require_known, require_least, require_positive
from moe_rl.core.mappings import without
from moe_rl.core.step_words import CudaGraph

TUNED, TYPICAL = "tuned", "typical"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareCosts:
    """Costs of the training software on any cluster, fitted once on published runs (`benchmarks/validate_model`).

    The defaults are those of a vendor's tuned benchmarks; `moe_rl/configs/software` holds them and others by name.
    """

    host: float = 1.0
    """Host time of a layer and an expert, as a multiple of what tuned benchmarks take."""
    partial_graph_share: float = 0.5
    """Share of a layer's host time that CUDA graphs of attention and router leave."""
    host_per_tensor_rank: float = 0.15
    """Growth of a layer's host time with every further tensor-parallel rank."""
    host_fp8: float = 1.07
    """Growth of an expert's host time in FP8: casts and scales are launches, too."""
    host_recompute_ms: float = 0.7
    """Host time of recomputing one module of one layer: the mean over Moonlight's sweep (data/memory_peaks.yaml)."""
    overlap_left: float = 0.259
    """Share of the shorter of computation and all-to-all that overlap of two micro-batches does not hide."""
    overlap_host: float = 0.5
    """Growth of a layer's host time under that overlap, which launches a layer in pieces on two streams. Two steps of
    Qwen3-235B on 64 B200 without graphs became faster without overlap: 17.2 -> 16.0 s in BF16, 20.1 -> 16.9 s in MXFP8
    (NVIDIA-NeMo/Megatron-Bridge pull request 1760)."""
    clamped_activation_bytes: float = 68.1
    """Bytes per expert width and row of gpt-oss's clamped activation with biases, a chain of elementwise kernels: 34 by
    counting megatron-core's, and 28 per hidden element, of which it has as many, for the output's bias."""
    fused_mlp_share: float = 0.6
    """Share of activation and cast bytes that a fused grouped MLP still moves."""
    plan_ms: float = 0.0
    """Time on a layer's way until copies can start, where they are planned at dispatch; 0 where routes are known before
    the step."""
    framework_share: float = 0.63
    """Time that an RL trainer's framework adds to its passes, as a share of them (`benchmarks/fit_rl_step.py`)."""
    everything: float = 1.0
    """Factor on every second of a step: what makes a cluster slower in all that it does."""
    host_adam_gb_per_s: float = 10.4
    """Bytes of parameters and state per second that a rank's share of the host's cores and memory updates: 9.6 s where
    50 GB/s would have given 2 s (THUDM/slime pull request 1139); Adam on more cores is faster."""

    def __post_init__(self) -> None:
        require_least(self, whose="software: ", **{item.name: 0 for item in fields(self)})
        require_positive(self, "host_adam_gb_per_s", "everything", whose="software: ")

    def launched(self, cuda_graph: CudaGraph) -> float:
        """Return the share of a layer's launches that `cuda_graph` leaves.

        Of the launches that graphs of attention and router spare, half are taken as the router's.
        """
        partial = self.partial_graph_share
        left = {
            CudaGraph.NONE: 1.0,
            CudaGraph.ROUTER: (1.0 + partial) / 2.0,
            CudaGraph.PARTIAL: partial,
            CudaGraph.FULL_ITERATION: 0.0,
        }
        return left[cuda_graph]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A kind of training software: its costs, and how far they differ from one such stack to the next."""

    name: str = TUNED
    costs: SoftwareCosts = field(default_factory=SoftwareCosts)
    spreads: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation of a cost's logarithm, by name."""
    sources: Mapping[str, str] = field(default_factory=dict)
    cluster_spread: float = 0.15
    """Share of the spreads of a cluster file that runs with such software show."""
    left_open: float = 0.04
    """Standard deviation of the logarithm of a step that no constant explains: a setting's own."""

    def changed(self, changes: Mapping[str, str]) -> Self:
        """Return the software with costs that a user gives as text; raise for an unknown name or what is no number."""
        if not changes:
            return self
        names, numbers = [item.name for item in fields(SoftwareCosts)], {}
        for name, text in changes.items():
            require_known(name, names, f"--software {name!r} is unknown.")
            try:
                numbers[name] = float(text)
            except ValueError:
                raise InvalidInputError(f"--software {name}={text}: {text!r} is not a number.") from None
        # What a user states is known: it has no spread.
        spreads = without(self.spreads, numbers)
        sources = {**self.sources, **dict.fromkeys(numbers, "--software")}
        return replace(self, costs=replace(self.costs, **numbers), spreads=spreads, sources=sources)
