#include "split.h"

#include <algorithm>
#include <limits>

namespace moe_rl {

// A quota says how many rows an instance computes, not whose. Rows that are on its rank already cost nothing to bring,
// rows of its node only NVLink: hence three rounds. An instance on rank 1 with a quota of 25, where ranks 0 .. 3 (two
// nodes of two) hold 20, 10, 40 and 0 rows of the expert, takes 10 of rank 1, then 15 of rank 0, nothing across nodes.
void split_over_sources(const std::vector<Instance> &instances, const std::int32_t *rows_at, std::int64_t stride,
                        int sources, int ranks_per_domain, std::vector<std::int64_t> &taken, bool share_remote) {
    taken.assign(instances.size() * static_cast<std::size_t>(sources), 0);
    std::vector<std::int64_t> left(sources), quota(instances.size());
    for (int source = 0; source < sources; ++source)
        left[source] = rows_at[source * stride];
    const auto give = [&](std::size_t instance, int source, std::int64_t most) {
        const std::int64_t rows = std::min({quota[instance], left[source], most});
        taken[instance * sources + source] += rows;
        quota[instance] -= rows;
        left[source] -= rows;
        return rows;
    };
    constexpr std::int64_t all = std::numeric_limits<std::int64_t>::max();
    for (std::size_t instance = 0; instance < instances.size(); ++instance) {
        quota[instance] = instances[instance].quota;
        if (instances[instance].rank < sources)
            give(instance, instances[instance].rank, all);
    }
    for (std::size_t instance = 0; instance < instances.size(); ++instance) {
        const int node = instances[instance].rank / ranks_per_domain, first = node * ranks_per_domain;
        const int last = std::min(first + ranks_per_domain, sources);
        std::int64_t share = all;
        if (share_remote) { // of what the node still holds, by the quotas of its instances from this one on
            std::int64_t wanted = 0;
            for (std::size_t other = instance; other < instances.size(); ++other)
                wanted += instances[other].rank / ranks_per_domain == node ? quota[other] : 0;
            std::int64_t held = 0;
            for (int source = first; source < last; ++source)
                held += left[source];
            share = wanted > 0 ? held * quota[instance] / wanted : 0;
        }
        for (int source = first; source < last && quota[instance] > 0 && share > 0; ++source)
            share -= give(instance, source, share);
    }
    for (std::size_t instance = 0; instance < instances.size(); ++instance)
        for (int source = 0; source < sources && quota[instance] > 0; ++source)
            give(instance, source, all);
}

} // namespace moe_rl
