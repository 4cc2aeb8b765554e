#include "split.h"

#include <algorithm>

namespace moe_rl {

namespace {

// Sends rows of a part to a rank with room, moving earlier rows out of the way along a shortest path of parts. Expert A
// with 30 rows may run on ranks 0 and 1, B with 30 on rank 0 alone, both ranks have room for 30: A, placed first, fills
// rank 0. B reaches rank 0, which is full of A; A also reaches rank 1, which has room: so 30 of A go to rank 1 and B
// takes their place. If no such path exists the rows do not fit, whatever was placed where (maximum flow, minimum cut).
// Kept simple because the graphs are tiny (some ten parts): breadth-first augmentation on the residual network.
class Flow {
  public:
    Flow(const SplitProblem &problem, std::vector<std::vector<std::int64_t>> &taken)
        : problem_(problem), taken_(taken), room_(problem.room), ranks_(problem.room.size()) {}

    bool place(std::size_t part) {
        std::int64_t left = problem_.parts[part].rows;
        while (left > 0) {
            const std::int64_t sent = augment(part, left);
            if (sent == 0)
                return false;
            left -= sent;
        }
        return true;
    }

  private:
    struct Step {
        int from_rank;      // -1: the part that is being placed
        std::size_t part;   // part whose rows leave from_rank
        std::size_t holder; // and go to this holder of it
    };

    std::int64_t augment(std::size_t part, std::int64_t rows) {
        std::vector<int> reached;
        std::vector<Step> came(ranks_, Step{-2, 0, 0});
        const auto reach = [&](int from, std::size_t via) {
            const auto &holders = problem_.parts[via].holders;
            for (std::size_t holder = 0; holder < holders.size(); ++holder)
                if (came[holders[holder]].from_rank == -2) {
                    came[holders[holder]] = {from, via, holder};
                    reached.push_back(holders[holder]);
                }
        };
        reach(-1, part);
        for (std::size_t at = 0; at < reached.size(); ++at) {
            const int rank = reached[at];
            if (room_[rank] > 0)
                return apply(rank, rows, came);
            for (std::size_t other = 0; other < problem_.parts.size(); ++other)
                if (rows_of(other, rank) > 0)
                    reach(rank, other);
        }
        return 0;
    }

    std::int64_t rows_of(std::size_t part, int rank) const {
        const auto &holders = problem_.parts[part].holders;
        for (std::size_t holder = 0; holder < holders.size(); ++holder)
            if (holders[holder] == rank)
                return taken_[part][holder];
        return 0;
    }

    std::int64_t apply(int last, std::int64_t rows, const std::vector<Step> &came) {
        std::int64_t sent = std::min(rows, room_[last]);
        for (int rank = last; came[rank].from_rank >= 0; rank = came[rank].from_rank)
            sent = std::min(sent, rows_of(came[rank].part, came[rank].from_rank));
        room_[last] -= sent;
        for (int rank = last;; rank = came[rank].from_rank) {
            const Step &step = came[rank];
            taken_[step.part][step.holder] += sent;
            if (step.from_rank < 0)
                break;
            const auto &holders = problem_.parts[step.part].holders;
            for (std::size_t holder = 0; holder < holders.size(); ++holder)
                if (holders[holder] == step.from_rank)
                    taken_[step.part][holder] -= sent;
        }
        return sent;
    }

    const SplitProblem &problem_;
    std::vector<std::vector<std::int64_t>> &taken_;
    std::vector<std::int64_t> room_;
    std::size_t ranks_;
};

} // namespace

bool split_fits(const SplitProblem &problem, std::vector<std::vector<std::int64_t>> &taken) {
    taken.clear();
    for (const auto &part : problem.parts)
        taken.emplace_back(part.holders.size(), 0);
    if (std::any_of(problem.room.begin(), problem.room.end(), [](std::int64_t room) { return room < 0; }))
        return false;
    Flow flow(problem, taken);
    for (std::size_t part = 0; part < problem.parts.size(); ++part)
        if (!flow.place(part))
            return false;
    return true;
}

// A quota says how many rows an instance computes, not whose. Rows that are on its rank already cost nothing to bring,
// rows of its node only NVLink: hence three rounds. An instance on rank 1 with a quota of 25, where ranks 0 .. 3 (two
// nodes of two) hold 20, 10, 40 and 0 rows of the expert, takes 10 of rank 1, then 15 of rank 0, nothing across nodes.
void split_over_sources(const std::vector<Instance> &instances, const std::int32_t *rows_at, std::int64_t stride,
                        int sources, int ranks_per_domain, std::vector<std::int64_t> &taken) {
    taken.assign(instances.size() * static_cast<std::size_t>(sources), 0);
    std::vector<std::int64_t> left(sources), quota(instances.size());
    for (int source = 0; source < sources; ++source)
        left[source] = rows_at[source * stride];
    const auto give = [&](std::size_t instance, int source) {
        const std::int64_t rows = std::min(quota[instance], left[source]);
        taken[instance * sources + source] += rows;
        quota[instance] -= rows;
        left[source] -= rows;
    };
    for (std::size_t instance = 0; instance < instances.size(); ++instance) {
        quota[instance] = instances[instance].quota;
        if (instances[instance].rank < sources)
            give(instance, instances[instance].rank);
    }
    for (std::size_t instance = 0; instance < instances.size(); ++instance) {
        const int first = instances[instance].rank / ranks_per_domain * ranks_per_domain;
        for (int source = first; source < std::min(first + ranks_per_domain, sources) && quota[instance] > 0; ++source)
            give(instance, source);
    }
    for (std::size_t instance = 0; instance < instances.size(); ++instance)
        for (int source = 0; source < sources && quota[instance] > 0; ++source)
            give(instance, source);
}

} // namespace moe_rl
