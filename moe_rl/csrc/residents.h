// Which experts a node holds besides its homes for a whole step, for one layer and all micro-batches at once.
#pragma once

#include <cstdint>
#include <vector>

#include "reorder.h"

namespace moe_rl {

struct ResidentProblem {
    int experts, nodes, slots;     // slots of a node: those of all its ranks
    const TokenBits *tokens;
    std::int64_t held_cost;        // of one copy: its transfers
    const std::int32_t *current;   // [E] node whose leaving costs `move_cost`
    std::int64_t move_cost;        // negative: homes stay
    const std::int32_t *rows;      // [E, nodes, pools] rows that nodes send to experts
    const std::int64_t *row_cost;  // [pools] of a row in the busiest node
    const std::int32_t *fixed = nullptr;    // [nodes, pools] rows that nodes compute besides; nullptr: none
    const std::int32_t *home_rank = nullptr; // [E] ranks, of which each sends `most_sent` copies; nullptr: any number
    int most_sent = 0;
};

// Exchanges copies, held [nodes, slots] with -1 for none, and homes, node_of [E], so that the busiest node of every pool
// has fewer copies of tokens to receive or send. What comes out costs no more than what went in; its cost is returned.
std::int64_t improve_residents(const ResidentProblem &problem, std::int64_t iterations, std::uint64_t seed,
                       std::vector<std::int32_t> &node_of, std::vector<std::int32_t> &held);

} // namespace moe_rl
