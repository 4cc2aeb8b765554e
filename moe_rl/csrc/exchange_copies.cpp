#include "cell.h"

#include <algorithm>
#include <cmath>

#include "residents.h"

namespace moe_rl {

namespace {

// With 200 the development trace is 0.1 % faster (EP32, one slot), and the search takes twice as long.
constexpr std::int64_t PROPOSALS_PER_SLOT = 100;
// Part of a row in the busiest node that still counts: most of the difference is levelled by rows that copies give back,
// on tokens that no busy NIC carries (level_copies.cpp). With 0 D0 is .38 % slower, with twice as much .12, with 1 .78; D1
// and E change by less than .08 %.
constexpr double LEVELLED = 0.15;

} // namespace

// Greedy choice takes the copies that keep most tokens on their node, and a layer waits for the busiest: here the cell is a
// step of one pool, and its copies are searched like those that stay for a step (residents.cpp).
double exchange_copies(const Cell &cell, const LayerCostParams &cost, const std::vector<std::int64_t> &rows,
                     const std::vector<std::int32_t> &fixed, int most_sent, std::vector<std::int32_t> &held) {
    const int nodes = cell.domains(), width = cell.ranks_per_domain;
    std::vector<std::int32_t> count(nodes, 0), nth(cell.drawn.count), node_of(cell.experts);
    for (std::int64_t token = 0; token < cell.drawn.count; ++token)
        nth[token] = count[cell.node(cell.drawn.source[token])]++;
    const int words = (*std::max_element(count.begin(), count.end()) + 63) / 64;
    const auto at = [&](int expert, int node) { return static_cast<std::size_t>(expert) * nodes + node; };
    std::vector<std::int32_t> by_expert(at(cell.experts, 0));
    for (int expert = 0; expert < cell.experts; ++expert) {
        node_of[expert] = cell.node(cell.home[expert]);
        for (int node = 0; node < nodes; ++node)
            by_expert[at(expert, node)] = static_cast<std::int32_t>(rows[cell.at(node, expert)]);
    }
    std::vector<std::uint64_t> chosen(by_expert.size() * words, 0);
    for (std::int64_t token = 0; token < cell.drawn.count; ++token)
        for (int k = 0; k < cell.drawn.top_k; ++k) {
            const std::size_t from = at(cell.drawn.experts(token)[k], cell.node(cell.drawn.source[token]));
            if (by_expert[from] > 0)
                chosen[from * words + nth[token] / 64] |= std::uint64_t{1} << (nth[token] % 64);
        }
    const std::int64_t copy_cost = std::llround(1e12 * copy_time(cost) * cell.tokens / static_cast<double>(cell.drawn.count));
    const std::int64_t row_cost = std::llround(1e12 * seconds_per_row(cost) * LEVELLED);
    const std::vector<std::int32_t> pools_of_row(words, 1);
    const TokenBits bits{1, nodes, cell.drawn.top_k, !cost.flat(), pools_of_row, chosen.data(), &copy_cost};
    const ResidentProblem problem{cell.experts, nodes, width * static_cast<int>(held.size()) / cell.ranks, &bits, 1,
                            node_of.data(), -1, by_expert.data(), &row_cost, fixed.data(), cell.home, most_sent};
    const std::int64_t best = improve_residents(problem, PROPOSALS_PER_SLOT * static_cast<std::int64_t>(held.size()),
                                                stream(cell.index, most_sent).next(), node_of, held);
    return 1e-12 * static_cast<double>(best);
}

} // namespace moe_rl
