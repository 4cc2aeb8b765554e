"""The price of one MoE layer of one micro-batch, for a given destination of its rows.

One owner of the formulas: planners weigh moves with them, simulators compose steps of them, and the C++ core repeats
them to 1e-9. Everything here is per layer and micro-batch; arrays broadcast over leading axes, the last axis is ranks
(P) or nodes (N). All arguments are counts and all results seconds.

Forward of a layer: attention and the like, dispatch all-to-all, grouped GEMM, combine all-to-all; backward the reverse
with twice the GEMM work. Each all-to-all is a barrier over the EP group, so a layer costs its *slowest* rank's time.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_positive
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.software import SoftwareCosts as SoftwareCosts
from moe_rl.core.topology import ClusterTopology

Floats = NDArray[np.float64]

BF16_BYTES = 2
# dgrad and wgrad each repeat the forward's floating-point work.
BACKWARD_GEMM_FACTOR = 2.0
# Activation and permutation bytes of backward relative to forward.
BACKWARD_ACTIVATION_FACTOR = 1.7
# One byte per element and an fp32 scale per 128.
FP8_ROW_BYTES = 1.0 + 4.0 / 128.0
# HBM passes over a mean rank's rows that a flat all-to-all spends on sorting and permuting what it sends.
FLAT_COPY_PASSES = 4.0
# Share of hidden replica traffic that its layer pays for after all; assumed. Computation beside communication was
# measured 18.9 % slower on average and 40 % at most on A100 and H100 (arXiv 2507.03114).
REPLICA_CONTENTION = 0.3
TUNED_COSTS = SoftwareCosts()
# A window in which every transfer finds room.
ANY_TIME_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCostParams:
    """Plain floats that price a layer; the C++ core takes the same fields in the same order."""

    gemm_flops_per_s: float
    gemm_flops_per_row: float
    """Forward floating-point operations of one row through an expert: 6 h f for SwiGLU."""
    expert_bytes: float
    """W, bf16 bytes of one expert: read once per expert that has rows."""
    hbm_bytes_per_s: float
    activation_bytes_per_row: float
    """Bytes moved by permutation and activation per row, forward."""
    gemm_fixed_s: float
    gemm_tile_rows: float
    a2a_hierarchical: float
    """1: DeepEP/HybridEP-like, one copy per (token, rank) and (token, node); 0: flat, one copy per (token, expert)."""
    a2a_row_bytes: float
    nvlink_bytes_per_s: float
    rdma_bytes_per_s: float
    a2a_mixing: float
    a2a_latency_s: float
    forward_passes: float
    """1, or 2 when recomputation repeats the MoE forward inside backward."""
    backward_passes: float
    """1 for an update, 0 for a log-probability pass."""
    replica_exposed: float
    """Share of replica traffic, in a node or across, that costs time although other work runs beside it."""
    replica_p2p_bytes_per_s: float
    replica_fixed_s: float
    prefetch_bytes_per_s: float
    """Rate at which a NIC moves a cross-node replica."""
    prefetch_hidden_s: float = 0.0
    """NIC time per layer that cross-node replica traffic may take before it delays the layer. 0 is the cautious choice
    where the NIC's idle time is not known."""
    replica_hidden_s: float = ANY_TIME_S
    """The same for replicas inside a node, on NVLink: time that a layer computes before its experts, both ways. By
    default there is room for all of them, as published systems report it."""
    a2a_nic_ranks: float = 1.0
    """Ranks of a node that send over all of its NICs together under a flat all-to-all; 1: each over its own."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            require(bool(np.isfinite(value)) and value >= 0, f"cost: {item.name} must be finite and >= 0, got {value}.")
        links = ("nvlink_bytes_per_s", "rdma_bytes_per_s", "replica_p2p_bytes_per_s", "prefetch_bytes_per_s")
        require_positive(self, "gemm_flops_per_s", "hbm_bytes_per_s", "gemm_tile_rows", *links, whose="cost: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """Where the rows of a layer go, for any number of leading (group, micro-batch, layer) axes.

    What travels is what the dispatcher sends: a hierarchical one a token once to every node and rank that it visits, a
    flat one a row for each of its experts.
    """

    rows: Floats
    """[..., P] token-expert pairs computed on each rank."""
    padded_rows: Floats
    """[..., P] the same with every expert rounded up to a GEMM tile."""
    active_experts: Floats
    """[..., P] experts with at least one row, replicas included."""
    rank_visits: Floats
    """[..., P] what each rank's link to its node carries: distinct tokens that visit it, its own included; flat: rows
    that it gets from the other ranks of its node, or sends to them, whichever are more."""
    nic_ingress: Floats
    """[..., N] tokens that enter each node from other nodes, divided by its NICs; flat: [..., P] rows into a rank's."""
    nic_egress: Floats
    """[..., N] (token, other node) copies that leave each node, divided by its NICs; flat: [..., P] out of a rank's."""
    replicas: Floats
    """[...] most in-node replicas that one rank receives, or sends as the home of their experts."""
    cross_node_replicas: Floats
    """[...] most cross-node replicas that one NIC sends or receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of a layer by part; all `[...]`."""

    expert_gemm_s: Floats
    all_to_all_s: Floats
    replicate_s: Floats
    prefetch_s: Floats

    @property
    def total_s(self) -> Floats:
        """Sum of the parts."""
        total: Floats = self.expert_gemm_s + self.all_to_all_s + self.replicate_s + self.prefetch_s
        return total


def gemm_time(params: LayerCostParams, layer_rows: LayerRows, *, backward: bool = False) -> Floats:
    """Return [..., P] seconds of each rank's expert MLP: affine in rows, with the weight read as its floor."""
    # A tile is computed whole: one row of an expert costs as much as `gemm_tile_rows` of them.
    product_s = layer_rows.padded_rows * params.gemm_flops_per_row / params.gemm_flops_per_s
    # Few rows leave the product bound by reading W: 37.7 MB of Qwen3-235B take 11 us at the H100's 3.35 TB/s.
    weight_read_s = layer_rows.active_experts * params.expert_bytes / params.hbm_bytes_per_s
    activation_s = layer_rows.rows * params.activation_bytes_per_row / params.hbm_bytes_per_s
    # dgrad and wgrad: two products and two launches.
    products, passes, launches = (
        (BACKWARD_GEMM_FACTOR, BACKWARD_ACTIVATION_FACTOR, 2.0) if backward else (1.0, 1.0, 1.0)
    )
    time: Floats = (
        products * np.maximum(product_s, weight_read_s) + passes * activation_s + launches * params.gemm_fixed_s
    )
    return time


def all_to_all_time(params: LayerCostParams, layer_rows: LayerRows) -> Floats:
    """Return [...] seconds of one dispatch or combine, barrier included.

    A rank's NVLink carries what it exchanges inside its node. A hierarchical kernel spreads what goes to other nodes
    over all NICs of a node. Under a flat one every rank has its own NIC alone, unless the cluster pools them
    (`a2a_nic_ranks`). A flat one also copies its rows where they come from, which is the mean rank. P = 1 stands for a
    rank of a balanced node.
    """
    local_s = layer_rows.rank_visits.max(axis=-1) * params.a2a_row_bytes / params.nvlink_bytes_per_s
    # A NIC sends and receives at once, so the busier of the two directions decides.
    nic_rows = np.maximum(
        _busiest_nic(params, layer_rows, layer_rows.nic_ingress),
        _busiest_nic(params, layer_rows, layer_rows.nic_egress),
    )
    remote_s = nic_rows * params.a2a_row_bytes / params.rdma_bytes_per_s
    # A hierarchical kernel forwards what arrives over the NIC by NVLink: a quarter of the shorter stage is not hidden.
    mixing_s = params.a2a_mixing * np.minimum(local_s, remote_s)
    if not params.a2a_hierarchical:
        mixing_s = FLAT_COPY_PASSES * layer_rows.rows.mean(axis=-1) * params.a2a_row_bytes / params.hbm_bytes_per_s
    time: Floats = np.maximum(local_s, remote_s) + mixing_s + params.a2a_latency_s
    return time


def _busiest_nic(params: LayerCostParams, layer_rows: LayerRows, rows: Floats) -> Floats:
    """Return [...] rows over the busiest NIC, from [..., N] by node or [..., P] by rank.

    Rows [9, 1, 2, 2] of four ranks in nodes of two: 9 if every rank has its own NIC, (9 + 1) / 2 = 5 if a node pools.
    """
    ranks, by_rank = int(params.a2a_nic_ranks), rows.shape[-1] == layer_rows.rows.shape[-1]
    # One entry stands for the mean rank, whose NIC carries as much either way.
    if not params.a2a_hierarchical and ranks > 1 and by_rank and rows.shape[-1] > 1:
        rows = rows.reshape(*rows.shape[:-1], -1, ranks).mean(axis=-1)
    busiest_rows: Floats = rows.max(axis=-1)
    return busiest_rows


def exposed_time(transfer_s: Floats, window_s: Floats | float, contention: float) -> Floats:
    """Return the seconds that transfers take beyond the work beside them: what does not fit, and what they contend for.

    `window_s` is how long the other work runs; what fits into it still slows it down by the share `contention`.
    """
    time: Floats = np.maximum(transfer_s - window_s, 0.0) + contention * np.minimum(transfer_s, window_s)
    return time


def replica_transfers(params: LayerCostParams) -> float:
    """Return how many W a replica moves: one forward; in an update one more for backward and two of fp32 gradient."""
    return 1.0 + 3.0 * params.backward_passes


def replicate_time(params: LayerCostParams, replicas: Floats) -> Floats:
    """Return [...] exposed seconds of in-node replicas: pushed while attention runs, returned beside its backward."""
    transfer_s = replicas * replica_transfers(params) * params.expert_bytes / params.replica_p2p_bytes_per_s
    # Four times 37.7 MB (Qwen3-235B) at the H100's 300 GB/s take 0.5 ms, of which 0.15 ms cost time.
    exposed_s = exposed_time(transfer_s, params.replica_hidden_s, params.replica_exposed)
    time: Floats = exposed_s + np.where(replicas > 0, params.replica_fixed_s, 0.0)
    return time


def prefetch_time(params: LayerCostParams, cross_node_replicas: Floats) -> Floats:
    """Return [...] seconds by which cross-node replicas delay the layer, whose NIC is free outside its all-to-all."""
    # The same four at 43 GB/s take 3.5 ms of a NIC: seven times as long as over NVLink.
    transfer_s = cross_node_replicas * replica_transfers(params) * params.expert_bytes / params.prefetch_bytes_per_s
    return exposed_time(transfer_s, params.prefetch_hidden_s, params.replica_exposed)


def resident_transfers(params: LayerCostParams) -> float:
    """Return how many W a copy that stays for a step moves: its weights once; in an update its fp32 gradient back."""
    return 1.0 + 2.0 * params.backward_passes


def resident_time(params: LayerCostParams, crossing: NDArray[np.int64], in_node: NDArray[np.int64]) -> float:
    """Return seconds per *step*, however many micro-batches it has, of copies that stay for the whole step.

    `crossing` and `in_node` [2, P]: copies that each rank feeds as their home, and copies that it holds, over all
    layers of its pipeline stage; those between nodes travel over its NIC, those in its node over NVLink. Each copy is
    sent by itself: a home that feeds seven copies pays for seven. Weights go out before the first micro-batch and
    gradients come back after the last, so nothing is taken to hide them; sending and receiving overlap.

    One copy of each of 12 layers from another node, Qwen3-235B on H100: 12 x 3 x 37.7 MB / 43 GB/s = 32 ms.
    """
    seconds_of_bytes = resident_transfers(params) * params.expert_bytes
    over_nic = float(crossing.max(initial=0)) / params.prefetch_bytes_per_s
    over_nvlink = float(in_node.max(initial=0)) / params.replica_p2p_bytes_per_s
    return seconds_of_bytes * (over_nic + over_nvlink)


def layer_time(params: LayerCostParams, layer_rows: LayerRows) -> LayerTime:
    """Return the time of the MoE part of a layer, forward and backward as `params` says.

    Barriers separate the phases, so the maxima over ranks of forward and backward GEMM are taken apart.
    """
    gemm = params.forward_passes * gemm_time(params, layer_rows).max(axis=-1)
    gemm = gemm + params.backward_passes * gemm_time(params, layer_rows, backward=True).max(axis=-1)
    # One dispatch and one combine in each.
    passes = 2.0 * (params.forward_passes + params.backward_passes)
    return LayerTime(
        expert_gemm_s=gemm,
        all_to_all_s=passes * all_to_all_time(params, layer_rows),
        replicate_s=replicate_time(params, layer_rows.replicas),
        prefetch_s=prefetch_time(params, layer_rows.cross_node_replicas),
    )


def reorder_time(bytes_out_of_node: NDArray[np.int64], rdma_bytes_per_s: float) -> float:
    """Return seconds of an expert migration: the rank that sends most over its NIC, from `[P]` bytes."""
    return float(bytes_out_of_node.max(initial=0)) / rdma_bytes_per_s


def layer_cost_params(
    model: MoeModelSpec,
    topology: ClusterTopology,
    *,
    hierarchical: bool = True,
    recompute_moe: bool = False,
    forward_only: bool = False,
    replica_exposed: float = REPLICA_CONTENTION,
    fp8: bool = False,
    fused_mlp: bool = False,
    activation_again: bool = False,
    software: SoftwareCosts = TUNED_COSTS,
) -> LayerCostParams:
    """Return the constants of one MoE layer of `model` on `topology`.

    `fp8` multiplies in FP8 and pays
    for the casts. `fused_mlp`: one kernel computes product, activation and cast. `activation_again`: backward computes
    the activation once more.
    """
    hardware = topology.hardware
    hidden = model.hidden_size
    # A single rank sends nothing: no bytes and no latency.
    sends = float(topology.ep_size > 1)
    single_node = topology.num_nodes == 1 and hierarchical
    # Recomputation runs the whole MoE layer once more inside backward, its two all-to-alls included.
    forward_passes = 2.0 if recompute_moe and not forward_only else 1.0
    backward_passes = 0.0 if forward_only else 1.0
    # Over EFA a flat all-to-all drives all NICs of a GPU (30 GB/s), a deduplicating kernel one of them (3 GB/s).
    flat_rdma = hardware.flat_rdma_gb_per_s or hardware.rdma_gb_per_s
    latency_us = hardware.intra_node_latency_us if single_node else hardware.inter_node_latency_us
    return LayerCostParams(
        gemm_flops_per_s=hardware.gemm_tflops
        * 1e12
        * hardware.gemm_share(model.moe_ffn_hidden_size, hidden)
        * (hardware.fp8_speedup if fp8 else 1.0),
        # A multiply-add counts as two operations.
        gemm_flops_per_row=2.0 * model.expert_params,
        expert_bytes=float(model.expert_bytes),
        hbm_bytes_per_s=hardware.hbm_gb_per_s * 1e9,
        activation_bytes_per_row=_activation_bytes(
            model, software, fp8=fp8, fused=fused_mlp, recomputes=activation_again
        ),
        gemm_fixed_s=hardware.gemm_fixed_us * 1e-6,
        gemm_tile_rows=float(hardware.gemm_tile_rows),
        a2a_hierarchical=float(hierarchical),
        a2a_row_bytes=sends * hidden * BF16_BYTES,
        nvlink_bytes_per_s=hardware.nvlink_gb_per_s * 1e9,
        rdma_bytes_per_s=1e9 * (hardware.rdma_gb_per_s if hierarchical else flat_rdma),
        a2a_mixing=hardware.a2a_mixing,
        a2a_latency_s=sends * latency_us * 1e-6,
        forward_passes=forward_passes,
        backward_passes=backward_passes,
        replica_exposed=replica_exposed,
        replica_p2p_bytes_per_s=hardware.nvlink_p2p_gb_per_s * 1e9,
        replica_fixed_s=10e-6 + 1e-3 * software.plan_ms,
        prefetch_bytes_per_s=hardware.rdma_gb_per_s * 1e9,
        a2a_nic_ranks=float(topology.ranks_per_domain if hardware.pooled_nics else 1),
    )


def _activation_bytes(
    model: MoeModelSpec, software: SoftwareCosts, *, fp8: bool, fused: bool, recomputes: bool
) -> float:
    """Return forward bytes of one row: permutation, activation, and the two casts of FP8.

    A fused gated activation moves 10 f, a squared ReLU without a gate 6 f; GELU is not fused in Megatron's grouped MLP
    (its product with the routing probability runs in fp32), which makes 18 f. A cast reads bf16 and writes FP8 rowwise
    and transposed. A fused grouped MLP keeps most of activation and casts on the chip, whatever the activation. An
    activation that backward computes again moves a third of its bytes once more, spread here over both passes.
    """
    hidden, width = model.hidden_size, model.moe_ffn_hidden_size
    per_width = {"swiglu": 10.0, "swiglu_oai": software.clamped_activation_bytes, "gelu": 18.0, "relu2": 6.0}
    # 2 bytes read, 1 written rowwise and 1 transposed.
    casts = 4 * (hidden + width) if fp8 else 0
    if fused:
        return 8 * hidden + software.fused_mlp_share * (per_width["swiglu"] * width + casts)
    activation = per_width[model.activation] * width
    if recomputes:
        # The two passes together move 1 + 1.7 times the bytes; a third of 1 more is spread over both.
        activation *= 1.0 + 1.0 / 3.0 / (1.0 + BACKWARD_ACTIVATION_FACTOR)
    return 8 * hidden + activation + casts


def padded_rows(rows: NDArray[np.int64] | Floats, tile_rows: float) -> NDArray[np.float64]:
    """Return rows rounded up to whole tiles, elementwise."""
    # 130 rows cost 256: a tile of 128 is computed whole.
    padded: NDArray[np.float64] = np.ceil(rows / tile_rows) * tile_rows
    return padded


def flat_shares(ep_size: int, ranks_per_domain: int) -> tuple[float, float]:
    """Return which share of a rank's rows comes over its NVLink, and which over a NIC, where all ranks send alike.

    A flat all-to-all on 8 ranks in nodes of 4 brings 3/8 of the rows from the node's other ranks, 4/8 from the other.
    """
    return (ranks_per_domain - 1) / ep_size, (ep_size - ranks_per_domain) / ep_size


def independent_visits(
    shares: NDArray[np.float64], tokens_per_rank: NDArray[np.float64], ranks_per_domain: int
) -> tuple[Floats, Floats, Floats]:
    """Return (rank_visits, nic_ingress, nic_egress) when a token's experts are drawn independently.

    `shares` [..., P, E] is q_e x[e, p], the probability that a token picks expert e and is served on rank p;
    `tokens_per_rank` [...] the mean tokens per source rank T. A token visits rank p with probability
    1 - prod_e (1 - q x), and likewise every node; sources are taken as alike. A node receives visits from the other
    N - 1 nodes, T u_n (N - 1) per NIC; node n sends T sum over other nodes of u.
    """
    per_node = shares.reshape(*shares.shape[:-2], -1, ranks_per_domain, shares.shape[-1]).sum(axis=-2)
    stays, node_stays = (log_stay(of_bins).sum(axis=-1) for of_bins in (shares, per_node))
    return visits_of_stays(stays, node_stays, np.asarray(tokens_per_rank, np.float64))


def log_stay(share: Floats) -> Floats:
    """Return the log-probability of not being among `share`, finite where the share is 1."""
    # log(1 - 1) is -inf: an expert that takes every token needs a share just below 1.
    logs: Floats = np.log1p(-np.minimum(share, np.nextafter(1.0, 0.0)))
    return logs


def visits_of_stays(
    log_rank_stays: Floats, log_node_stays: Floats, tokens_per_rank: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return (rank_visits, nic_ingress, nic_egress) from the log-probabilities that a token stays away.

    `log_rank_stays` [..., P] and `log_node_stays` [..., N] are sums over experts of log(1 - share).
    """
    tokens = tokens_per_rank[..., None]
    ranks, num_nodes = log_rank_stays.shape[-1], log_node_stays.shape[-1]
    # expm1, because most probabilities are small: 1 - exp(-1e-12) keeps 4 digits of 16.
    node_probability = -np.expm1(log_node_stays)
    rank_visits: Floats = tokens * ranks * -np.expm1(log_rank_stays)
    # Tokens of the node itself cross no NIC.
    ingress: Floats = tokens * (num_nodes - 1) * node_probability
    egress: Floats = tokens * (node_probability.sum(axis=-1, keepdims=True) - node_probability)
    return rank_visits, ingress, egress
