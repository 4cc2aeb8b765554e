// All cells of a step, in parallel.
#pragma once

#include <cstdint>
#include <vector>

#include "cell.h"
#include "reorder.h"

namespace moe_rl {


struct Step {
    int groups, micro_batches, layers, ranks, experts, ranks_per_domain;
    const std::int32_t *pairs;  // [G, M, L, P, E]
    const std::int64_t *tokens; // [G, M, P]
    const std::int32_t *home;   // [L, E] rank
};

struct PlacedCopy {
    int expert, physical_id;
    bool across;
};

struct CellResult {
    std::vector<PlacedCopy> copies;        // by (expert, rank)
    std::vector<std::int32_t> source_quota; // [copies, P]
    std::int64_t highest_load = 0; // no rank computes more: the target that the search reached
    std::int64_t reused = 0;
    double time_s = 0, time_without_copies_s = 0;
};

std::vector<CellResult> replicate_step(const Step &step, const ReplicateOptions &options, int num_threads);

struct ReorderStep {
    int cells, layers, experts, nodes, ranks_per_node;
    const std::int32_t *load;        // [cells, L, E]
    const std::int32_t *stays;       // [cells, L, E] or nullptr
    const std::int64_t *visit_cost;  // [cells]
    std::int64_t row_cost, move_cost, move_inside_cost;
    const std::int32_t *start, *current; // [L, E] ranks
    bool by_rank;      // balance ranks, not nodes: there will be no replicas
    bool moving_is_free;
    std::int64_t iterations, iterations_inside;
    bool anneal;
    std::uint64_t seed;
};

// Returns [L, E] ranks.
std::vector<std::int32_t> reorder_step(const ReorderStep &step, int num_threads,
                                       Deadline &deadline);

} // namespace moe_rl
