#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "cell.h"

namespace moe_rl {

// A quota says how many rows an instance computes, not whose. Rows that are on its rank already cost nothing to bring,
// rows of its node only NVLink: hence three rounds. An instance on rank 1 with a quota of 25, where ranks 0 .. 3 (two
// nodes of two) hold 20, 10, 40 and 0 rows of the expert, takes 10 of rank 1, then 15 of rank 0, nothing across nodes.
void split_sources(const Cell &cell, const std::vector<Copy> &copies, std::vector<std::int32_t> &source_quota,
                   bool share_remote) {
    constexpr std::int64_t all = std::numeric_limits<std::int64_t>::max();
    const int ranks = cell.ranks, width = cell.ranks_per_domain;
    source_quota.assign(copies.size() * static_cast<std::size_t>(ranks), 0);
    std::vector<std::int64_t> left(ranks), quota;
    for (std::size_t first = 0, next; first < copies.size(); first = next) {
        const int expert = copies[first].expert;
        quota.clear();
        for (next = first; next < copies.size() && copies[next].expert == expert; ++next)
            quota.push_back(copies[next].quota);
        // The home comes last.
        const std::size_t instances = quota.size() + 1;
        quota.push_back(std::accumulate(quota.begin(), quota.end(), cell.rows[expert], std::minus<std::int64_t>()));
        const auto rank_of = [&](std::size_t instance) {
            return first + instance < next ? copies[first + instance].rank : cell.home[expert];
        };
        for (int source = 0; source < ranks; ++source)
            left[source] = cell.pairs[cell.at(source, expert)];
        const auto give = [&](std::size_t instance, int source, std::int64_t most) {
            const std::int64_t rows = std::min({quota[instance], left[source], most});
            quota[instance] -= rows;
            left[source] -= rows;
            if (first + instance < next)
                source_quota[(first + instance) * ranks + source] += static_cast<std::int32_t>(rows);
            return rows;
        };
        for (std::size_t instance = 0; instance < instances; ++instance)
            give(instance, rank_of(instance), all);
        for (std::size_t instance = 0; instance < instances; ++instance) {
            const int node = cell.node(rank_of(instance)), begin = node * width, end = begin + width;
            std::int64_t share = all;
            if (share_remote) { // of what the node still holds, by the quotas of its instances from this one on
                std::int64_t wanted = 0;
                for (std::size_t other = instance; other < instances; ++other)
                    wanted += cell.node(rank_of(other)) == node ? quota[other] : 0;
                const std::int64_t held = std::accumulate(left.begin() + begin, left.begin() + end, std::int64_t{0});
                share = wanted > 0 ? held * quota[instance] / wanted : 0;
            }
            for (int source = begin; source < end && quota[instance] > 0 && share > 0; ++source)
                share -= give(instance, source, share);
        }
        for (std::size_t instance = 0; instance < instances; ++instance)
            for (int source = 0; source < ranks && quota[instance] > 0; ++source)
                give(instance, source, all);
    }
}

} // namespace moe_rl
