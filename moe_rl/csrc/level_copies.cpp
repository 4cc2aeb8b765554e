#include "cell.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moe_rl {

namespace {

// A row that a copy gives back is computed by the home's node, and its token crosses unless it visits that node anyway.
// Where the copy's node is the fullest that saves time, where its NIC or the home's is the busiest it costs some, and a
// row costs about as much as a crossing. So what matters is *which* copies give: those whose way is not the busiest.
//
// Node A is the fullest, and holds copies of an expert of B and of one of C. If B's NIC is the busiest, the first would
// trade rows of the fullest node for crossings there; what the second gives costs nothing.
//
// The fullest and the busiest are maxima, which single moves do not lower where several nodes tie: the moves follow the
// slopes of smooth maxima instead, with ever smaller steps. A first step of 1 / 256, a last one of 1 / 512, half or twice as
// many moves, half or twice the smoothing change D0, D1 and E by .01 % at most; over an engine that levels ranks the step of
// EP32 is .3 % slower with steps to 1 / 512 and half the moves.
constexpr int FIRST_STEP = 64, LAST_STEP = 2048; // parts of the mean node's load
constexpr int MOVES_PER_STEP = 24;
constexpr int SMOOTHED_STEPS = 2; // differences below so many steps hardly count
// A row of the fullest node in rows of its ranks: ranks of a node that is fuller than others are not quite level either.
// With half D1 is .12 % slower, with twice as much D0 .10; with 1 D0 is .02 % faster, D1 .03 slower.
constexpr double ROW_WEIGHT = 1.25;

// What each value adds to their smooth maximum, per unit.
void slopes(const std::vector<double> &values, double smoothed, std::vector<double> &result) {
    const double top = *std::max_element(values.begin(), values.end());
    for (std::size_t i = 0; i < values.size(); ++i)
        result[i] = std::exp((values[i] - top) / smoothed);
    const double sum = std::accumulate(result.begin(), result.end(), 0.0);
    for (double &slope : result)
        slope /= sum;
}

struct Levels {
    Levels(const Cell &cell, bool deduplicated, const std::vector<Copy> &residents, const std::vector<std::int64_t> &rows,
           const std::vector<Copy> &copies)
        : nodes(cell.domains()), nic(2 * nodes, 0), crossing(copies.size(), 0) {
        follow_tokens(cell, deduplicated, residents, copies);
        for (std::size_t i = 0; i < copies.size(); ++i) {
            const int expert = copies[i].expert;
            node.push_back(cell.node(copies[i].rank));
            home.push_back(cell.node(cell.home[expert]));
            cross(i, static_cast<double>(rows[cell.at(node[i], expert)] - copies[i].quota));
        }
    }

    // So many rows of the copy go to its home.
    void cross(std::size_t copy, double rows) {
        nic[node[copy]] += crossing[copy] * rows;
        nic[nodes + home[copy]] += crossing[copy] * rows;
    }

    // Copies of tokens while every copy serves all of its node, and the share of its tokens that would not go to the
    // home's node otherwise: all of them where every row is sent by itself.
    void follow_tokens(const Cell &cell, bool deduplicated, const std::vector<Copy> &residents,
                       const std::vector<Copy> &copies) {
        constexpr std::int32_t AWAY = -1, RESIDENT = -2;
        std::vector<std::int32_t> held(cell.at(nodes, 0), AWAY);
        for (const Copy &copy : residents)
            held[cell.at(cell.node(copy.rank), copy.expert)] = RESIDENT;
        for (std::size_t i = 0; i < copies.size(); ++i)
            held[cell.at(cell.node(copies[i].rank), copies[i].expert)] = static_cast<std::int32_t>(i);
        std::vector<std::int64_t> served(copies.size(), 0), alone(copies.size(), 0);
        std::vector<int> visits(nodes);
        const double each = cell.drawn.count > 0 ? cell.tokens / static_cast<double>(cell.drawn.count) : 0.0;
        for (std::int64_t token = 0; token < cell.drawn.count; ++token) {
            const std::uint16_t *routes = cell.drawn.experts(token);
            const int from = cell.node(cell.drawn.source[token]);
            std::fill(visits.begin(), visits.end(), 0);
            for (int k = 0; k < cell.drawn.top_k; ++k) {
                int &there = visits[cell.node(cell.home[routes[k]])];
                there = held[cell.at(from, routes[k])] != AWAY ? there : deduplicated ? 1 : there + 1;
            }
            visits[from] = 0;
            for (int there = 0; there < nodes; ++there) {
                nic[from] += each * visits[there];
                nic[nodes + there] += each * visits[there];
            }
            for (int k = 0; k < cell.drawn.top_k; ++k) {
                const std::int32_t copy = held[cell.at(from, routes[k])];
                if (copy < 0)
                    continue;
                ++served[copy];
                alone[copy] += !deduplicated || visits[cell.node(cell.home[routes[k]])] == 0;
            }
        }
        for (std::size_t i = 0; i < copies.size(); ++i)
            crossing[i] = static_cast<double>(alone[i]) / static_cast<double>(std::max<std::int64_t>(1, served[i]));
    }

    int nodes;
    std::vector<double> nic;      // [2 N] copies of tokens that leave each node, then those that enter it
    std::vector<double> crossing; // [copies] of their rows that go home, the share that crosses
    std::vector<int> node, home;  // [copies] nodes of the copy and of its expert's home
};

} // namespace

void level_copies(const Cell &cell, const LayerCostParams &cost, const std::vector<Copy> &residents,
                  const std::vector<std::int64_t> &rows, std::vector<Copy> &copies,
                  std::vector<std::int64_t> &node_load) {
    const int nodes = cell.domains();
    Levels levels(cell, cost.a2a_hierarchical != 0.0, residents, rows, copies);
    std::vector<std::int64_t> most;
    for (const Copy &copy : copies)
        most.push_back(copy.quota);
    std::vector<double> load(node_load.begin(), node_load.end()), full(nodes), busy(levels.nic.size());
    const double row_s = ROW_WEIGHT * seconds_per_row(cost), copy_s = copy_time(cost);
    const std::int64_t mean = std::accumulate(node_load.begin(), node_load.end(), std::int64_t{0}) / nodes;
    for (int part = FIRST_STEP; part <= LAST_STEP; part *= 2) {
        const std::int64_t step = std::max<std::int64_t>(1, mean / part);
        for (int move = 0; move < MOVES_PER_STEP; ++move) {
            slopes(load, SMOOTHED_STEPS * static_cast<double>(step), full);
            slopes(levels.nic, SMOOTHED_STEPS * static_cast<double>(step), busy);
            std::size_t best = 0;
            std::int64_t given = 0;
            double gain = 0;
            for (std::size_t i = 0; i < copies.size(); ++i) {
                const int node = levels.node[i], home = levels.home[i];
                const double saved = row_s * (full[node] - full[home]) -
                                     copy_s * levels.crossing[i] * (busy[node] + busy[nodes + home]);
                const std::int64_t room = saved > 0 ? copies[i].quota - 1 : most[i] - copies[i].quota;
                if (room > 0 && std::abs(saved) > gain) {
                    gain = std::abs(saved);
                    best = i;
                    given = saved > 0 ? std::min(step, room) : -std::min(step, room);
                }
            }
            if (given == 0)
                return;
            copies[best].quota -= given;
            levels.cross(best, static_cast<double>(given));
            node_load[levels.node[best]] -= given;
            node_load[levels.home[best]] += given;
            load.assign(node_load.begin(), node_load.end());
        }
    }
}

} // namespace moe_rl
