// Which sequence runs in which (micro-batch, DP rank), so that the loads of a micro-batch complement each other.
#pragma once

#include <cstdint>
#include <vector>

#include "annealing.h"

namespace moe_rl {

struct PackProblem {
    int sequences, layers, bins;
    int places;  // (micro-batch, DP rank) cells
    int batches; // (EP group, micro-batch) pairs, group by group, whose load is balanced together
    int groups;  // EP groups
    const std::int32_t *load;      // [U, bins, L] rows in each bin (node or rank) of the U different sequences
    const std::int32_t *row_of;    // [S] which of these a sequence is
    const std::int64_t *tokens;    // [S]
    const std::int64_t *work;      // [parts, S] what a place pays beside routed experts, in units of rows; a batch waits
    int parts;                     // for the busiest place in each part
    const std::int32_t *batch_of;  // [places]
    std::int64_t budget;           // most tokens in a place
    const std::int64_t *travel;    // [S, nodes] cost of the sequence's tokens leaving the node; or nullptr
    const std::int32_t *node_of;   // [places] node that holds the place's tokens; -1: several do
    int nodes;
    std::int32_t limit;            // rows of a bin above which a row costs STEEP more: what sizes a static buffer
    int ranks;                     // > 0: place % ranks is a sequence's DP rank, which it keeps
    int most;                      // > 0: it may change it, but no rank gets more sequences than this (`ranks` > 0)
    int power;                     // to which the rows of busiest bins count; `work` and `travel` are 0 where it is not 1
    bool slowest_group;            // the step waits for the slowest group; else groups count alike
};

// A batch costs the sum over layers of its busiest bin + its busiest place of every part, a group the sum over its batches.
// Minimizes the mean and the slowest group's cost, by halves (or the sum: `slowest_group`), plus what tokens' travel costs, by moving and swapping
// sequences between places. Keeps every budget and leaves no place empty that was not. Returns the
// cost.
std::int64_t pack(const PackProblem &problem, std::int64_t iterations, int heat_shift,
                  std::uint64_t seed, std::vector<std::int32_t> &place_of);

// `count` micro-batches on `ranks` ranks, longest sequences first: each is capped by its longest sequence's work, or by
// the mean of what is left; its sequences go to the rank with least work that has room for their tokens. `descending`
// ranks the sequences by work. Writes places micro_batch * ranks + rank; returns false where a sequence has no room.
bool staircase(const std::vector<std::int32_t> &descending, const std::int64_t *work, const std::int64_t *tokens,
               int ranks, std::int64_t budget, int count, std::vector<std::int32_t> &place_of);

struct ArrangeProblem {
    int sequences, places, nodes;
    const std::int64_t *tokens;    // [S]
    const std::int64_t *travel;    // [S, nodes]
    const std::int32_t *place_of;  // [S]
    const std::int32_t *first_node, *num_nodes; // [places] nodes over which the place's tokens are cut evenly
};

// Orders the sequences of every place so that those on each node have little reason to leave it. `order` [S] ranks them;
// only places on several nodes change.
void arrange(const ArrangeProblem &problem, std::uint64_t seed, std::vector<std::int32_t> &order);

} // namespace moe_rl
