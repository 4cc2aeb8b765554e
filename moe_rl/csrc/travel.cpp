#include "travel.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace moe_rl {

namespace {

// What one pass over the words of a node's tokens needs.
struct Pass {
    const std::uint64_t *any, *once;     // of the node that they may visit
    const std::uint64_t *leaves, *comes; // of the experts that leave it and come to it
    std::span<const std::int32_t> pools_of_row;
    int pools, words;
    bool deduplicated;
};

// visitors [pools] = those from one node. A token stays a visitor when another expert of it remains: `once` has the
// tokens with exactly one. Without deduplication a token is a visitor for every expert, and visitors change.
template <bool DEDUPLICATED> [[gnu::always_inline]] inline void count_pass(Pass pass, std::int32_t *__restrict visitors) {
    const auto count = [](const Pass &at, int word) {
        const std::uint64_t leaves = at.leaves[word], comes = at.comes[word];
        return DEDUPLICATED ? std::popcount((at.any[word] & ~(leaves & at.once[word])) | comes)
                            : std::popcount(comes) - std::popcount(leaves);
    };
    if (DEDUPLICATED)
        std::fill(visitors, visitors + pass.pools, 0);
    if (pass.pools == 1) { // its words stand side by side
        for (int word = 0; word < pass.words; ++word)
            visitors[0] += count(pass, word);
        return;
    }
    for (const std::int32_t pools : pass.pools_of_row) {
        for (int pool = 0; pool < pools; ++pool)
            visitors[pool] += count(pass, pool);
        pass.any += pools;
        pass.once += pools;
        pass.leaves += pools;
        pass.comes += pools;
    }
}

void count_portably(const Pass &pass, std::int32_t *visitors) { pass.deduplicated ? count_pass<true>(pass, visitors) : count_pass<false>(pass, visitors); }

// target_clones knows no feature for counting bits in vectors, hence by hand.
#ifdef MOE_RL_HAS_VECTOR_CLONES
__attribute__((target("popcnt"))) void count_by_word(const Pass &pass, std::int32_t *visitors) {
    pass.deduplicated ? count_pass<true>(pass, visitors) : count_pass<false>(pass, visitors);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,prefer-vector-width=512"))) void
count_by_vector(const Pass &pass, std::int32_t *visitors) {
    pass.deduplicated ? count_pass<true>(pass, visitors) : count_pass<false>(pass, visitors);
}
const auto count_words = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return count_by_vector;
    return __builtin_cpu_supports("popcnt") ? count_by_word : count_portably;
}();
#else
constexpr auto count_words = count_portably;
#endif

// Adds the tokens of `comes` to counts in binary, plane i with the bits 2^i, and takes those of `leaves` off. A token of
// both keeps its count; a carry runs on where a bit was 1, a borrow where it was 0.
template <class Words>
[[gnu::always_inline]] inline void recount_at(const std::uint64_t *leaves, const std::uint64_t *comes,
                                              std::uint64_t *held, int planes, std::size_t words, std::uint64_t *any,
                                              std::uint64_t *once, std::size_t at) {
    Words come, carry, before;
    std::memcpy(&come, comes + at, sizeof(Words));
    std::memcpy(&carry, leaves + at, sizeof(Words));
    carry ^= come;
    Words ones = come ^ come, more = ones;
    for (int plane = 0; plane < planes; ++plane) {
        std::memcpy(&before, held + plane * words + at, sizeof(Words));
        const Words now = before ^ carry;
        carry &= ~(before ^ come);
        std::memcpy(held + plane * words + at, &now, sizeof(Words));
        if (plane == 0)
            ones = now;
        else
            more |= now;
    }
    const Words either = ones | more, one = ones & ~more;
    std::memcpy(any + at, &either, sizeof(Words));
    std::memcpy(once + at, &one, sizeof(Words));
}

MOE_RL_VECTOR_CLONES void recount_words(const std::uint64_t *leaves, const std::uint64_t *comes, std::uint64_t *held,
                                        int planes, std::size_t words, std::size_t first, std::size_t last,
                                        std::uint64_t *any, std::uint64_t *once) {
    using Eight [[gnu::vector_size(64)]] = std::uint64_t;
    std::size_t at = first;
    for (; at + 8 <= last; at += 8)
        recount_at<Eight>(leaves, comes, held, planes, words, any, once, at);
    for (; at < last; ++at)
        recount_at<std::uint64_t>(leaves, comes, held, planes, words, any, once, at);
}

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

// Changes in what the two nodes of a proposal are sent, [nodes, pools].
struct Change {
    const std::int32_t *after, *before;
};

// The cost of copies into, or out of, the busiest node of every pool when the visitors of nodes a and b change; -1: no
// such node. `stride` pools are priced, a multiple of sixteen.
MOE_RL_VECTOR_CLONES std::int64_t busiest_node(const std::int64_t *__restrict copy_cost,
                                               const std::int32_t *__restrict in, const std::int32_t *__restrict out,
                                               int nodes, int stride, int a, Change of_a, int b, Change of_b) {
    using Sixteen [[gnu::vector_size(64)]] = std::int32_t;
    const auto read = [](Sixteen &into, const std::int32_t *values) { std::memcpy(&into, values, sizeof(into)); };
    std::int64_t cost = 0;
    for (int pool = 0; pool < stride; pool += 16) {
        Sixteen into_a{}, into_b{}, most{}, after, before, leave, come;
        for (int node = 0; node < nodes; ++node) {
            const std::ptrdiff_t place = static_cast<std::ptrdiff_t>(node) * stride + pool;
            read(leave, out + place);
            read(after, of_a.after + place);
            read(before, of_a.before + place);
            into_a += after - before;
            leave += after - before;
            read(after, of_b.after + place);
            read(before, of_b.before + place);
            into_b += after - before;
            leave += after - before;
            most = leave > most ? leave : most;
        }
        for (int node = 0; node < nodes; ++node) {
            read(come, in + static_cast<std::ptrdiff_t>(node) * stride + pool);
            if (node == a)
                come += into_a;
            else if (node == b)
                come += into_b;
            most = come > most ? come : most;
        }
        for (int i = 0; i < 16; ++i)
            cost += copy_cost[pool + i] * most[i];
    }
    return cost;
}

} // namespace

Travel::Travel(const TokenBits &tokens, const std::vector<std::int32_t> &bin_of, int bins)
    : t_(tokens), bin_of_(bin_of), bins_per_node_(bins / t_.nodes), words_(t_.words()),
      node_words_(words_ / t_.nodes), planes_(std::bit_width(static_cast<unsigned>(std::max(1, t_.top_k)))),
      stride_((t_.pools + 15) / 16 * 16), copy_cost_(t_.copy_cost, t_.copy_cost + t_.pools), none_(words_, 0),
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
    count_words({any_.data() + held, once_.data() + held, leaves + from, comes + from, t_.pools_of_row, t_.pools,
                 node_words_, t_.deduplicated},
                visitors);
}

// The cost when the nodes a and b are sent `new_a_` and `new_b_`; -1: no node, which changes nothing.
std::int64_t Travel::cost_with(int a, int b) {
    const std::int32_t *of_a = visitors_[std::max(a, 0)].data(), *of_b = visitors_[std::max(b, 0)].data();
    return busiest_node(copy_cost_.data(), in_.data(), out_.data(), t_.nodes, stride_, a,
                        {a < 0 ? of_a : new_a_.data(), of_a}, b, {b < 0 ? of_b : new_b_.data(), of_b});
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
    recount_words(leaves, comes, held_.data() + at * planes_, planes_, words_, first, last, any_.data() + at,
                  once_.data() + at);
}

} // namespace moe_rl
