// Which ranks and nodes tokens visit, counted token by token, or row by row where a token is sent once for every expert:
// the one counter of planner, prices and simulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe_rl {

// The drawn tokens of a cell in one layer, in the order in which their source ranks hold them.
struct TokenRoutes {
    const std::uint16_t *routes = nullptr; // [drawn, K] of the layer
    const std::int64_t *token = nullptr;   // [count] rows of `routes`
    const std::int32_t *source = nullptr;  // [count] rank that holds each
    std::int64_t count = 0;
    int top_k = 0;

    const std::uint16_t *experts(std::int64_t i) const { return routes + token[i] * top_k; }
};

// One (EP group, micro-batch, layer).
struct Cell {
    int ranks, ranks_per_domain, experts;
    const std::int64_t *rows; // [E]
    const std::int32_t *home; // [E] rank
    double tokens;            // on all source ranks together
    const std::int32_t *pairs; // [P, E]
    TokenRoutes drawn;         // which experts meet in a token; none: only counts are known
    const std::int32_t *residents = nullptr; // [P, S] experts from other nodes that ranks hold for the step; -1: none
    int resident_slots = 0;
    std::uint64_t index = 0; // of all cells and layers: seeds the cell's searches

    int domains() const { return ranks / ranks_per_domain; }
    int node(int rank) const { return rank / ranks_per_domain; }
    // Of a table [P or N, E].
    std::size_t at(int row, int expert) const { return static_cast<std::size_t>(row) * experts + expert; }
    std::int64_t rows_of_node(int node, int expert) const {
        std::int64_t sum = 0;
        for (int source = node * ranks_per_domain; source < (node + 1) * ranks_per_domain; ++source)
            sum += pairs[at(source, expert)];
        return sum;
    }
};

// An instance off the home's slot: it takes quota[source] of the pairs that each source sends to the expert.
struct Served {
    int expert, rank;
    const std::int32_t *quota; // [P]
};

struct Visits {
    std::vector<std::int64_t> ranks;   // [P] tokens that visit each rank, its own included, or rows over its link
    std::vector<std::int64_t> between; // [N, N] copies, or rows, from each node to each other one
    std::vector<std::int64_t> nics;    // [2, P] rows into every rank's NIC and out of it; empty where tokens are counted
};

class VisitCounter {
  public:
    // Quotas are parts of the cell's pairs, `instances` stand in the order in which they are served. The visits of ranks
    // are counted where `of_ranks` asks for them.
    void count(const Cell &cell, const std::vector<Served> &instances, bool of_ranks = true);

    const Visits &visits() const { return visits_; }

  private:
    struct Shared { // a token's pair with an expert that has instances
        std::int32_t token, expert, source;
    };

    void visit_homes(const Cell &cell);
    void visit_instances(const Cell &cell, const std::vector<Served> &instances);

    Visits visits_;
    std::size_t words_ = 0;
    std::vector<std::int32_t> node_;     // [P]
    std::vector<std::uint64_t> place_;   // [P, words] bits of a rank's node, then of the rank
    std::vector<std::uint64_t> at_home_; // [words, E] bits of the home's rank; none where there are instances
    std::vector<std::uint64_t> visited_; // [words, count] places that each token visits
    std::vector<std::int64_t> times_;    // [bits] tokens that visit each place
    std::vector<std::int32_t> first_, next_; // [E], [instances] the first and the next instance of an expert, or -1
    std::vector<std::int32_t> slot_;         // [E] row of `held_` and `dealt_`
    std::vector<std::uint8_t> has_instances_; // [E]
    std::vector<Shared> shared_;
    std::vector<std::int32_t> held_, dealt_; // [replicated, P] drawn tokens that chose it, and those dealt so far
};

// Rows of a cell that leave their rank. Over a rank's link go those that it gets from the other ranks of its node, or
// those that it sends to them, whichever are more.
class RowCounter {
  public:
    // All of the cell's pairs, which the homes serve at first.
    void start(const Cell &cell);
    // Counts what is sent when these instances take their quotas from the homes of the cell that was started.
    void count(const Cell &cell, const std::vector<Served> &instances);

    const Visits &visits() const { return visits_; }

  private:
    std::vector<std::int64_t> at_home_, sent_; // [P, P] rows from each rank to each rank
    Visits visits_;
};

} // namespace moe_rl
