// All cells of a step, in parallel.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "cell.h"
#include "reorder.h"
#include "visits.h"

namespace moe_rl {

// Drawn tokens of a step and where its cells have them: moe_rl/core/routes.py.
struct StepRoutes {
    const std::uint16_t *routes = nullptr; // [L, drawn, K]; nullptr: only counts are known
    const std::int64_t *token = nullptr, *cell_start = nullptr;
    const std::int32_t *source = nullptr;
    std::int64_t drawn = 0;
    int top_k = 0;

    TokenRoutes of(std::int64_t cell, int layer) const {
        if (!routes)
            return {};
        const std::int64_t first = cell_start[cell];
        return {routes + layer * drawn * top_k, token + first, source + first, cell_start[cell + 1] - first, top_k};
    }
};

struct Step {
    int groups, micro_batches, layers, ranks, experts, ranks_per_domain;
    const std::int32_t *pairs;  // [G, M, L, P, E]
    const std::int64_t *tokens; // [G, M, P]
    const std::int32_t *home;   // [L, E] rank
    StepRoutes routes;
    const std::int32_t *residents = nullptr; // [L, P, S] or nullptr
    int resident_slots = 0;

    const std::int32_t *pairs_of(std::int64_t batch, int layer) const {
        return pairs + (batch * layers + layer) * ranks * experts;
    }
    // Without its rows [E].
    Cell cell(std::int64_t batch, int layer) const {
        const std::int64_t *held = tokens + batch * ranks;
        return {ranks, ranks_per_domain, experts, nullptr, home + std::int64_t{layer} * experts,
                static_cast<double>(std::accumulate(held, held + ranks, std::int64_t{0})), pairs_of(batch, layer),
                routes.of(batch, layer), residents + std::int64_t{layer} * ranks * resident_slots, resident_slots,
                static_cast<std::uint64_t>(batch * layers + layer)};
    }
};

struct PlacedCopy {
    int expert, physical_id;
    int kind; // 0: inside a node, 1: across nodes, 2: resident
};

struct CellResult {
    std::vector<PlacedCopy> copies;        // by (expert, rank)
    std::vector<std::int32_t> source_quota; // [copies, P]
    std::int64_t highest_load = 0; // no rank computes more: the target that the search reached
    double time_s = 0;
};

std::vector<CellResult> replicate_step(const Step &step, const ReplicateOptions &options, int num_threads);

// Visits of every cell and layer under given instances, of the step's tokens, or of its rows where there are no routes:
// [cells * L] times P and N * N.
struct StepVisits {
    std::vector<double> ranks, between, nics;
};

struct StepInstances {
    const std::int64_t *offsets; // [cells * L + 1]
    const std::int32_t *expert, *rank, *quota; // quota [instances, P]
};

StepVisits count_visits(const Step &step, const StepInstances &instances, int num_threads);

// Where the bits of drawn tokens stand: reorder.h, TokenBits.
struct StepBits {
    const std::uint16_t *routes = nullptr; // [L, drawn, K]; nullptr: only counts are known
    const std::int32_t *bit = nullptr;     // [drawn] place of every token, -1: left out
    std::vector<std::int32_t> placed;      // the others, by their places: words are then filled one after the other
    std::int64_t drawn = 0;
    TokenBits layout{}; // what the bits of all layers have in common
};

struct ResidentOptions {
    int slots;
    std::int64_t iterations;
    std::uint64_t seed;
    const std::int32_t *current; // [L, E] ranks
    std::int64_t move_cost;      // negative: homes stay
    double row_share;            // cost of a row in the busiest node, in copies of the busiest node
};

struct Residents {
    std::vector<std::int32_t> home;  // [L, E] ranks
    std::vector<std::int32_t> slots; // [L, P, slots] experts to hold for the whole step, -1 where none pays
};

Residents choose_residents(const Step &step, const StepBits &bits, const ReplicateOptions &options,
                           const ResidentOptions &resident, int num_threads);

struct ReorderStep {
    int cells, layers, experts, nodes, ranks_per_node;
    const std::int32_t *load;        // [cells, L, E]
    std::int64_t row_cost, move_cost, move_inside_cost;
    const std::int32_t *start, *current; // [L, E] ranks
    bool by_rank;      // balance ranks, not nodes: there will be no replicas
    bool moving_is_free;
    bool peak;         // lower the fullest bin of all cells, not the sum over cells of the busiest ones
    int power;         // to which the rows of busiest bins count
    std::int64_t iterations, iterations_inside;
    std::uint64_t seed;
    StepBits tokens;
};

// Returns [L, E] ranks.
std::vector<std::int32_t> reorder_step(const ReorderStep &step, int num_threads);

} // namespace moe_rl
