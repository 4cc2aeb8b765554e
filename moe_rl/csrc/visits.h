// Which ranks and nodes tokens visit, counted token by token: the one counter of planner, prices and simulator.
#pragma once

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

// An instance off the home's slot: it takes quota[source] of the pairs that each source sends to the expert.
struct Served {
    int expert, rank;
    const std::int32_t *quota; // [P]
};

struct Visits {
    std::vector<std::int64_t> ranks;   // [P] tokens that visit each rank, its own included
    std::vector<std::int64_t> between; // [N, N] copies from each node to each other one
};

class VisitCounter {
  public:
    // `pairs` [P, E] are what the quotas are parts of, `instances` stand in the order in which they are served.
    void count(const TokenRoutes &tokens, int ranks, int ranks_per_domain, int experts, const std::int32_t *home,
               const std::int32_t *pairs, const std::vector<Served> &instances);

    const Visits &visits() const { return visits_; }

  private:
    Visits visits_;
    std::vector<int> first_;           // [E] the expert's first entry in `of_expert_`, or -1
    std::vector<int> replicated_;      // experts with instances
    std::vector<int> of_expert_;       // instances by expert, each list ended by -1
    std::vector<int> node_;            // [P]
    std::vector<int> slot_;            // [E] row of `held_` and `dealt_`
    std::vector<std::int64_t> held_, dealt_; // [replicated, P] drawn tokens that chose it, and those dealt so far
    std::vector<std::int64_t> seen_rank_, seen_node_;
};

} // namespace moe_rl
