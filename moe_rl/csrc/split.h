// Splitting the quotas of an expert's instances over source ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_rl {

// One instance of an expert and the rows it takes from all sources; the home comes last.
struct Instance {
    int rank;
    std::int64_t quota;
};

// Deals the rows of one expert, rows_at[source] on each source rank, to its instances: rows stay on their rank where
// they can, then on their node, then go in ascending order of source. taken[instance * sources + source] adds up to the
// quotas, which must add up to the rows. With `share_remote` the instances of a node share its rows by their quotas, so that
// rows from other nodes come to each in proportion: where every rank has its own NIC, none waits for all of them.
void split_over_sources(const std::vector<Instance> &instances, const std::int32_t *rows_at, std::int64_t stride,
                        int sources, int ranks_per_domain, std::vector<std::int64_t> &taken, bool share_remote = false);

} // namespace moe_rl
