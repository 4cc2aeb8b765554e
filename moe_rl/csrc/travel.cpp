#include "travel.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "parallel.h"

namespace moe_rl {

namespace {

// Into one node, and out of every one, [nodes, pools], go by as much more as `now` is above `before`, which follows.
MOE_RL_VECTOR_CLONES void follow_visitors(const std::int32_t *__restrict now, int nodes, int pools,
                                          std::int32_t *__restrict before, std::int32_t *__restrict into,
                                          std::int32_t *__restrict out) {
    for (int node = 0; node < nodes; ++node) {
        const std::ptrdiff_t first = static_cast<std::ptrdiff_t>(node) * pools;
        for (int pool = 0; pool < pools; ++pool) {
            const std::int32_t more = now[first + pool] - before[first + pool];
            into[pool] += more;
            out[first + pool] += more;
            before[first + pool] = now[first + pool];
        }
    }
}

} // namespace

Travel::Travel(const TokenBits &tokens, const std::vector<std::int32_t> &bin_of, int bins)
    : passes_(travel_passes_in_use()), t_(tokens), bin_of_(bin_of), bins_per_node_(bins / t_.nodes), words_(t_.words()),
      node_words_(words_ / t_.nodes), planes_(std::bit_width(static_cast<unsigned>(std::max(1, t_.top_k)))),
      stride_((t_.pools + WIDEST_POOLS - 1) / WIDEST_POOLS * WIDEST_POOLS),
      copy_cost_(t_.copy_cost, t_.copy_cost + t_.pools), none_(words_, 0),
      held_(static_cast<std::size_t>(t_.nodes) * planes_ * words_, 0),
      any_(static_cast<std::size_t>(t_.nodes) * words_, 0), once_(any_),
      visitors_(t_.nodes, Visitors(static_cast<std::size_t>(t_.nodes) * stride_, 0)), new_a_(visitors_[0]),
      new_b_(new_a_), in_(new_a_), out_(new_a_) {
    copy_cost_.resize(stride_, 0);
    for (std::size_t expert = 0; expert < bin_of_.size(); ++expert) {
        const int node = home(static_cast<int>(expert));
        after_swap(node, -1, static_cast<int>(expert), new_a_);
        keep(node, new_a_);
        recount(node, 0, words_, none_.data(), bits(static_cast<int>(expert)));
    }
    cost_ = cost_with(-1, -1);
}

std::int64_t Travel::cost_of_swap(int first, int second, int a, int b) {
    a_ = a / bins_per_node_;
    b_ = b / bins_per_node_;
    if (a_ == b_)
        return cost_;
    after_swap(a_, first, second, new_a_);
    after_swap(b_, second, first, new_b_);
    return new_cost_ = cost_with(a_, b_);
}

void Travel::swap(int first, int second) {
    if (a_ == b_)
        return;
    cost_ = new_cost_;
    keep(a_, new_a_);
    keep(b_, new_b_);
    recount(a_, 0, words_, bits(first), bits(second));
    recount(b_, 0, words_, bits(second), bits(first));
}

// Tokens of `leaves` go to its home again, those of `comes` no longer.
std::int64_t Travel::cost_of_exchange(std::span<const CopyChange> changes) {
    a_ = home(changes[0].leaves);
    b_ = home(changes[0].comes) == a_ ? -1 : home(changes[0].comes);
    const auto count_all = [&](int there, Visitors &now) {
        now = visitors_[std::max(there, 0)];
        for (const auto &[node, leaves, comes] : changes)
            if (there >= 0)
                count(there, node, home(comes) == there ? bits(comes) : none_.data(),
                      home(leaves) == there ? chosen(leaves) : none_.data(), now);
    };
    count_all(a_, new_a_);
    count_all(b_, new_b_);
    return new_cost_ = cost_with(a_, b_);
}

void Travel::exchange(std::span<const CopyChange> changes) {
    cost_ = new_cost_;
    if (a_ >= 0)
        keep(a_, new_a_);
    if (b_ >= 0)
        keep(b_, new_b_);
    for (const auto &[node, leaves, comes] : changes) {
        if (leaves >= 0)
            hold(node, leaves, false);
        if (comes >= 0)
            hold(node, comes, true);
    }
}

// The node's tokens of the expert go to its home no longer, or again.
void Travel::hold(int node, int expert, bool here) {
    if (sent_.empty())
        sent_.assign(t_.chosen, t_.chosen + bin_of_.size() * static_cast<std::size_t>(words_));
    const std::size_t first = static_cast<std::size_t>(node) * node_words_, last = first + node_words_;
    recount(home(expert), first, last, here ? chosen(expert) : none_.data(), here ? none_.data() : chosen(expert));
    const std::uint64_t *from = here ? none_.data() : chosen(expert);
    std::copy(from + first, from + last, sent_.begin() + at_word(expert, first));
}

const std::uint64_t *Travel::bits(int expert) const {
    return expert < 0 ? none_.data() : sent_.empty() ? chosen(expert) : sent_.data() + at_word(expert, 0);
}

// What the node `there` is sent from every other one once `leaves` left and `comes` came: [nodes, pools].
void Travel::after_swap(int there, int leaves, int comes, Visitors &result) {
    if (!t_.deduplicated)
        result = visitors_[there];
    const std::uint64_t *less = bits(leaves), *more = bits(comes);
    for (int node = 0; node < t_.nodes; ++node)
        if (node != there)
            count(there, node, less, more, result);
    std::fill_n(result.begin() + static_cast<std::ptrdiff_t>(there) * stride_, t_.pools, 0);
}

// The same from one node, into its part of `result`.
void Travel::count(int there, int node, const std::uint64_t *leaves, const std::uint64_t *comes, Visitors &result) const {
    const std::size_t from = static_cast<std::size_t>(node) * node_words_;
    const std::size_t held = static_cast<std::size_t>(there) * words_ + from;
    std::int32_t *visitors = result.data() + static_cast<std::size_t>(node) * stride_;
    passes_.count({any_.data() + held, once_.data() + held, leaves + from, comes + from, t_.pools_of_row, t_.pools,
                   node_words_, t_.deduplicated},
                  visitors);
}

// The cost when the nodes a and b are sent `new_a_` and `new_b_`; -1: no node, which changes nothing.
std::int64_t Travel::cost_with(int a, int b) {
    const std::int32_t *of_a = visitors_[std::max(a, 0)].data(), *of_b = visitors_[std::max(b, 0)].data();
    return passes_.busiest({copy_cost_.data(), in_.data(), out_.data(), t_.nodes, t_.pools, stride_,
                            {a, a < 0 ? of_a : new_a_.data(), of_a},
                            {b, b < 0 ? of_b : new_b_.data(), of_b}});
}

void Travel::keep(int there, const Visitors &now) {
    follow_visitors(now.data(), t_.nodes, stride_, visitors_[there].data(),
                    in_.data() + static_cast<std::size_t>(there) * stride_, out_.data());
}

// Follows `held_`, `any_` and `once_` of a node in the words first .. last - 1.
void Travel::recount(int there, std::size_t first, std::size_t last, const std::uint64_t *leaves,
                     const std::uint64_t *comes) {
    if (!t_.deduplicated)
        return;
    const std::size_t at = static_cast<std::size_t>(there) * words_;
    passes_.recount({leaves, comes, held_.data() + at * planes_, planes_, static_cast<std::size_t>(words_), first, last,
                     any_.data() + at, once_.data() + at});
}

} // namespace moe_rl
