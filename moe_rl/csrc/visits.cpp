#include "visits.h"

#include <algorithm>

namespace moe_rl {

// A token goes to a rank (and between nodes over the network) once, however many of its experts are there. Which
// instance serves a pair follows core.plan.slot_map: the pairs of a source rank and an expert are dealt in the order of
// their tokens, each instance taking its quota, the home the rest. Drawn tokens stand for all, so quotas are shares: the
// third of five drawn pairs, of 100 that there are, is the one at 50 of them.
void VisitCounter::count(const TokenRoutes &tokens, int ranks, int ranks_per_domain, int experts,
                         const std::int32_t *home, const std::int32_t *pairs, const std::vector<Served> &instances) {
    const int nodes = ranks / ranks_per_domain;
    visits_.ranks.assign(ranks, 0);
    visits_.between.assign(static_cast<std::size_t>(nodes) * nodes, 0);
    first_.assign(experts, -1);
    slot_.resize(experts);
    replicated_.clear();
    of_expert_.clear();
    for (const Served &instance : instances) {
        if (first_[instance.expert] >= 0)
            continue;
        first_[instance.expert] = static_cast<int>(of_expert_.size());
        slot_[instance.expert] = static_cast<int>(replicated_.size());
        replicated_.push_back(instance.expert);
        for (std::size_t other = 0; other < instances.size(); ++other)
            if (instances[other].expert == instance.expert)
                of_expert_.push_back(static_cast<int>(other));
        of_expert_.push_back(-1);
    }
    if (!instances.empty()) {
        held_.assign(replicated_.size() * static_cast<std::size_t>(ranks), 0);
        dealt_.assign(held_.size(), 0);
        for (std::int64_t i = 0; i < tokens.count; ++i)
            for (int k = 0; k < tokens.top_k; ++k) {
                const int expert = tokens.experts(i)[k];
                if (first_[expert] >= 0)
                    ++held_[static_cast<std::size_t>(slot_[expert]) * ranks + tokens.source[i]];
            }
    }
    seen_rank_.assign(ranks, -1);
    seen_node_.assign(nodes, -1);
    node_.resize(ranks);
    for (int rank = 0; rank < ranks; ++rank)
        node_[rank] = rank / ranks_per_domain;
    for (std::int64_t i = 0; i < tokens.count; ++i) {
        const int source = tokens.source[i], own_node = node_[source];
        const std::uint16_t *routes = tokens.experts(i);
        for (int k = 0; k < tokens.top_k; ++k) {
            const int expert = routes[k];
            int rank = home[expert];
            if (first_[expert] >= 0) {
                const std::size_t at = static_cast<std::size_t>(slot_[expert]) * ranks + source;
                const std::int64_t position =
                    (2 * dealt_[at]++ + 1) * pairs[static_cast<std::int64_t>(source) * experts + expert];
                std::int64_t quota = 0;
                for (int next = first_[expert]; of_expert_[next] >= 0; ++next) {
                    const Served &instance = instances[of_expert_[next]];
                    quota += instance.quota[source];
                    if (position < 2 * quota * held_[at]) {
                        rank = instance.rank;
                        break;
                    }
                }
            }
            if (seen_rank_[rank] == i)
                continue;
            seen_rank_[rank] = i;
            ++visits_.ranks[rank];
            const int node = node_[rank];
            if (node == own_node || seen_node_[node] == i)
                continue;
            seen_node_[node] = i;
            ++visits_.between[static_cast<std::size_t>(own_node) * nodes + node];
        }
    }
}

} // namespace moe_rl
