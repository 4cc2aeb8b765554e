// Draws the routes of synthetic sequences: noise that follows an AR(1) process over tokens, and the K highest scores.
//
// The numpy form is moe_rl/simulators/token_routes.py: only integer operations and single float32 additions and
// multiplications, in the same order, so both give the same bits, whatever the vector width or the number of threads.

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "bindings.h"
#include "parallel.h"

namespace {

using namespace moe_rl;

constexpr std::int64_t LAYERS_AT_ONCE = 16; // of a sequence in one thread; their noise and logits stay in cache
constexpr int FEWEST = 16, FEW = 32;        // candidates that are ranked pair by pair
constexpr int CLASS = 64;                   // experts whose candidates one word names
constexpr int COEFFICIENTS = 9;
constexpr float MARGIN = 0.4F;   // by which the threshold of candidates stays below the usual K-th score
constexpr int LOWERED = 8;       // times that it goes down by as much where too few reach it
constexpr float MEMORY = 0.125F; // weight of the last token in what is usual

struct Process {
    float persistence, fresh;                // noise = persistence * noise + fresh * draw
    float inverse_deviation, linear, cubic; // draw = x (linear + cubic x^2), x the sum of four uniforms, standardized
    float limit;                             // Gumbel noise is a polynomial of the noise inside +- limit
    std::array<float, COEFFICIENTS> gumbel;  // by rising power
};

// Noise, scores and, as bytes, which scores reach the threshold, of one layer's experts and the next token.
MOE_RL_VECTOR_CLONES void next_scores(const Process &process, const float *logit, std::uint32_t counter,
                                      std::uint32_t low_key, std::uint32_t high_key, float threshold, int experts,
                                      float *noise, float *score, std::uint8_t *reaches) {
    const Process p = process;
    std::uint32_t seed = counter * 0x9e3779b9U + low_key;
    for (int expert = 0; expert < experts; ++expert, seed += 0x9e3779b9U) {
        std::uint32_t a = seed;
        a = (a ^ (a >> 16)) * 0x7feb352dU ^ high_key;
        a = (a ^ (a >> 15)) * 0x846ca68bU;
        const std::uint32_t b = (a ^ (a >> 16)) * 0xd168aaadU;
        const std::uint32_t sum = (a >> 16) + (a & 0xffffU) + (b >> 16) + (b & 0xffffU);
        const float x = static_cast<float>(static_cast<std::int32_t>(sum) - 131070) * p.inverse_deviation;
        const float draw = x * (p.linear + p.cubic * (x * x));
        const float next = p.persistence * noise[expert] + p.fresh * draw;
        noise[expert] = next;
        float z = next < -p.limit ? -p.limit : next;
        z = z > p.limit ? p.limit : z;
        const float z2 = z * z, z4 = z2 * z2;
        const float low = (p.gumbel[3] * z + p.gumbel[2]) * z2 + (p.gumbel[1] * z + p.gumbel[0]);
        const float high = (p.gumbel[7] * z + p.gumbel[6]) * z2 + (p.gumbel[5] * z + p.gumbel[4]);
        score[expert] = logit[expert] + ((p.gumbel[8] * z4 + high) * z4 + low);
    }
    for (int expert = 0; expert < experts; ++expert)
        reaches[expert] = score[expert] >= threshold;
}

// The same for a lower threshold.
MOE_RL_VECTOR_CLONES void mark(const float *score, float threshold, int experts, std::uint8_t *reaches) {
    for (int expert = 0; expert < experts; ++expert)
        reaches[expert] = score[expert] >= threshold;
}

// Scores and their experts, highest first, of equal ones the earlier. Always all WIDTH of them: nothing to mispredict.
template <int WIDTH>
[[gnu::always_inline]] inline void order(const float *score, const int *expert, float *ordered, int *experts) {
    std::int32_t rank[WIDTH] = {};
    for (int other = 0; other < WIDTH; ++other)
        for (int i = 0; i < WIDTH; ++i)
            rank[i] += (score[other] > score[i]) | ((score[other] == score[i]) & (other < i));
    for (int i = 0; i < WIDTH; ++i) {
        ordered[rank[i]] = score[i];
        experts[rank[i]] = expert[i];
    }
}

// What is past `count` in the FEW entries is lower than all of them.
MOE_RL_VECTOR_CLONES void order_few(const float *score, const int *expert, int count, float *ordered, int *experts) {
    if (count <= FEWEST)
        order<FEWEST>(score, expert, ordered, experts);
    else
        order<FEW>(score, expert, ordered, experts);
}

// One bit for each of CLASS bytes of 0 or 1.
std::uint64_t bits_of(const std::uint8_t *bytes) {
    std::uint64_t set = 0;
#ifdef __SSE2__
    for (int byte = 0; byte < CLASS; byte += 16) {
        const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes + byte));
        set |= std::uint64_t{static_cast<std::uint16_t>(_mm_movemask_epi8(_mm_slli_epi16(sixteen, 7)))} << byte;
    }
#else
    for (int byte = 0; byte < CLASS; byte += 8) {
        std::uint64_t eight = 0;
        for (int i = 0; i < 8; ++i) // one load on little-endian machines
            eight |= std::uint64_t{bytes[byte + i]} << (8 * i);
        set |= (eight * 0x0102040810204080ULL >> 56) << byte;
    }
#endif
    return set;
}

// The experts of one layer, token after token.
class Layer {
  public:
    Layer(const float *logit, std::uint64_t key, int experts, int top_k, float *noise)
        : logit_(logit), noise_(noise), key_(key), experts_(experts), top_k_(top_k) {}

    struct Scratch {
        Scratch(int experts)
            : score(experts), few(experts + FEW), candidate(experts + FEW),
              reaches((experts + CLASS - 1) / CLASS * CLASS) {}
        std::vector<float> score, few; // of all experts, and of the candidates
        std::vector<int> candidate;
        std::vector<std::uint8_t> reaches; // padded with zeros
    };

    template <class Id> void draw(const Process &process, std::int64_t token, Scratch &scratch, Id *chosen) {
        next_scores(process, logit_, static_cast<std::uint32_t>(token) * static_cast<std::uint32_t>(experts_),
                    static_cast<std::uint32_t>(key_), static_cast<std::uint32_t>(key_ >> 32), threshold_, experts_,
                    noise_, scratch.score.data(), scratch.reaches.data());
        int count = candidates(scratch);
        float threshold = threshold_;
        for (int times = 0; count < top_k_ && times < LOWERED; ++times) {
            mark(scratch.score.data(), threshold -= MARGIN, experts_, scratch.reaches.data());
            count = candidates(scratch);
        }
        const float last = count >= top_k_ && count <= FEW ? choose_few(scratch, count, chosen)
                                                           : choose_any(scratch, count, chosen);
        usual_ = token == 0 ? last : usual_ + MEMORY * (last - usual_);
        threshold_ = usual_ - MARGIN;
    }

  private:
    int candidates(Scratch &scratch) const {
        int count = 0;
        std::fill_n(scratch.few.begin(), FEW, -std::numeric_limits<float>::infinity());
        for (int first = 0; first < experts_; first += CLASS)
            for (std::uint64_t set = bits_of(scratch.reaches.data() + first); set; set &= set - 1) {
                scratch.candidate[count] = first + std::countr_zero(set);
                scratch.few[count] = scratch.score[scratch.candidate[count]];
                ++count;
            }
        return count;
    }

    template <class Id> float choose_few(const Scratch &scratch, int count, Id *chosen) const {
        std::array<float, FEW> ordered;
        std::array<int, FEW> expert;
        order_few(scratch.few.data(), scratch.candidate.data(), count, ordered.data(), expert.data());
        for (int k = 0; k < top_k_; ++k)
            chosen[k] = static_cast<Id>(expert[k]);
        return ordered[top_k_ - 1];
    }

    // Where too few reach any threshold all are candidates.
    template <class Id> float choose_any(Scratch &scratch, int count, Id *chosen) const {
        const auto begin = scratch.candidate.begin();
        if (count < top_k_) {
            count = experts_;
            std::iota(begin, begin + count, 0);
        }
        const float *score = scratch.score.data();
        std::partial_sort(begin, begin + top_k_, begin + count, [score](int one, int other) {
            return score[one] > score[other] || (score[one] == score[other] && one < other);
        });
        for (int k = 0; k < top_k_; ++k)
            chosen[k] = static_cast<Id>(begin[k]);
        return score[begin[top_k_ - 1]];
    }

    const float *logit_; // [E]
    float *noise_;       // [E], zeros at first
    std::uint64_t key_;
    int experts_, top_k_;
    float usual_ = 0, threshold_ = -std::numeric_limits<float>::infinity();
};

template <class Id>
void draw_routes(Array<Id, 3> routes, Array<const float, 3> logits, Array<const std::uint64_t, 2> keys,
                 Array<const std::int64_t, 1> first_row, Array<const std::int64_t, 1> lengths,
                 Array<const float, 1> process, int num_threads) {
    const auto rows = static_cast<std::int64_t>(routes.shape(0)), layers = static_cast<std::int64_t>(routes.shape(1)),
               top_k = static_cast<std::int64_t>(routes.shape(2)), experts = static_cast<std::int64_t>(logits.shape(2)),
               sequences = static_cast<std::int64_t>(logits.shape(0));
    check(logits.shape(1) == routes.shape(1), "routes and logits differ in their layers");
    check(keys.shape(0) == logits.shape(0) && keys.shape(1) == logits.shape(1), "keys must be [sequences, layers]");
    check(first_row.shape(0) == logits.shape(0) && lengths.shape(0) == logits.shape(0), "one length per sequence");
    check(1 <= top_k && top_k <= experts, "K must lie in 1 .. E");
    check(experts - 1 <= std::numeric_limits<Id>::max(), "the ids of E experts do not fit");
    check(process.shape(0) == 6 + COEFFICIENTS, "the process has 15 numbers");
    check(num_threads >= 0, "num_threads must not be negative");
    for (std::int64_t i = 0; i < sequences; ++i)
        check(first_row(i) >= 0 && lengths(i) >= 0 && lengths(i) <= rows && first_row(i) <= rows - lengths(i),
              "sequences must lie inside the rows");
    Process p{process(0), process(1), process(2), process(3), process(4), process(5), {}};
    std::copy_n(process.data() + 6, COEFFICIENTS, p.gumbel.begin());

    const std::int64_t blocks = (layers + LAYERS_AT_ONCE - 1) / LAYERS_AT_ONCE;
    const nb::gil_scoped_release no_gil;
    parallel_for(sequences * blocks, num_threads, [&](std::int64_t task) {
        const std::int64_t sequence = task / blocks, first = task % blocks * LAYERS_AT_ONCE;
        const std::int64_t count = std::min(LAYERS_AT_ONCE, layers - first);
        Process now = p;
        now.persistence = 0;
        now.fresh = 1; // the first token's noise has no past
        std::vector<float> noise(count * experts);
        std::vector<Layer> block;
        for (std::int64_t i = 0, layer = sequence * layers + first; i < count; ++i, ++layer)
            block.emplace_back(logits.data() + layer * experts, keys.data()[layer], static_cast<int>(experts),
                               static_cast<int>(top_k), noise.data() + i * experts);
        Layer::Scratch scratch(static_cast<int>(experts));
        for (std::int64_t token = 0; token < lengths(sequence); ++token) {
            Id *chosen = routes.data() + ((first_row(sequence) + token) * layers + first) * top_k;
            for (Layer &layer : block) {
                layer.draw(now, token, scratch, chosen);
                chosen += top_k;
            }
            now = p;
        }
    });
}

template <class Id> void bind(nb::module_ &module, const char *doc) {
    module.def("draw_routes", &draw_routes<Id>, nb::arg("routes").noconvert(), nb::arg("logits").noconvert(),
               nb::arg("keys").noconvert(), nb::arg("first_row").noconvert(), nb::arg("lengths").noconvert(),
               nb::arg("process").noconvert(), nb::arg("num_threads"), doc);
}

} // namespace

void bind_draw_routes(nb::module_ &module) {
    constexpr const char *DOC =
        "Fill routes [T, L, K] for sequences with logits [n, L, E], keys [n, L] of their noise, first_row [n] and "
        "lengths [n].\n\n"
        "process: persistence, fresh share, 1 / deviation of the sum of uniforms, linear and cubic factor of a draw, "
        "limit of the noise, then 9 coefficients of the Gumbel noise. num_threads 0 means all cores.";
    bind<std::uint8_t>(module, DOC);
    bind<std::uint16_t>(module, DOC);
}
