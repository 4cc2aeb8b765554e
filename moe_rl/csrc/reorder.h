// Which bin (node, or rank of a node) is home of which expert, for one layer and all micro-batches at once.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "annealing.h"

namespace moe_rl {

// Drawn tokens as bits. Words stand by the node that holds the tokens; of a node come first words of all its pools (of
// cells), then second words of the pools that have two, and so on, so that one pass counts many pools side by side.
struct TokenBits {
    int pools, nodes, top_k;
    bool deduplicated;                          // a token goes to a node once, whatever the number of its experts there
    std::span<const std::int32_t> pools_of_row; // how many pools, the first ones, have a first, second, ... word
    const std::uint64_t *chosen;                // [E, words] tokens that chose the expert
    const std::int64_t *copy_cost;              // [pools] cost of one copy into, or out of, the busiest node

    int words() const { return nodes * std::accumulate(pools_of_row.begin(), pools_of_row.end(), 0); }
};

// What an expert costs that leaves the bin where it is now, by the link it takes: between bins of one node NVLink, else
// a NIC. With 2 bins per node an expert of bin 1 goes to bin 0 for `inside` and to bin 2 for `across`.
struct MoveCost {
    const std::int32_t *current; // [E] bin where the expert is; -1: it is coming anyway, to any bin for the same
    int bins_per_node;
    std::int64_t across, inside;

    std::int64_t of(int expert, int bin) const {
        const int from = current[expert];
        if (from < 0 || from == bin)
            return 0;
        return from / bins_per_node == bin / bins_per_node ? inside : across;
    }
};

struct ReorderProblem {
    int cells, experts, bins;
    const std::int32_t *rows;        // [E, cells]
    std::int64_t row_cost;           // cost of a row in the busiest bin
    MoveCost moves;
    const TokenBits *tokens = nullptr; // which experts meet in a token; nullptr: not known, and copies cost nothing
    bool peak = false; // the fullest bin of all cells alone counts, not the sum over cells
    RowPrice price{};  // of the busiest bin of a cell
};

// Minimizes, over assignments with as many experts per bin as `bin_of` has, the sum over cells of the cost of the
// busiest bin, plus the copies of tokens that the busiest node receives or sends, plus what moving costs. Starts from
// `bin_of` and leaves the best assignment there. Returns its cost, or with `peak` the rows of its fullest bin.
std::int64_t reorder(const ReorderProblem &problem, std::int64_t iterations, std::uint64_t seed,
                     std::vector<std::int32_t> &bin_of);

// Longest processing time first with equal counts per bin: the second start of the search when moving is free. Without
// it the development trace at EP16 takes 11.8 copies per layer in place of 11.2 (objective imbalance).
std::vector<std::int32_t> balanced_start(const ReorderProblem &problem);

} // namespace moe_rl
