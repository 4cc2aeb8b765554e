// The best possible split of tokens over given instances: the C++ form of moe_rl/planner/exact_split.py, for many cells.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "bindings.h"
#include "parallel.h"

namespace {

using namespace moe_rl;

// Rank loads and what every holder of an expert computes of it, changed by passing pairs along chains of ranks.
class Chains {
  public:
    // `holders` of expert x are holder[first[x] .. first[x + 1]), each rank once.
    Chains(const std::int64_t *fixed, int ranks, const std::int64_t *pairs, const std::int64_t *first,
           const std::int32_t *holder, int experts)
        : load_(fixed, fixed + ranks), begin_(first[0]), first_(first), holder_(holder),
          part_(first[experts] - begin_), shared_on_(ranks), from_(ranks), through_(ranks) {
        for (int expert = 0; expert < experts; ++expert) { // all pairs on the first holder: the chains take them on
            part_[first[expert] - begin_] = pairs[expert];
            load_[holder[first[expert]]] += pairs[expert];
            for (std::int64_t at = first[expert]; at < first[expert + 1]; ++at)
                shared_on_[holder[at]].push_back({expert, at});
        }
    }

    // The greatest rank load of the best split; `target` is what no split goes below.
    std::int64_t settle(std::int64_t target) {
        while (true) {
            queue_.clear();
            std::fill(from_.begin(), from_.end(), UNREACHED);
            for (std::size_t rank = 0; rank < load_.size(); ++rank)
                if (load_[rank] > target) {
                    queue_.push_back(static_cast<int>(rank));
                    from_[rank] = START;
                }
            if (queue_.empty())
                return target;
            const int end = reach(target);
            if (end >= 0) {
                pass_along(end, target);
                continue;
            }
            // The reached ranks hold all instances of their experts: what is on them cannot leave.
            std::int64_t held = 0;
            for (const int rank : queue_)
                held += load_[rank];
            const auto count = static_cast<std::int64_t>(queue_.size());
            target = (held + count - 1) / count;
        }
    }

  private:
    static constexpr std::int64_t UNREACHED = -2, START = -1;

    struct Shared {
        int expert;
        std::int64_t at; // its place among the holders
    };

    // Breadth first from the ranks in the queue to one below the target; -1 where none can be reached.
    int reach(std::int64_t target) {
        for (std::size_t next = 0; next < queue_.size(); ++next)
            for (const Shared &shared : shared_on_[queue_[next]]) {
                if (!part_[shared.at - begin_])
                    continue;
                for (std::int64_t at = first_[shared.expert]; at < first_[shared.expert + 1]; ++at) {
                    const int other = holder_[at];
                    if (from_[other] != UNREACHED)
                        continue;
                    from_[other] = shared.at;
                    through_[other] = at;
                    if (load_[other] < target)
                        return other;
                    queue_.push_back(other);
                }
            }
        return -1;
    }

    // Passes as many pairs as the chain that ends at `end` can carry.
    void pass_along(int end, std::int64_t target) {
        std::int64_t amount = target - load_[end];
        int rank = end;
        for (; from_[rank] != START; rank = holder_[from_[rank]])
            amount = std::min(amount, part_[from_[rank] - begin_]);
        amount = std::min(amount, load_[rank] - target);
        load_[rank] -= amount;
        load_[end] += amount;
        for (rank = end; from_[rank] != START; rank = holder_[from_[rank]]) {
            part_[from_[rank] - begin_] -= amount;
            part_[through_[rank] - begin_] += amount;
        }
    }

    std::vector<std::int64_t> load_; // [P]
    std::int64_t begin_;
    const std::int64_t *first_;
    const std::int32_t *holder_;
    std::vector<std::int64_t> part_; // pairs on every holder
    std::vector<std::vector<Shared>> shared_on_;
    std::vector<std::int64_t> from_, through_; // how a rank was reached: from one place of an expert to another
    std::vector<int> queue_;
};

void least_max_rank_loads(Array<std::int64_t, 1> most, Array<const std::int64_t, 2> fixed,
                          Array<const std::int64_t, 1> cells, Array<const std::int64_t, 1> pairs,
                          Array<const std::int64_t, 1> first, Array<const std::int32_t, 1> holder, int num_threads) {
    const auto count = static_cast<std::int64_t>(fixed.shape(0)), ranks = static_cast<std::int64_t>(fixed.shape(1)),
               experts = static_cast<std::int64_t>(pairs.shape(0));
    check(most.shape(0) == fixed.shape(0) && cells.shape(0) == fixed.shape(0) + 1, "one entry per cell");
    check(first.shape(0) == pairs.shape(0) + 1, "one run of holders per expert");
    check(ranks >= 1 && num_threads >= 0, "there must be a rank, and num_threads must not be negative");
    check(cells(0) == 0 && cells(count) == experts, "cells must cover all experts");
    check(first(0) == 0 && first(experts) == static_cast<std::int64_t>(holder.shape(0)), "experts must cover holders");
    for (std::int64_t cell = 0; cell < count; ++cell)
        check(cells(cell) <= cells(cell + 1), "cells must ascend");
    for (std::int64_t x = 0; x < experts; ++x)
        check(first(x) < first(x + 1) && pairs(x) >= 0, "every expert needs a holder, and pairs of at least 0");
    for (std::size_t i = 0; i < holder.shape(0); ++i)
        check(0 <= holder(i) && holder(i) < ranks, "holders must be ranks");
    const nb::gil_scoped_release no_gil;
    parallel_for(count, num_threads, [&](std::int64_t cell) {
        const std::int64_t *here = fixed.data() + cell * ranks, x = cells(cell), *of = pairs.data() + x;
        const auto held = static_cast<int>(cells(cell + 1) - x);
        const std::int64_t total = std::accumulate(of, of + held, std::accumulate(here, here + ranks, std::int64_t{0}));
        const std::int64_t target = std::max((total + ranks - 1) / ranks, *std::max_element(here, here + ranks));
        most(cell) = Chains(here, static_cast<int>(ranks), of, first.data() + x, holder.data(), held).settle(target);
    });
}

} // namespace

void bind_exact_split(nb::module_ &module) {
    module.def("least_max_rank_loads", &least_max_rank_loads, nb::arg("most").noconvert(),
               nb::arg("fixed").noconvert(), nb::arg("cells").noconvert(), nb::arg("pairs").noconvert(),
               nb::arg("first").noconvert(), nb::arg("holder").noconvert(), nb::arg("num_threads"),
               "Write to most [C] the least possible greatest rank load of every cell whose ranks hold fixed [C, P] "
               "pairs.\n\n"
               "Experts cells[c] .. cells[c + 1] of a cell have pairs [X], split over the ranks holder[first[x] .. "
               "first[x + 1]]. num_threads 0 means all cores.");
}
