// The layer cost model of moe_rl/core/cost.py, field for field and formula for formula, for one layer and micro-batch.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_rl {

struct LayerCostParams {
    double gemm_flops_per_s, gemm_flops_per_row, expert_bytes, hbm_bytes_per_s, activation_bytes_per_row, gemm_fixed_s,
        gemm_tile_rows, a2a_hierarchical, a2a_row_bytes, nvlink_bytes_per_s, rdma_bytes_per_s, a2a_mixing,
        a2a_latency_s, forward_passes, backward_passes, replica_exposed,
        replica_p2p_bytes_per_s, replica_fixed_s, prefetch_bytes_per_s, prefetch_hidden_s, replica_hidden_s;

    static constexpr int NUM_FIELDS = 21;
    static LayerCostParams from_array(const double *values);

    // Whether a token is sent once for every expert, not once to every place that it visits.
    bool flat() const { return a2a_hierarchical == 0.0; }
};

// Where the rows of one layer go: P ranks, N nodes. Visits are of tokens, or of rows where a token is sent once for every
// expert.
struct LayerRows {
    std::vector<double> rows, padded_rows, active_experts, rank_visits; // [P]
    std::vector<double> nic_ingress, nic_egress;                        // [N], or [P] of rows
    double replicas = 0, cross_node_replicas = 0;
};

struct LayerTime {
    double expert_gemm_s, all_to_all_s, replicate_s, prefetch_s;
    double total_s() const { return expert_gemm_s + all_to_all_s + replicate_s + prefetch_s; }
};

LayerTime layer_time(const LayerCostParams &params, const LayerRows &at);

// Probability that a token stays away from a set of experts it picks with these shares, as a sum of logarithms.
// Seconds per step of one copy that stays for it and comes from another node: core.cost.resident_time.
double resident_time(const LayerCostParams &params);

// By how much one more row on the slowest rank delays a layer's products: planner/weights.py, seconds_per_row.
double seconds_per_row(const LayerCostParams &params);

// The same for one more copy into, or out of, the busiest NIC.
double copy_time(const LayerCostParams &params);

// Seconds by which copies across nodes delay a layer: core.cost.prefetch_time.
double prefetch_time(const LayerCostParams &params, double cross_node_replicas);

double stays_away(double share);

// Turns sums of `stays_away` per rank and node into visits: moe_rl/core/cost.py, independent_visits.
void set_visits(LayerRows &at, const std::vector<double> &rank_stays, const std::vector<double> &node_stays,
                double tokens_per_rank);

} // namespace moe_rl
