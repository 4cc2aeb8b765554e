// Splitting rows exactly: over the instances of a given placement (maximum flow), and of a quota over source ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_rl {

// Experts whose rows may be computed on any of their holders; every rank has room for so many rows.
struct SplitProblem {
    struct Part {
        std::int64_t rows;
        std::vector<int> holders; // distinct ranks
    };
    explicit SplitProblem(int ranks) : room(ranks, 0) {}
    void add(std::int64_t rows, std::vector<int> holders) { parts.push_back({rows, std::move(holders)}); }

    std::vector<std::int64_t> room; // [ranks]; negative: no split fits
    std::vector<Part> parts;
};

// Tests whether all rows fit; on success taken[part][holder] is one way, earlier holders being filled first.
bool split_fits(const SplitProblem &problem, std::vector<std::vector<std::int64_t>> &taken);

// One instance of an expert and the rows it takes from all sources; the home comes last.
struct Instance {
    int rank;
    std::int64_t quota;
};

// Deals the rows of one expert, rows_at[source] on each source rank, to its instances: rows stay on their rank where
// they can, then on their node, then go in ascending order of source. taken[instance * sources + source] adds up to the
// quotas, which must add up to the rows.
void split_over_sources(const std::vector<Instance> &instances, const std::int32_t *rows_at, std::int64_t stride,
                        int sources, int ranks_per_domain, std::vector<std::int64_t> &taken);

} // namespace moe_rl
