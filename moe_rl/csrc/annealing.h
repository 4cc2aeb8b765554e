// What the annealing searches share: temperatures, and when to accept.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "parallel.h"
#include "rng.h"

namespace moe_rl {

// A row above a search's limit of rows costs as much as this many elsewhere.
inline constexpr std::int64_t STEEP = 256;
inline constexpr std::int32_t NO_LIMIT = std::numeric_limits<std::int32_t>::max();

// What the busiest bin of a cell costs: its rows, or, where fuller cells are to be dearer, their power on a scale of
// integers. Powers of shares of `whole` rows, those of all cells, sum up to 1 at most, so sums over layers cannot overflow.
//
// Example: two cells of 6 and 2 rows, whole = 8. With power 1 they cost 6 + 2 = 8, as 4 + 4 do. With power 2 they cost
// 36/64 + 4/64 = 0.625 of SCALE, and 4 + 4 cost 0.5.
struct RowPrice {
    static constexpr double SCALE = 1LL << 46; // 2^46 * 128 layers * STEEP are 2^61
    int power = 1;
    double whole = 1;

    std::int64_t of(std::int32_t rows) const {
        const double share = rows / whole;
        double price = SCALE;
        for (int factor = 0; factor < power; ++factor)
            price *= share;
        return static_cast<std::int64_t>(price);
    }

    // The sum over cells, what is above the limit counted STEEP times more.
    std::int64_t of_all(const std::int32_t *rows, int cells, std::int32_t limit) const {
        std::int64_t sum = 0;
        const std::int64_t free = limit == NO_LIMIT ? 0 : of(limit);
        for (int cell = 0; cell < cells; ++cell) {
            const std::int64_t price = of(rows[cell]);
            sum += price + (rows[cell] > limit ? STEEP * (price - free) : 0);
        }
        return sum;
    }
};

// Temperatures of a search. With half as many D0, D1 and E (README.md), whose copies are annealed, change by less than .005 %.
inline constexpr int STAGES = 64;

// -ln(u) in 1/65536 at the middles of 1024 equal parts of (0, 1).
inline const std::array<std::int64_t, 1024> NEG_LOG = [] {
    std::array<std::int64_t, 1024> table{};
    for (int i = 0; i < 1024; ++i)
        table[i] = std::llround(-65536.0 * std::log((i + 0.5) / 1024));
    return table;
}();

__extension__ typedef __int128 Wide;

// Annealing accepts a change that costs d more with probability exp(-d / T). Drawing u and accepting where d is at most
// -T ln(u) is the same, and with a table of -ln(u) a comparison of integers, the same on every machine: at T = 100 and
// u = 0.5 a change may cost 69 more.
inline std::int64_t threshold(std::int64_t temperature, Rng &rng) {
    // In 128 bits: powers of rows make temperatures of 2^44 and more, and -ln(u) takes 19 bits.
    const Wide allowed = (Wide{temperature} * NEG_LOG[rng.next() >> 54]) >> 16;
    return static_cast<std::int64_t>(allowed);
}

// The temperature of the next stage: a sixteenth lower, so that the last of 64 has 1.6 % of the first, and 0 in the
// end.
inline std::int64_t cooled(std::int64_t temperature) {
    return temperature - temperature / 16 - (temperature > 0 && temperature < 16 ? 1 : 0);
}

// Anneals a search that can propose, tell the change of cost, and accept; `keep` notes its state, whenever it is the best so
// far. Starts at the mean size of the changes of `samples` proposals, divided by `cooler`. Returns the least cost.
template <class Search, class Keep>
std::int64_t anneal(Search &search, Rng &rng, int samples, std::int64_t cooler, std::int64_t iterations, Keep keep) {
    std::int64_t sum = 0, count = 0;
    for (int sample = 0; sample < samples; ++sample) {
        if (!search.propose(rng))
            continue;
        sum += search.change() < 0 ? -search.change() : search.change();
        ++count;
    }
    std::int64_t temperature = count ? sum / count / cooler : 0, best = search.cost();
    for (int stage = 0; stage < STAGES; ++stage) {
        for (std::int64_t iteration = 0; iteration < iterations / STAGES; ++iteration) {
            const std::int64_t allowed = threshold(temperature, rng);
            if (!search.propose(rng) || search.change() > allowed)
                continue;
            search.accept();
            if (search.cost() < best) {
                best = search.cost();
                keep();
            }
        }
        temperature = cooled(temperature);
    }
    return best;
}

} // namespace moe_rl
