#include "cost.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moe_rl {

namespace {

// Equal to the constants of the same names in moe_rl/core/cost.py.
constexpr double BACKWARD_GEMM_FACTOR = 2.0;
constexpr double BACKWARD_ACTIVATION_FACTOR = 1.7;
constexpr double FLAT_COPY_PASSES = 4.0;

double largest(const std::vector<double> &values) {
    return values.empty() ? 0.0 : *std::max_element(values.begin(), values.end());
}

double gemm_time(const LayerCostParams &p, const LayerRows &at, std::size_t rank, bool backward) {
    const double flops = at.padded_rows[rank] * p.gemm_flops_per_row / p.gemm_flops_per_s;
    const double weights = at.active_experts[rank] * p.expert_bytes / p.hbm_bytes_per_s;
    const double moved = at.rows[rank] * p.activation_bytes_per_row / p.hbm_bytes_per_s;
    if (backward)
        return BACKWARD_GEMM_FACTOR * std::max(flops, weights) + BACKWARD_ACTIVATION_FACTOR * moved +
               2.0 * p.gemm_fixed_s;
    return std::max(flops, weights) + moved + p.gemm_fixed_s;
}

// Of [N] rows by node, or [P] by rank: those of ranks that pool their NICs are spread over them.
double busiest_nic(const LayerCostParams &p, const std::vector<double> &rows) {
    const auto ranks = static_cast<std::size_t>(p.a2a_nic_ranks);
    if (!p.flat() || ranks <= 1)
        return largest(rows);
    double most = 0;
    for (std::size_t first = 0; first + ranks <= rows.size(); first += ranks)
        most = std::max(most, std::accumulate(rows.begin() + first, rows.begin() + first + ranks, 0.0));
    return most / p.a2a_nic_ranks;
}

double all_to_all_time(const LayerCostParams &p, const LayerRows &at) {
    const double local = largest(at.rank_visits) * p.a2a_row_bytes / p.nvlink_bytes_per_s;
    const double nic_rows = std::max(busiest_nic(p, at.nic_ingress), busiest_nic(p, at.nic_egress));
    const double remote = nic_rows * p.a2a_row_bytes / p.rdma_bytes_per_s;
    if (!p.flat())
        return std::max(local, remote) + p.a2a_mixing * std::min(local, remote) + p.a2a_latency_s;
    const double mean = std::accumulate(at.rows.begin(), at.rows.end(), 0.0) / static_cast<double>(at.rows.size());
    const double copied = FLAT_COPY_PASSES * mean * p.a2a_row_bytes / p.hbm_bytes_per_s;
    return std::max(local, remote) + copied + p.a2a_latency_s;
}

double exposed_time(double transfer, double window, double contention) {
    return std::max(transfer - window, 0.0) + contention * std::min(transfer, window);
}

} // namespace

double layer_time(const LayerCostParams &p, const LayerRows &at) {
    double forward = 0, backward = 0;
    for (std::size_t rank = 0; rank < at.rows.size(); ++rank) {
        forward = std::max(forward, gemm_time(p, at, rank, false));
        backward = std::max(backward, gemm_time(p, at, rank, true));
    }
    const double expert_gemm_s = p.forward_passes * forward + p.backward_passes * backward;
    const double all_to_all_s = 2.0 * (p.forward_passes + p.backward_passes) * all_to_all_time(p, at);
    const double copied = at.replicas * (1.0 + 3.0 * p.backward_passes) * p.expert_bytes / p.replica_p2p_bytes_per_s;
    const double replicate_s =
        exposed_time(copied, p.replica_hidden_s, p.replica_exposed) + (at.replicas > 0 ? p.replica_fixed_s : 0.0);
    return expert_gemm_s + all_to_all_s + replicate_s + prefetch_time(p, at.cross_node_replicas);
}

double prefetch_time(const LayerCostParams &p, double cross_node_replicas) {
    const double busy = cross_node_replicas * (1.0 + 3.0 * p.backward_passes) * p.expert_bytes / p.prefetch_bytes_per_s;
    return exposed_time(busy, p.prefetch_hidden_s, p.replica_exposed);
}

double resident_time(const LayerCostParams &p) {
    return (1.0 + 2.0 * p.backward_passes) * p.expert_bytes / p.prefetch_bytes_per_s;
}

double seconds_per_row(const LayerCostParams &p) {
    const double gemm = p.gemm_flops_per_row / p.gemm_flops_per_s, moved = p.activation_bytes_per_row / p.hbm_bytes_per_s;
    return p.forward_passes * (gemm + moved) +
           p.backward_passes * (BACKWARD_GEMM_FACTOR * gemm + BACKWARD_ACTIVATION_FACTOR * moved);
}

double copy_time(const LayerCostParams &p) {
    return 2.0 * (p.forward_passes + p.backward_passes) * p.a2a_row_bytes / p.rdma_bytes_per_s;
}

double stays_away(double share) { return std::log1p(-std::min(share, 1.0)); }

void set_visits(LayerRows &at, const std::vector<double> &rank_stays, const std::vector<double> &node_stays,
                double tokens_per_rank) {
    const std::size_t ranks = rank_stays.size(), nodes = node_stays.size();
    at.rank_visits.resize(ranks);
    at.nic_ingress.resize(nodes);
    at.nic_egress.resize(nodes);
    double visited = 0;
    for (std::size_t node = 0; node < nodes; ++node)
        visited += at.nic_ingress[node] = -std::expm1(node_stays[node]);
    for (std::size_t node = 0; node < nodes; ++node) {
        at.nic_egress[node] = tokens_per_rank * (visited - at.nic_ingress[node]);
        at.nic_ingress[node] *= tokens_per_rank * static_cast<double>(nodes - 1);
    }
    for (std::size_t rank = 0; rank < ranks; ++rank)
        at.rank_visits[rank] = tokens_per_rank * static_cast<double>(ranks) * -std::expm1(rank_stays[rank]);
}

} // namespace moe_rl
