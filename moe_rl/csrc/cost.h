// The layer cost model of moe_rl/core/cost.py, field for field and formula for formula, for one layer and micro-batch.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_rl {

// The fields of core.cost.LayerCostParams, which are read by these names.
#define MOE_RL_COST_FIELDS(FIELD) \
    FIELD(gemm_flops_per_s) FIELD(gemm_flops_per_row) FIELD(expert_bytes) FIELD(hbm_bytes_per_s) \
    FIELD(activation_bytes_per_row) FIELD(gemm_fixed_s) FIELD(gemm_tile_rows) FIELD(a2a_hierarchical) \
    FIELD(a2a_row_bytes) FIELD(nvlink_bytes_per_s) FIELD(rdma_bytes_per_s) FIELD(a2a_mixing) FIELD(a2a_latency_s) \
    FIELD(forward_passes) FIELD(backward_passes) FIELD(replica_exposed) FIELD(replica_p2p_bytes_per_s) \
    FIELD(replica_fixed_s) FIELD(prefetch_bytes_per_s) FIELD(prefetch_hidden_s) FIELD(replica_hidden_s) \
    FIELD(a2a_nic_ranks)

struct LayerCostParams {
#define MOE_RL_DECLARE(name) double name = 0;
    MOE_RL_COST_FIELDS(MOE_RL_DECLARE)
#undef MOE_RL_DECLARE

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

// Seconds of the layer, forward and backward.
double layer_time(const LayerCostParams &params, const LayerRows &at);

// Seconds per step of one copy that stays for it and comes from another node: core.cost.resident_time.
double resident_time(const LayerCostParams &params);

// By how much one more row on the slowest rank delays a layer's products: planner/weights.py, seconds_per_row.
double seconds_per_row(const LayerCostParams &params);

// The same for one more copy into, or out of, the busiest NIC.
double copy_time(const LayerCostParams &params);

// Seconds by which copies across nodes delay a layer: core.cost.prefetch_time.
double prefetch_time(const LayerCostParams &params, double cross_node_replicas);

// The logarithm of the probability that a token stays away from an expert that it picks with this share; the sum over a
// set of experts is that of staying away from all.
double stays_away(double share);

// Turns sums of `stays_away` per rank and node into visits: moe_rl/core/cost.py, independent_visits.
void set_visits(LayerRows &at, const std::vector<double> &rank_stays, const std::vector<double> &node_stays,
                double tokens_per_rank);

} // namespace moe_rl
