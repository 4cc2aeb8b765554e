// Draws the routes of synthetic sequences: noise that follows an AR(1) process over tokens, and the K highest scores.
//
// The numpy form is moe_rl/simulators/token_routes.py: only integer operations and single float32 additions and
// multiplications, in the same order, so both give the same bits, whatever the vector width or the number of threads.

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "bindings.h"
#include "parallel.h"

namespace {

using namespace moe_rl;

constexpr std::int64_t LAYERS_AT_ONCE = 16; // of a sequence in one thread; their noise and logits stay in cache
constexpr int COEFFICIENTS = 9;
constexpr float MARGIN = 0.4F;   // experts are looked at from the usual K-th score less this on: 10 to 20 of 128
constexpr float MEMORY = 0.125F; // weight of the last token in what is usual
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Process {
    float persistence, fresh;                // noise = persistence * noise + fresh * draw
    float inverse_deviation, linear, cubic; // draw = x (linear + cubic x^2), x the sum of four uniforms, standardized
    float limit;                             // Gumbel noise is a polynomial of the noise inside +- limit
    std::array<float, COEFFICIENTS> gumbel;  // by rising power
};

// Noise and scores of one layer's experts and the next token.
MOE_RL_VECTOR_CLONES void next_scores(const Process &process, const float *logit, std::uint32_t counter,
                                      std::uint32_t low_key, std::uint32_t high_key, int experts, float *noise,
                                      float *score) {
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
}

// The K experts with the highest scores of those from `threshold` on, highest first, of equal ones the earlier; returns
// how many there are. Without a threshold about 8 (1 + ln(128 / 8)) = 30 of 128 experts enter the list of 8 on the way,
// which takes three times as long.
template <class Id>
int choose(const float *score, int experts, int top_k, float threshold, float *highest, Id *chosen) {
    int count = 0;
    for (int expert = 0; expert < experts; ++expert) {
        if (score[expert] < threshold || (count == top_k && score[expert] <= highest[top_k - 1]))
            continue;
        int at = count < top_k ? count++ : top_k - 1;
        for (; at > 0 && score[expert] > highest[at - 1]; --at) {
            highest[at] = highest[at - 1];
            chosen[at] = chosen[at - 1];
        }
        highest[at] = score[expert];
        chosen[at] = static_cast<Id>(expert);
    }
    return count;
}

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
        std::vector<float> noise(count * experts), score(experts), highest(top_k), usual(count, LOWEST);
        for (std::int64_t token = 0; token < lengths(sequence); ++token) {
            const auto counter = static_cast<std::uint32_t>(token * experts);
            for (std::int64_t i = 0, layer = sequence * layers + first; i < count; ++i, ++layer) {
                const std::uint64_t key = keys.data()[layer];
                next_scores(now, logits.data() + layer * experts, counter, static_cast<std::uint32_t>(key),
                            static_cast<std::uint32_t>(key >> 32), static_cast<int>(experts),
                            noise.data() + i * experts, score.data());
                Id *chosen = routes.data() + ((first_row(sequence) + token) * layers + first + i) * top_k;
                const auto from = [&](float threshold) {
                    return choose(score.data(), static_cast<int>(experts), static_cast<int>(top_k), threshold,
                                  highest.data(), chosen);
                };
                if (from(usual[i] - MARGIN) < top_k)
                    from(LOWEST);
                usual[i] = token == 0 ? highest.back() : usual[i] + MEMORY * (highest.back() - usual[i]);
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
