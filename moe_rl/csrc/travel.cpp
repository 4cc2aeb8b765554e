#include "travel.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#ifdef MOE_RL_HAS_VECTOR_CLONES
#include <immintrin.h>
#endif

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
[[gnu::always_inline]] inline void count_pass(Pass pass, std::int32_t *__restrict visitors) {
    if (pass.deduplicated)
        std::fill(visitors, visitors + pass.pools, 0);
    for (const std::int32_t pools : pass.pools_of_row) {
        for (int pool = 0; pool < pools; ++pool) {
            const std::uint64_t leaves = pass.leaves[pool], comes = pass.comes[pool];
            visitors[pool] += pass.deduplicated
                                  ? std::popcount((pass.any[pool] & ~(leaves & pass.once[pool])) | comes)
                                  : std::popcount(comes) - std::popcount(leaves);
        }
        pass.any += pools;
        pass.once += pools;
        pass.leaves += pools;
        pass.comes += pools;
    }
}

void count_portably(const Pass &pass, std::int32_t *visitors) { count_pass(pass, visitors); }

// target_clones knows no feature for counting bits in vectors, hence by hand.
#ifdef MOE_RL_HAS_VECTOR_CLONES
__attribute__((target("popcnt"))) void count_by_word(const Pass &pass, std::int32_t *visitors) {
    count_pass(pass, visitors);
}
#define MOE_RL_COUNTS_VECTORS __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq")))
struct Eight {
    __m512i any, once, leaves, comes;
};
MOE_RL_COUNTS_VECTORS inline __m512i count_eight(const Eight &words, bool deduplicated) {
    return deduplicated ? _mm512_popcnt_epi64((words.any & ~(words.leaves & words.once)) | words.comes)
                        : _mm512_popcnt_epi64(words.comes) - _mm512_popcnt_epi64(words.leaves);
}
MOE_RL_COUNTS_VECTORS inline Eight eight_at(const Pass &pass, std::ptrdiff_t word) {
    return {_mm512_loadu_si512(pass.any + word), _mm512_loadu_si512(pass.once + word),
            _mm512_loadu_si512(pass.leaves + word), _mm512_loadu_si512(pass.comes + word)};
}
MOE_RL_COUNTS_VECTORS inline Eight first_at(const Pass &pass, std::ptrdiff_t word, std::ptrdiff_t count) {
    const auto held = static_cast<__mmask8>((1 << count) - 1);
    return {_mm512_maskz_loadu_epi64(held, pass.any + word), _mm512_maskz_loadu_epi64(held, pass.once + word),
            _mm512_maskz_loadu_epi64(held, pass.leaves + word), _mm512_maskz_loadu_epi64(held, pass.comes + word)};
}
// Eight pools at a time, all their words in a row, so that their sum stays in a register.
MOE_RL_COUNTS_VECTORS void count_by_vector(const Pass &pass, std::int32_t *visitors) {
    const bool deduplicated = pass.deduplicated;
    if (pass.pools == 1) { // its words stand side by side
        const int words = pass.words;
        __m512i sum = _mm512_setzero_si512();
        std::ptrdiff_t word = 0;
        for (; word + 8 <= words; word += 8)
            sum += count_eight(eight_at(pass, word), deduplicated);
        if (word < words)
            sum += count_eight(first_at(pass, word, words - word), deduplicated);
        std::int64_t sums[8];
        _mm512_storeu_si512(sums, sum);
        const std::int64_t all = std::accumulate(sums, sums + 8, std::int64_t{0});
        visitors[0] = (deduplicated ? 0 : visitors[0]) + static_cast<std::int32_t>(all);
        return;
    }
    for (int pool = 0; pool < pass.pools; pool += 8) {
        const auto pools = static_cast<__mmask8>(pass.pools - pool >= 8 ? 0xff : (1 << (pass.pools - pool)) - 1);
        __m512i sum = deduplicated ? _mm512_setzero_si512()
                                   : _mm512_maskz_cvtepi32_epi64(pools, _mm256_maskz_loadu_epi32(pools, visitors + pool));
        std::ptrdiff_t word = pool;
        for (const std::int32_t in_row : pass.pools_of_row) {
            if (in_row <= pool)
                break;
            sum += count_eight(in_row - pool >= 8 ? eight_at(pass, word) : first_at(pass, word, in_row - pool),
                               deduplicated);
            word += in_row;
        }
        _mm256_mask_storeu_epi32(visitors + pool, pools, _mm512_maskz_cvtepi64_epi32(pools, sum));
    }
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
    cost_ = cost_with(-1, visitors_[0], -1, visitors_[0]);
}

std::int64_t Travel::cost_of_swap(int first, int second, int a, int b) {
    a /= bins_per_node_;
    b /= bins_per_node_;
    if (a == b)
        return cost_;
    after_swap(a, first, second, new_a_);
    after_swap(b, second, first, new_b_);
    return new_cost_ = cost_with(a, new_a_, b, new_b_);
}

void Travel::swap(int first, int second, int a, int b) {
    a /= bins_per_node_;
    b /= bins_per_node_;
    if (a == b)
        return;
    cost_ = new_cost_;
    keep(a, new_a_);
    keep(b, new_b_);
    recount(a, 0, words_, bits(first), bits(second));
    recount(b, 0, words_, bits(second), bits(first));
}

// Tokens of `leaves` go to its home again, those of `comes` no longer. -1: no such home, or the same once more.
std::pair<int, int> Travel::homes_of(const CopyChange &change) const {
    const int a = home(change.leaves), b = home(change.comes);
    return {a, b == a ? -1 : b};
}

std::int64_t Travel::cost_of_exchange(std::span<const CopyChange> changes) {
    const auto [a, b] = homes_of(changes[0]);
    const auto count_all = [&](int there, Visitors &now) {
        now = visitors_[std::max(there, 0)];
        for (const auto &[node, leaves, comes] : changes)
            if (there >= 0)
                count(there, node, home(comes) == there ? bits(comes) : none_.data(),
                      home(leaves) == there ? chosen(leaves) : none_.data(), now);
    };
    count_all(a, new_a_);
    count_all(b, new_b_);
    return new_cost_ = cost_with(a, new_a_, b, new_b_);
}

void Travel::exchange(std::span<const CopyChange> changes) {
    const auto [a, b] = homes_of(changes[0]);
    cost_ = new_cost_;
    if (a >= 0)
        keep(a, new_a_);
    if (b >= 0)
        keep(b, new_b_);
    for (const auto &[node, leaves, comes] : changes) {
        if (leaves >= 0)
            holds_no_more(node, leaves);
        if (comes >= 0)
            holds(node, comes);
    }
}

// The node's tokens of the expert go to its home again.
void Travel::holds_no_more(int node, int expert) {
    const std::size_t first = static_cast<std::size_t>(node) * node_words_, last = first + node_words_;
    recount(home(expert), first, last, none_.data(), chosen(expert));
    std::copy(chosen(expert) + first, chosen(expert) + last, sent_.begin() + at_word(expert, first));
}

// They go there no longer.
void Travel::holds(int node, int expert) {
    if (sent_.empty())
        sent_.assign(t_.chosen, t_.chosen + bin_of_.size() * static_cast<std::size_t>(words_));
    const std::size_t first = static_cast<std::size_t>(node) * node_words_, last = first + node_words_;
    recount(home(expert), first, last, bits(expert), none_.data());
    std::fill(sent_.begin() + at_word(expert, first), sent_.begin() + at_word(expert, last), 0);
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

// The cost when the nodes a and b are sent this; -1: no node.
std::int64_t Travel::cost_with(int a, const Visitors &of_a, int b, const Visitors &of_b) {
    return busiest_node(copy_cost_.data(), in_.data(), out_.data(), t_.nodes, stride_, a,
                        {of_a.data(), visitors_[std::max(a, 0)].data()}, b,
                        {of_b.data(), visitors_[std::max(b, 0)].data()});
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
