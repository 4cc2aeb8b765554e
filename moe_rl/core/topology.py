"""Where ranks sit and what connects them.

Megatron numbers the ranks of a pipeline stage with tensor parallelism fastest, then context parallelism, then data
parallelism, and cuts expert-parallel groups from the same numbering. So data-parallel rank d owns the
`slices_per_dp_rank` (TP x CP) consecutive ranks from d * slices on, and rank r is EP rank r % P of EP group r // P.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_least, require_positive, require_shares

MAY_BE_ZERO = (
    "gemm_half_width",
    "flat_rdma_gb_per_s",
    "host_layer_ms",
    "host_expert_ms",
    "step_fixed_s",
)


INFINIBAND = "infiniband"
# Constants that a cluster's network decides, for each kind of dispatcher: a deduplicating kernel's rate, that of NCCL's
# flat all-to-all, and the latency of both.
FABRIC_CONSTANTS = ("rdma_gb_per_s", "flat_rdma_gb_per_s", "inter_node_latency_us")
# Fields of `HardwareSpec` that are no constants.
NO_CONSTANT = ("name", "fabric", "fabric_left_open", "sources", "spreads")
# Sharpness of the turn between proportion and plateau in `HardwareSpec.gemm_share`.
KNEE = 6.0
# Fields that a user's cluster file may leave at their defaults.
MAY_BE_UNKNOWN = (*MAY_BE_ZERO, "gemm_unaligned", "fp8_speedup", "pooled_nics")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """Rates of one GPU and its links, as *achieved* figures; `sources` says where each one comes from."""

    name: str
    fabric: str = INFINIBAND
    """What joins the nodes: `rdma_gb_per_s`, `flat_rdma_gb_per_s` and `inter_node_latency_us` are this network's."""
    fabric_left_open: float = 0.0
    """Standard deviation of the logarithm of a step over this network that no constant explains, beside the
    software's."""
    ranks_per_node: int
    """GPUs in one NVLink domain that an EP group can fill."""
    gemm_tflops: float
    """Grouped GEMM, BF16, large groups."""
    attention_linear_tflops: float
    attention_forward_tflops: float
    attention_backward_tflops: float
    hbm_gb_per_s: float
    """Achievable, not peak."""
    hbm_gib: float
    nvlink_gb_per_s: float
    """Algorithmic all-to-all bandwidth inside a node, per GPU."""
    nvlink_p2p_gb_per_s: float
    """One-way copy between two GPUs of a node."""
    rdma_gb_per_s: float
    """Physical, per NIC; one NIC per GPU."""
    intra_node_latency_us: float
    inter_node_latency_us: float
    gemm_fixed_us: float
    """Fixed cost of one grouped-GEMM MLP call."""
    layer_fixed_forward_ms: float
    """Small kernels of one layer that nothing else prices: router, norms, casts."""
    layer_fixed_backward_ms: float
    a2a_mixing: float = 0.25
    """Share of the shorter of the NVLink and RDMA stages that is not hidden."""
    pooled_nics: int = 0
    """1: under a flat all-to-all a rank sends over all NICs of its node, which NVLink reaches, as on nodes with fewer
    NICs than GPUs; 0: over its own alone."""
    gemm_tile_rows: int = 128
    gemm_half_width: float = 0.0
    """x of the share of its rate that an N x K GEMM reaches: about min(1, N / x) min(1, K / x), see `gemm_share`."""
    gemm_unaligned: float = 1.0
    """Share of that rate where the hidden size is no multiple of a tile's 128."""
    fp8_speedup: float = 1.3
    """FP8 against BF16 GEMMs as achieved, casts apart."""
    flat_rdma_gb_per_s: float = 0.0
    """Per NIC, of a flat all-to-all; 0: `rdma_gb_per_s`, which a deduplicating kernel reaches."""
    host_layer_ms: float = 0.0
    """Host time of one layer and micro-batch, forward and backward, without CUDA graphs and without experts."""
    host_expert_ms: float = 0.0
    """Host time of every local expert beside that: one launch per expert and matrix product."""
    step_fixed_s: float = 0.0
    """Once per step: optimizer launches, gradient norm, exposed gradient reduction and parameter gathering, logging."""
    sources: Mapping[str, str] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation of a constant's logarithm from one such cluster to the next, where its file gives one."""

    def __post_init__(self) -> None:
        whose = f"cluster {self.name!r}: "
        checked_elsewhere = (*NO_CONSTANT, "a2a_mixing", "pooled_nics", *MAY_BE_ZERO)
        require_positive(self, *(name for name in self.__slots__ if name not in checked_elsewhere), whose=whose)
        require_least(self, whose=whose, **dict.fromkeys(MAY_BE_ZERO, 0))
        require_shares(self, "a2a_mixing", "fabric_left_open", whose=whose)
        require(
            self.pooled_nics in (0, 1),
            f"{whose}pooled_nics must be 1 (the GPUs of a node share its network cards) or 0 (each GPU has its "
            f"own), got {self.pooled_nics}.",
        )

    def assumption(self) -> str | None:
        """Return the sentence that stands beside figures where most constants are assumed; None where few are."""
        # More than half: a cluster file with a few guesses is the normal case and needs no warning.
        assumed = sum(source.startswith("assumed") for source in self.sources.values())
        if 2 * assumed <= len(self.sources):
            return None
        return (
            f"cluster {self.name}: {assumed} of {len(self.sources)} constants are assumed rather than "
            "measured, so predicted seconds are rough. Run `moe-rl calibrate` with a recording from this "
            "cluster."
        )

    def gemm_share(self, columns: float, depth: float) -> float:
        """Return the share of a GEMM rate that a product with N = `columns` and K = `depth` reaches.

        Below the half width the work per byte, and so the rate, falls in proportion; far above it nothing is lost.
        """
        # A smooth minimum of 1 and width / half width: at the half width itself the share is 2^(-1/6) = 0.89.
        share = 1.0
        for width in (columns, depth):
            share *= (1.0 + (self.gemm_half_width / width) ** KNEE) ** (-1.0 / KNEE)
        # gpt-oss: hidden size 2,880 = 22.5 tiles of 128, so products over it end in half a tile.
        return share if depth % 128 == 0 else share * self.gemm_unaligned

    def perturbed(self, **factors: float) -> Self:
        """Return a copy with the named rates multiplied, for sensitivity studies."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTopology:
    """EP groups on nodes: P ranks per group, `ranks_per_node` of them per node, G groups side by side."""

    hardware: HardwareSpec
    ep_size: int
    """P, ranks of one EP group."""
    num_ep_groups: int = 1
    """G, EP groups that hold the same experts (expert data parallelism)."""
    slices_per_dp_rank: int = 1
    """TP x CP: ranks that share the sequences of one data-parallel rank."""
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        require_least(self, ep_size=1, num_ep_groups=1, slices_per_dp_rank=1, ranks_per_node=1)
        fills_nodes = self.ep_size <= self.ranks_per_node or self.ep_size % self.ranks_per_node == 0
        require(
            fills_nodes,
            f"ep_size ({self.ep_size}) must be at most ranks_per_node ({self.ranks_per_node}) or a multiple of "
            "ranks_per_node, because an EP group must fit into one node or fill whole nodes.",
        )
        require(
            self.num_ranks % self.slices_per_dp_rank == 0,
            f"TP x CP ({self.slices_per_dp_rank}) does not divide the number of ranks in all EP groups "
            f"({self.num_ranks}).",
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of all EP groups together."""
        return self.ep_size * self.num_ep_groups

    @property
    def num_dp_ranks(self) -> int:
        """D, data-parallel ranks that feed the EP groups."""
        return self.num_ranks // self.slices_per_dp_rank

    @property
    def num_nodes(self) -> int:
        """N, nodes that one EP group spans."""
        return max(1, self.ep_size // self.ranks_per_node)

    @property
    def ranks_per_domain(self) -> int:
        """Ranks of one EP group inside one node: the domain in which replicas travel over NVLink."""
        return self.ep_size // self.num_nodes

    @property
    def node_of_rank(self) -> NDArray[np.int64]:
        """[P] node index of every EP rank."""
        return np.arange(self.ep_size) // self.ranks_per_domain

    def experts_per_rank(self, num_experts: int) -> int:
        """Return E / P home experts per rank; raise if P does not divide E."""
        require(
            num_experts % self.ep_size == 0,
            f"the expert-parallel size ({self.ep_size}) does not divide the number of experts ({num_experts}).",
        )
        return num_experts // self.ep_size

    def source_rank(
        self, dp_rank: NDArray[np.int64], slice_index: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (EP group, EP rank) of slice `slice_index` of data-parallel rank `dp_rank`, elementwise."""
        # Megatron numbers TP fastest, then CP, then DP.
        rank = dp_rank * self.slices_per_dp_rank + slice_index
        return rank // self.ep_size, rank % self.ep_size
