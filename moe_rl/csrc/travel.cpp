#include "travel.h"

#include <algorithm>
#include <bit>

namespace moe_rl {

namespace {

// Tokens of the words `from` .. `to` - 1 with an expert in a node that `leaves` leaves and `comes` enters. A token stays
// a visitor when another expert of it remains: `once` has the tokens with exactly one.
inline std::int32_t visitors_of(const std::uint64_t *any, const std::uint64_t *once, const std::uint64_t *leaves,
                                const std::uint64_t *comes, std::int32_t from, std::int32_t to) {
    std::int32_t count = 0;
    for (std::int32_t word = from; word < to; ++word)
        count += std::popcount((any[word] & ~(leaves[word] & once[word])) | comes[word]);
    return count;
}

MOE_RL_VECTOR_CLONES void visitors_after_swap(const std::uint64_t *any, const std::uint64_t *once,
                                              const std::uint64_t *leaves, const std::uint64_t *comes,
                                              const std::int32_t *block_start, int blocks, std::int32_t *visitors) {
    for (int block = 0; block < blocks; ++block)
        visitors[block] = visitors_of(any, once, leaves, comes, block_start[block], block_start[block + 1]);
}

} // namespace

Travel::Travel(const TokenBits &tokens, const std::vector<std::int32_t> &bin_of, int bins)
    : t_(tokens), bin_of_(bin_of), bins_per_node_(bins / t_.nodes), blocks_(t_.pools * t_.nodes),
      any_(static_cast<std::size_t>(t_.nodes) * t_.words, 0), once_(any_), none_(t_.words, 0),
      visitors_(static_cast<std::size_t>(t_.nodes) * blocks_, 0), new_a_(blocks_), new_b_(blocks_), in_(blocks_, 0),
      out_(blocks_, 0) {
    if (!t_.deduplicated)
        for (std::size_t expert = 0; expert < bin_of_.size(); ++expert)
            for (int block = 0; block < blocks_; ++block)
                rows_.push_back(count(bits(static_cast<int>(expert)), block));
    for (int node = 0; node < t_.nodes; ++node) {
        refill(node);
        after_swap(node, -1, -1, new_a_);
        keep(node, new_a_);
    }
    cost_ = total();
}

std::int64_t Travel::cost_of_swap(int first, int second, int a, int b) {
    a /= bins_per_node_;
    b /= bins_per_node_;
    if (a == b)
        return cost_;
    after_swap(a, first, second, new_a_);
    after_swap(b, second, first, new_b_);
    std::int64_t cost = 0;
    for (int pool = 0; pool < t_.pools; ++pool)
        cost += t_.copy_cost[pool] * busiest(pool, a, b);
    return cost;
}

void Travel::swap(int first, int second, int a, int b) {
    a /= bins_per_node_;
    b /= bins_per_node_;
    if (a == b)
        return;
    cost_ = cost_of_swap(first, second, a * bins_per_node_, b * bins_per_node_);
    keep(a, new_a_);
    keep(b, new_b_);
    refill(a);
    refill(b);
}

std::int64_t Travel::cost_of_exchange(int node, int leaves, int comes) {
    const int a = leaves < 0 ? -1 : home(leaves), b = comes < 0 ? -1 : home(comes);
    std::int64_t cost = 0;
    for (int pool = 0; pool < t_.pools; ++pool) {
        const int first = pool * t_.nodes, block = first + node;
        // More comes to `a`, less to `b`; where they are one node both at once.
        const std::int32_t to_a = a < 0 ? 0 : after_exchange(a, block, leaves, a == b ? comes : -1) - visitors(a)[block];
        const std::int32_t to_b = b < 0 || a == b ? 0 : after_exchange(b, block, -1, comes) - visitors(b)[block];
        std::int32_t most = out_[block] + to_a + to_b;
        for (int other = 0; other < t_.nodes; ++other)
            most = std::max({most, other == node ? 0 : out_[first + other],
                             in_[first + other] + (other == a ? to_a : 0) + (other == b ? to_b : 0)});
        cost += t_.copy_cost[pool] * most;
    }
    return cost;
}

void Travel::exchange(int node, int leaves, int comes) {
    if (sent_.empty())
        sent_.assign(t_.chosen, t_.chosen + bin_of_.size() * static_cast<std::size_t>(t_.words));
    for (const int expert : {leaves, comes}) {
        if (expert < 0)
            continue;
        const int there = home(expert);
        for (int block = node; block < blocks_; block += t_.nodes) {
            const std::int32_t now = after_exchange(there, block, expert == leaves ? expert : -1,
                                                    expert == leaves ? -1 : expert);
            const std::int32_t change = now - visitors(there)[block];
            visitors(there)[block] = now;
            in_[block - node + there] += change;
            out_[block] += change;
            const std::int32_t from = t_.block_start[block], to = t_.block_start[block + 1];
            const std::size_t at = static_cast<std::size_t>(expert) * t_.words;
            for (std::int32_t word = from; word < to; ++word)
                sent_[at + word] = expert == leaves ? t_.chosen[at + word] : 0;
            if (t_.deduplicated)
                refill_words(there, from, to);
            else
                rows_[static_cast<std::size_t>(expert) * blocks_ + block] = count(bits(expert), block);
        }
    }
    cost_ = total();
}

// Visitors of the node `there` from a block whose node gives up its copy of `leaves` and gets one of `comes`.
std::int32_t Travel::after_exchange(int there, int block, int leaves, int comes) {
    const std::uint64_t *sent_again = leaves < 0 ? none_.data() : t_.chosen + std::int64_t{leaves} * t_.words;
    if (!t_.deduplicated)
        return visitors(there)[block] + (leaves < 0 ? 0 : count(sent_again, block)) - (comes < 0 ? 0 : row(comes, block));
    const std::int64_t from = static_cast<std::int64_t>(there) * t_.words;
    return visitors_of(any_.data() + from, once_.data() + from, bits(comes), sent_again, t_.block_start[block],
                       t_.block_start[block + 1]);
}

const std::uint64_t *Travel::bits(int expert) const {
    if (expert < 0)
        return none_.data();
    return (sent_.empty() ? t_.chosen : sent_.data()) + static_cast<std::int64_t>(expert) * t_.words;
}

std::int32_t Travel::count(const std::uint64_t *chosen, int block) const {
    std::int32_t sum = 0;
    for (std::int32_t word = t_.block_start[block]; word < t_.block_start[block + 1]; ++word)
        sum += std::popcount(chosen[word]);
    return sum;
}

// [blocks] copies that the node gets of each block once `leaves` left and `comes` came.
void Travel::after_swap(int node, int leaves, int comes, std::vector<std::int32_t> &result) {
    if (t_.deduplicated) {
        const std::int64_t from = static_cast<std::int64_t>(node) * t_.words;
        visitors_after_swap(any_.data() + from, once_.data() + from, bits(leaves), bits(comes), t_.block_start, blocks_,
                            result.data());
        return;
    }
    for (int block = 0; block < blocks_; ++block)
        result[block] = (leaves < 0 ? all_rows_[block] : visitors(node)[block] - row(leaves, block)) +
                        (comes < 0 ? 0 : row(comes, block));
}

// Copies of the busiest node of a pool, in or out, when the nodes a and b have `new_a_` and `new_b_`.
std::int64_t Travel::busiest(int pool, int a, int b) const {
    const std::int32_t *into = in_.data() + static_cast<std::ptrdiff_t>(pool) * t_.nodes;
    const std::int32_t *out = out_.data() + static_cast<std::ptrdiff_t>(pool) * t_.nodes;
    std::int32_t most = 0;
    if (a < 0) {
        for (int node = 0; node < t_.nodes; ++node)
            most = std::max({most, into[node], out[node]});
        return most;
    }
    const std::size_t first = static_cast<std::size_t>(pool) * t_.nodes;
    const std::int32_t *old_a = visitors_.data() + static_cast<std::size_t>(a) * blocks_ + first;
    const std::int32_t *old_b = visitors_.data() + static_cast<std::size_t>(b) * blocks_ + first;
    std::int32_t into_a = 0, into_b = 0;
    for (int node = 0; node < t_.nodes; ++node) {
        const std::int32_t of_a = node == a ? 0 : new_a_[first + node] - old_a[node];
        const std::int32_t of_b = node == b ? 0 : new_b_[first + node] - old_b[node];
        into_a += of_a;
        into_b += of_b;
        most = std::max(most, out[node] + of_a + of_b);
    }
    for (int node = 0; node < t_.nodes; ++node)
        most = std::max(most, into[node] + (node == a ? into_a : node == b ? into_b : 0));
    return most;
}

std::int64_t Travel::total() const {
    std::int64_t cost = 0;
    for (int pool = 0; pool < t_.pools; ++pool)
        cost += t_.copy_cost[pool] * busiest(pool, -1, -1);
    return cost;
}

void Travel::keep(int node, const std::vector<std::int32_t> &now) {
    std::int32_t *before = visitors(node);
    for (int block = 0; block < blocks_; ++block) {
        const int source = block % t_.nodes, pool = block / t_.nodes;
        if (source != node) {
            in_[pool * t_.nodes + node] += now[block] - before[block];
            out_[block] += now[block] - before[block];
        }
        before[block] = now[block];
    }
}

void Travel::refill(int node) {
    if (t_.deduplicated) {
        refill_words(node, 0, t_.words);
        return;
    }
    all_rows_.assign(blocks_, 0);
    for (std::size_t expert = 0; expert < bin_of_.size(); ++expert)
        for (int block = 0; home(static_cast<int>(expert)) == node && block < blocks_; ++block)
            all_rows_[block] += row(static_cast<int>(expert), block);
}

void Travel::refill_words(int node, std::int32_t from, std::int32_t to) {
    std::uint64_t *any = any_.data() + static_cast<std::int64_t>(node) * t_.words;
    std::uint64_t *once = once_.data() + static_cast<std::int64_t>(node) * t_.words;
    std::fill(any + from, any + to, 0);
    std::fill(once + from, once + to, 0);
    for (std::size_t expert = 0; expert < bin_of_.size(); ++expert) {
        if (home(static_cast<int>(expert)) != node)
            continue;
        const std::uint64_t *sent = bits(static_cast<int>(expert));
        for (std::int32_t word = from; word < to; ++word) {
            once[word] = (once[word] & ~sent[word]) | (sent[word] & ~any[word]);
            any[word] |= sent[word];
        }
    }
}

} // namespace moe_rl
