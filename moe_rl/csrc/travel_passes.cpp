#include "travel_passes.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "parallel.h"

#ifdef MOE_RL_HAS_VECTOR_CLONES
#include <immintrin.h>
#endif

namespace moe_rl {

namespace {

// Templates take the type of a vector, since one that is wider than the machine's is split into words that go through the
// stack. So target_clones, which compile the same lines for every machine, will not do.
struct Vector16 { // x86-64 and ARM64 have always had these
    using Words [[gnu::vector_size(16)]] = std::uint64_t;
    using Pools [[gnu::vector_size(16)]] = std::int32_t;
};
struct Vector32 {
    using Words [[gnu::vector_size(32)]] = std::uint64_t;
    using Pools [[gnu::vector_size(32)]] = std::int32_t;
};
struct Vector64 {
    using Words [[gnu::vector_size(64)]] = std::uint64_t;
    using Pools [[gnu::vector_size(64)]] = std::int32_t;
};

template <bool DEDUPLICATED>
[[gnu::always_inline]] inline std::int32_t visitors_of_word(const CountPass &pass, std::ptrdiff_t word) {
    const std::uint64_t leaves = pass.leaves[word], comes = pass.comes[word];
    return DEDUPLICATED ? std::popcount((pass.any[word] & ~(leaves & pass.once[word])) | comes)
                        : std::popcount(comes) - std::popcount(leaves);
}

template <bool DEDUPLICATED>
[[gnu::always_inline]] inline void count_words(CountPass pass, std::int32_t *__restrict visitors) {
    if (DEDUPLICATED)
        std::fill(visitors, visitors + pass.pools, 0);
    if (pass.pools == 1) { // its words stand side by side
        for (int word = 0; word < pass.words; ++word)
            visitors[0] += visitors_of_word<DEDUPLICATED>(pass, word);
        return;
    }
    std::ptrdiff_t first = 0;
    for (const std::int32_t pools : pass.pools_of_row) {
        for (int pool = 0; pool < pools; ++pool)
            visitors[pool] += visitors_of_word<DEDUPLICATED>(pass, first + pool);
        first += pools;
    }
}

[[gnu::always_inline]] inline void count_all_words(const CountPass &pass, std::int32_t *visitors) {
    pass.deduplicated ? count_words<true>(pass, visitors) : count_words<false>(pass, visitors);
}

// Adds the tokens of `comes` to counts in binary, plane i with the bits 2^i, and takes those of `leaves` off. A token of
// both keeps its count; a carry runs on where a bit was 1, a borrow where it was 0.
template <class Words> [[gnu::always_inline]] inline void recount_at(const RecountPass &pass, std::size_t at) {
    Words come, carry, before;
    std::memcpy(&come, pass.comes + at, sizeof(Words));
    std::memcpy(&carry, pass.leaves + at, sizeof(Words));
    carry ^= come;
    Words ones = come ^ come, more = ones;
    for (int plane = 0; plane < pass.planes; ++plane) {
        std::uint64_t *held = pass.held + plane * pass.words + at;
        std::memcpy(&before, held, sizeof(Words));
        const Words now = before ^ carry;
        carry &= ~(before ^ come);
        std::memcpy(held, &now, sizeof(Words));
        if (plane == 0)
            ones = now;
        else
            more |= now;
    }
    const Words either = ones | more, one = ones & ~more;
    std::memcpy(pass.any + at, &either, sizeof(Words));
    std::memcpy(pass.once + at, &one, sizeof(Words));
}

template <class Words> [[gnu::always_inline]] inline void recount_words(RecountPass pass) {
    constexpr std::size_t WIDTH = sizeof(Words) / sizeof(std::uint64_t);
    std::size_t at = pass.first;
    for (; at + WIDTH <= pass.last; at += WIDTH)
        recount_at<Words>(pass, at);
    for (; at < pass.last; ++at)
        recount_at<std::uint64_t>(pass, at);
}

template <class Pools> [[gnu::always_inline]] inline std::int64_t busiest_node(BusiestPass pass) {
    constexpr int WIDTH = sizeof(Pools) / sizeof(std::int32_t);
    const VisitorChange &of_a = pass.a, &of_b = pass.b;
    std::int64_t cost = 0;
    for (int pool = 0; pool < pass.pools; pool += WIDTH) {
        Pools into_a{}, into_b{}, most{}, after, before, leave, come;
        for (int node = 0; node < pass.nodes; ++node) {
            const std::ptrdiff_t place = static_cast<std::ptrdiff_t>(node) * pass.stride + pool;
            std::memcpy(&leave, pass.out + place, sizeof(Pools));
            std::memcpy(&after, of_a.after + place, sizeof(Pools));
            std::memcpy(&before, of_a.before + place, sizeof(Pools));
            into_a += after - before;
            leave += after - before;
            std::memcpy(&after, of_b.after + place, sizeof(Pools));
            std::memcpy(&before, of_b.before + place, sizeof(Pools));
            into_b += after - before;
            leave += after - before;
            most = leave > most ? leave : most;
        }
        for (int node = 0; node < pass.nodes; ++node) {
            std::memcpy(&come, pass.into + static_cast<std::ptrdiff_t>(node) * pass.stride + pool, sizeof(Pools));
            if (node == of_a.node)
                come += into_a;
            else if (node == of_b.node)
                come += into_b;
            most = come > most ? come : most;
        }
        for (int i = 0; i < WIDTH; ++i)
            cost += pass.copy_cost[pool + i] * most[i];
    }
    return cost;
}

void count_portably(const CountPass &pass, std::int32_t *visitors) { count_all_words(pass, visitors); }
void recount_portably(const RecountPass &pass) { recount_words<Vector16::Words>(pass); }
std::int64_t busiest_portably(const BusiestPass &pass) { return busiest_node<Vector16::Pools>(pass); }
constexpr TravelPasses PORTABLE{"portable", count_portably, recount_portably, busiest_portably};

#ifdef MOE_RL_HAS_VECTOR_CLONES
#define MOE_RL_AVX2 __attribute__((target("avx2,popcnt")))
#define MOE_RL_AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,prefer-vector-width=512")))

MOE_RL_AVX512 void count_avx512(const CountPass &pass, std::int32_t *visitors) { count_all_words(pass, visitors); }
MOE_RL_AVX512 void recount_avx512(const RecountPass &pass) { recount_words<Vector64::Words>(pass); }
MOE_RL_AVX512 std::int64_t busiest_avx512(const BusiestPass &pass) { return busiest_node<Vector64::Pools>(pass); }
constexpr TravelPasses AVX512{"avx512", count_avx512, recount_avx512, busiest_avx512};

// AVX2 has no instruction that counts bits, but one that looks up sixteen bytes: the count of every half byte.
//
// Example: the byte 0b1101'0001 is looked up as 1101 and 0001, so its count is 3 + 1.
MOE_RL_AVX2 inline __m256i bits_of_bytes(__m256i words) {
    const __m256i count = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, //
                                           0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
    const __m256i half = _mm256_set1_epi8(15);
    const __m256i low = _mm256_shuffle_epi8(count, _mm256_and_si256(words, half));
    return _mm256_add_epi8(low, _mm256_shuffle_epi8(count, _mm256_and_si256(_mm256_srli_epi16(words, 4), half)));
}

MOE_RL_AVX2 inline __m256i four_words(const std::uint64_t *words) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(words));
}

// Counts of four words, byte by byte, until `sums` adds the bytes of each word up. A byte holds 31 counts of up to 8.
struct FourCounts {
    __m256i more, fewer;
};
constexpr int COUNTS_OF_A_BYTE = 31;

template <bool DEDUPLICATED>
MOE_RL_AVX2 inline void add_four_words(const CountPass &pass, std::ptrdiff_t at, FourCounts &counts) {
    const __m256i leaves = four_words(pass.leaves + at), comes = four_words(pass.comes + at);
    if (DEDUPLICATED) {
        const __m256i gone = _mm256_and_si256(leaves, four_words(pass.once + at));
        const __m256i visitors = _mm256_or_si256(_mm256_andnot_si256(gone, four_words(pass.any + at)), comes);
        counts.more = _mm256_add_epi8(counts.more, bits_of_bytes(visitors));
    } else {
        counts.more = _mm256_add_epi8(counts.more, bits_of_bytes(comes));
        counts.fewer = _mm256_add_epi8(counts.fewer, bits_of_bytes(leaves));
    }
}

template <bool DEDUPLICATED> MOE_RL_AVX2 inline __m256i sums(const FourCounts &counts) {
    const __m256i nothing = _mm256_setzero_si256(), more = _mm256_sad_epu8(counts.more, nothing);
    return DEDUPLICATED ? more : _mm256_sub_epi64(more, _mm256_sad_epu8(counts.fewer, nothing));
}

// Adds the counts of eight pools to `visitors`, up to the first row of words that has not all of them. Returns that row; `at`
// is then where its words of these pools stand.
template <bool DEDUPLICATED>
MOE_RL_AVX2 inline std::size_t count_eight_pools(const CountPass &pass, int first_pool, std::ptrdiff_t &at,
                                                 std::int32_t *visitors) {
    const std::span<const std::int32_t> pools_of_row = pass.pools_of_row;
    const __m256i nothing = _mm256_setzero_si256();
    std::size_t row = 0;
    at = first_pool;
    while (row < pools_of_row.size() && pools_of_row[row] >= first_pool + 8) {
        FourCounts low{nothing, nothing}, high{nothing, nothing};
        for (int added = 0; added < COUNTS_OF_A_BYTE; ++added) {
            add_four_words<DEDUPLICATED>(pass, at, low);
            add_four_words<DEDUPLICATED>(pass, at + 4, high);
            at += pools_of_row[row++];
            if (row == pools_of_row.size() || pools_of_row[row] < first_pool + 8)
                break;
        }
        // The lower halves of eight sums of 64 bits, in order: the shuffle joins them as 0 1 4 5 2 3 6 7.
        const __m256 shuffled = _mm256_shuffle_ps(_mm256_castsi256_ps(sums<DEDUPLICATED>(low)),
                                                  _mm256_castsi256_ps(sums<DEDUPLICATED>(high)), 0b10'00'10'00);
        const __m256i eight = _mm256_permute4x64_epi64(_mm256_castps_si256(shuffled), 0b11'01'10'00);
        auto *there = reinterpret_cast<__m256i *>(visitors + first_pool);
        _mm256_storeu_si256(there, _mm256_add_epi32(_mm256_loadu_si256(there), eight));
    }
    return row;
}

// The words of one pool, which stand side by side.
template <bool DEDUPLICATED> MOE_RL_AVX2 inline std::int32_t count_one_pool(const CountPass &pass) {
    const __m256i nothing = _mm256_setzero_si256();
    __m256i four = nothing;
    int word = 0;
    while (word + 4 <= pass.words) {
        FourCounts counts{nothing, nothing};
        for (int added = 0; added < COUNTS_OF_A_BYTE && word + 4 <= pass.words; ++added, word += 4)
            add_four_words<DEDUPLICATED>(pass, word, counts);
        four = _mm256_add_epi64(four, sums<DEDUPLICATED>(counts));
    }
    alignas(32) std::int64_t sum[4];
    _mm256_store_si256(reinterpret_cast<__m256i *>(sum), four);
    auto count = static_cast<std::int32_t>(sum[0] + sum[1] + sum[2] + sum[3]);
    for (; word < pass.words; ++word)
        count += visitors_of_word<DEDUPLICATED>(pass, word);
    return count;
}

template <bool DEDUPLICATED> MOE_RL_AVX2 inline void count_pools(CountPass pass, std::int32_t *visitors) {
    if (DEDUPLICATED)
        std::fill(visitors, visitors + pass.pools, 0);
    if (pass.pools == 1) {
        visitors[0] += count_one_pool<DEDUPLICATED>(pass);
        return;
    }
    for (int first_pool = 0; first_pool < pass.pools; first_pool += 8) {
        std::ptrdiff_t at = 0;
        std::size_t row = count_eight_pools<DEDUPLICATED>(pass, first_pool, at, visitors);
        for (; row < pass.pools_of_row.size(); at += pass.pools_of_row[row++]) {
            const int last_pool = std::min(first_pool + 8, pass.pools_of_row[row]);
            for (int pool = first_pool; pool < last_pool; ++pool)
                visitors[pool] += visitors_of_word<DEDUPLICATED>(pass, at + pool - first_pool);
        }
    }
}

MOE_RL_AVX2 void count_avx2(const CountPass &pass, std::int32_t *visitors) {
    pass.deduplicated ? count_pools<true>(pass, visitors) : count_pools<false>(pass, visitors);
}
MOE_RL_AVX2 void recount_avx2(const RecountPass &pass) { recount_words<Vector32::Words>(pass); }
MOE_RL_AVX2 std::int64_t busiest_avx2(const BusiestPass &pass) { return busiest_node<Vector32::Pools>(pass); }
constexpr TravelPasses AVX2{"avx2", count_avx2, recount_avx2, busiest_avx2};
#endif

const TravelPasses *chosen_by_test = nullptr;

} // namespace

const std::vector<TravelPasses> &travel_passes() {
    static const std::vector<TravelPasses> passes = [] {
        std::vector<TravelPasses> possible;
#ifdef MOE_RL_HAS_VECTOR_CLONES
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            possible.push_back(AVX512);
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt"))
            possible.push_back(AVX2);
#endif
        possible.push_back(PORTABLE);
        return possible;
    }();
    return passes;
}

const TravelPasses &travel_passes_in_use() { return chosen_by_test ? *chosen_by_test : travel_passes().front(); }

void use_travel_passes(std::string_view name) {
    for (const TravelPasses &passes : travel_passes())
        if (passes.name == name) {
            chosen_by_test = &passes;
            return;
        }
    throw std::invalid_argument("this machine has no passes of that name");
}

} // namespace moe_rl
