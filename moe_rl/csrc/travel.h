// Copies of drawn tokens between nodes, kept up to date while homes and copies that stay for the step are exchanged.
#pragma once

#include <cstdint>
#include <vector>

#include "reorder.h"

namespace moe_rl {

// Copies of tokens between nodes, for all pools. Which node an expert is on matters only through the tokens that choose
// it, so they are bits, 64 at a time: swapping two experts costs two passes over some hundred words. A node that holds
// a copy of an expert does not send its tokens to the expert's home: there the expert has none of that node's bits.
class Travel {
  public:
    // `bin_of` [E] is read on, so it has to outlive this.
    Travel(const TokenBits &tokens, const std::vector<std::int32_t> &bin_of, int bins);

    // Copies into, or out of, the busiest node of every pool, priced.
    std::int64_t cost() const { return cost_; }

    std::int64_t cost_of_swap(int first, int second, int a, int b);
    // `bin_of` already has the two in their new bins.
    void swap(int first, int second, int a, int b);

    // `node` holds a copy of `comes` in place of one of `leaves`; -1: none. Neither is at home there.
    std::int64_t cost_of_exchange(int node, int leaves, int comes);
    void exchange(int node, int leaves, int comes);

  private:
    const std::uint64_t *bits(int expert) const;
    std::int32_t count(const std::uint64_t *chosen, int block) const;
    std::int32_t *visitors(int node) { return visitors_.data() + static_cast<std::int64_t>(node) * blocks_; }
    int home(int expert) const { return bin_of_[expert] / bins_per_node_; }
    std::int32_t row(int expert, int block) const { return rows_[static_cast<std::size_t>(expert) * blocks_ + block]; }
    void after_swap(int node, int leaves, int comes, std::vector<std::int32_t> &result);
    std::int64_t busiest(int pool, int a, int b) const;
    std::int64_t total() const;
    void keep(int node, const std::vector<std::int32_t> &now);
    void refill(int node);
    void refill_words(int node, std::int32_t from, std::int32_t to);
    std::int32_t after_exchange(int there, int block, int leaves, int comes);

    const TokenBits &t_;
    const std::vector<std::int32_t> &bin_of_;
    int bins_per_node_, blocks_;
    std::vector<std::uint64_t> any_, once_, none_;       // [nodes, words] tokens with an expert, with exactly one
    std::vector<std::uint64_t> sent_;                    // [E, words] as `chosen`, less what copies keep; empty: as it is
    std::vector<std::int32_t> visitors_, new_a_, new_b_; // [nodes, blocks]; [blocks]
    std::vector<std::int32_t> in_, out_;                 // [pools, nodes] copies
    std::vector<std::int32_t> rows_, all_rows_;          // [E, blocks]; [blocks]; where nothing is deduplicated
    std::int64_t cost_ = 0;
};

} // namespace moe_rl
