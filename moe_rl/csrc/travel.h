// Copies of drawn tokens between nodes, kept up to date while homes and copies that stay for the step are exchanged.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reorder.h"
#include "travel_passes.h"

namespace moe_rl {

// `node` holds a copy of `comes` in place of one of `leaves`; -1: none. Neither is at home there.
struct CopyChange {
    int node, leaves, comes;
};

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
    // Does what `cost_of_swap` was last asked for. `bin_of` may have the two in their new bins already.
    void swap(int first, int second);

    // One change, or the two of nodes that give each other a copy: a trade concerns the same two homes as its first half.
    std::int64_t cost_of_exchange(std::span<const CopyChange> changes);
    // Does what `cost_of_exchange` was last asked for.
    void exchange(std::span<const CopyChange> changes);

  private:
    using Visitors = std::vector<std::int32_t>; // [nodes, stride] tokens of each node that one node is sent, by pool

    int home(int expert) const { return expert < 0 ? -1 : bin_of_[expert] / bins_per_node_; }
    std::size_t at_word(int expert, std::size_t word) const { return static_cast<std::size_t>(expert) * words_ + word; }
    const std::uint64_t *chosen(int expert) const { return t_.chosen + at_word(expert, 0); }
    const std::uint64_t *bits(int expert) const;
    void after_swap(int there, int leaves, int comes, Visitors &result);
    void count(int there, int node, const std::uint64_t *leaves, const std::uint64_t *comes, Visitors &result) const;
    std::int64_t cost_with(int a, int b);
    void keep(int there, const Visitors &now);
    void hold(int node, int expert, bool here);
    void recount(int there, std::size_t first, std::size_t last, const std::uint64_t *leaves, const std::uint64_t *comes);

    const TravelPasses &passes_;
    const TokenBits &t_;
    const std::vector<std::int32_t> &bin_of_;
    int bins_per_node_, words_, node_words_, planes_;
    int stride_;                            // pools, and as many more without tokens as fill the last vector
    std::vector<std::int64_t> copy_cost_;   // [stride]
    std::vector<std::uint64_t> none_;           // [words] no token
    std::vector<std::uint64_t> held_;           // [nodes, planes, words] experts there of each token, in binary
    std::vector<std::uint64_t> any_, once_;     // [nodes, words] tokens with an expert, with exactly one
    std::vector<std::uint64_t> sent_;           // [E, words] as `chosen`, less what copies keep; empty: as it is
    std::vector<Visitors> visitors_;        // [nodes]
    Visitors new_a_, new_b_;                // under the proposal
    Visitors in_, out_;                     // copies into and out of every node
    int a_ = -1, b_ = -1;                   // the nodes whose homes get and lose tokens under it; -1: none
    std::int64_t cost_ = 0, new_cost_ = 0;
};

} // namespace moe_rl
