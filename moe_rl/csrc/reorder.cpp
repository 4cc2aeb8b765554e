#include "reorder.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "travel.h"

namespace moe_rl {

namespace {

// How the search works. Homes hold for a whole step, so a home is judged in all micro-batches (cells) at once: the cost
// is the sum over cells of the busiest bin, not the busiest sum. Two experts of 10 and 0 rows in one cell and 0 and 10
// in the next look alike in total, 10 and 10, but only in one bin do they complement each other.
//
// Proposals are swaps of two experts of different bins, which keep every bin full; annealing.h says when one is taken.

// most[cell] = the highest of the bins after first's values left bin a for b and second's came back. Returns their sum.
MOE_RL_VECTOR_CLONES std::int64_t busiest_after_swap(const std::int32_t *values, int bins, int cells, int a, int b,
                                             const std::int32_t *first, const std::int32_t *second,
                                             std::int32_t *most) {
    const std::int32_t *of_a = values + static_cast<std::int64_t>(a) * cells;
    const std::int32_t *of_b = values + static_cast<std::int64_t>(b) * cells;
    for (int cell = 0; cell < cells; ++cell) {
        const std::int32_t moved = first[cell] - second[cell];
        most[cell] = std::max(of_a[cell] - moved, of_b[cell] + moved);
    }
    for (int bin = 0; bin < bins; ++bin) {
        if (bin == a || bin == b)
            continue;
        const std::int32_t *others = values + static_cast<std::int64_t>(bin) * cells;
        for (int cell = 0; cell < cells; ++cell)
            most[cell] = std::max(most[cell], others[cell]);
    }
    std::int64_t sum = 0;
    for (int cell = 0; cell < cells; ++cell)
        sum += most[cell];
    return sum;
}

class Search {
  public:
    Search(const ReorderProblem &problem, std::vector<std::int32_t> &bin_of)
        : p_(problem), bin_of_(bin_of), load_(static_cast<std::size_t>(p_.bins) * p_.cells, 0),
          stay_(p_.stays ? load_.size() : 0, 0), most_(p_.cells), none_(p_.cells, 0) {
        if (p_.tokens)
            travel_.emplace(*p_.tokens, bin_of_, p_.bins);
        for (int expert = 0; expert < p_.experts; ++expert)
            shift(expert, bin_of_[expert], 1);
        cost_ = moves() + busiest_cost(0, 1, none_.data(), none_.data(), none_.data(), none_.data()) +
                (travel_ ? travel_->cost() : 0);
    }

    std::int64_t cost() const { return cost_; }

    // Cost after swapping the bins of two experts that sit in different ones. O(bins * cells): only two bins change,
    // but which one is the busiest may change in every cell.
    std::int64_t cost_of_swap(int first, int second) {
        const int a = bin_of_[first], b = bin_of_[second];
        const std::int64_t moved =
            num_moves_ - move_of(first, a) - move_of(second, b) + move_of(first, b) + move_of(second, a);
        const std::int64_t at_first = static_cast<std::int64_t>(first) * p_.cells;
        const std::int64_t at_second = static_cast<std::int64_t>(second) * p_.cells;
        const std::int32_t *stays = p_.stays ? p_.stays : none_.data();
        return moved + (travel_ ? travel_->cost_of_swap(first, second, a, b) : 0) +
               busiest_cost(a, b, p_.rows + at_first, p_.rows + at_second, stays + (p_.stays ? at_first : 0),
                            stays + (p_.stays ? at_second : 0));
    }

    void swap(int first, int second, std::int64_t new_cost) {
        const int a = bin_of_[first], b = bin_of_[second];
        num_moves_ += move_of(first, b) + move_of(second, a) - move_of(first, a) - move_of(second, b);
        shift(first, a, -1);
        shift(first, b, 1);
        shift(second, b, -1);
        shift(second, a, 1);
        bin_of_[first] = b;
        bin_of_[second] = a;
        if (travel_)
            travel_->swap(first, second, a, b);
        cost_ = new_cost;
    }

  private:
    std::int64_t busiest_cost(int a, int b, const std::int32_t *first_rows, const std::int32_t *second_rows,
                              const std::int32_t *first_stays, const std::int32_t *second_stays) {
        const std::int64_t rows =
            busiest_after_swap(load_.data(), p_.bins, p_.cells, a, b, first_rows, second_rows, most_.data());
        std::int64_t visits = 0;
        // Visits as in cell.cpp, with logarithms as integers: shares of 0.25 and 0.5 are 295 and 710, in one bin 1005,
        // which the table turns into the probability 0.625 of a visit.
        if (p_.stays) {
            busiest_after_swap(stay_.data(), p_.bins, p_.cells, a, b, first_stays, second_stays, most_.data());
            for (int cell = 0; cell < p_.cells; ++cell)
                visits += p_.visit_cost[cell] * visit_probability(most_[cell]);
        }
        return rows * p_.row_cost + visits;
    }

    void shift(int expert, int bin, int sign) {
        const std::int64_t from = static_cast<std::int64_t>(expert) * p_.cells;
        const std::int64_t to = static_cast<std::int64_t>(bin) * p_.cells;
        for (int cell = 0; cell < p_.cells; ++cell)
            load_[to + cell] += sign * p_.rows[from + cell];
        for (int cell = 0; p_.stays && cell < p_.cells; ++cell)
            stay_[to + cell] += sign * p_.stays[from + cell];
    }

    std::int64_t move_of(int expert, int bin) const {
        return p_.current && p_.current[expert] >= 0 && p_.current[expert] != bin ? p_.move_cost : 0;
    }

    std::int64_t moves() {
        num_moves_ = 0;
        for (int expert = 0; expert < p_.experts; ++expert)
            num_moves_ += move_of(expert, bin_of_[expert]);
        return num_moves_;
    }

    const ReorderProblem &p_;
    std::vector<std::int32_t> &bin_of_;
    std::vector<std::int32_t> load_, stay_; // [bins, cells]
    std::vector<std::int32_t> most_, none_; // [cells]
    std::optional<Travel> travel_;
    std::int64_t cost_ = 0, num_moves_ = 0;
};

// Half the mean absolute change of 64 random swaps: the starting temperature. At it a typical bad swap is accepted
// about one time in seven (exp(-2)), enough to leave a poor start and not so much as to forget a good one.
std::int64_t typical_change(Search &search, const ReorderProblem &problem, const std::vector<std::int32_t> &bin_of,
                            Rng &rng) {
    std::int64_t sum = 0, count = 0;
    for (int sample = 0; sample < 64; ++sample) {
        const auto first = static_cast<int>(rng.below(problem.experts));
        const auto second = static_cast<int>(rng.below(problem.experts));
        if (bin_of[first] == bin_of[second])
            continue;
        const std::int64_t change = search.cost_of_swap(first, second) - search.cost();
        sum += change < 0 ? -change : change;
        ++count;
    }
    return count ? sum / (2 * count) : 0;
}

} // namespace

// Totals over all cells decide here; the search then sees to the single cells.
std::vector<std::int32_t> balanced_start(const ReorderProblem &problem) {
    std::vector<std::int64_t> total(problem.experts, 0), load(problem.bins, 0);
    std::vector<int> order(problem.experts), held(problem.bins, 0);
    for (int expert = 0; expert < problem.experts; ++expert)
        for (int cell = 0; cell < problem.cells; ++cell)
            total[expert] += problem.rows[static_cast<std::int64_t>(expert) * problem.cells + cell];
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return total[a] > total[b]; });
    std::vector<std::int32_t> bin_of(problem.experts);
    for (const int expert : order) {
        int lightest = -1;
        for (int bin = 0; bin < problem.bins; ++bin)
            if (held[bin] < problem.experts / problem.bins && (lightest < 0 || load[bin] < load[lightest]))
                lightest = bin;
        bin_of[expert] = lightest;
        load[lightest] += total[expert];
        ++held[lightest];
    }
    return bin_of;
}

std::int64_t reorder(const ReorderProblem &problem, std::int64_t iterations,
                     bool descend_only, std::uint64_t seed, std::vector<std::int32_t> &bin_of) {
    if (problem.bins < 2 || problem.cells == 0)
        return 0;
    Rng rng(seed);
    Search search(problem, bin_of);
    std::int64_t temperature = descend_only ? 0 : typical_change(search, problem, bin_of, rng);
    std::vector<std::int32_t> best = bin_of;
    std::int64_t best_cost = search.cost();
    for (int stage = 0; stage < STAGES; ++stage) {
        for (std::int64_t iteration = 0; iteration < iterations / STAGES; ++iteration) {
            const auto first = static_cast<int>(rng.below(problem.experts));
            const auto second = static_cast<int>(rng.below(problem.experts));
            const std::int64_t allowed = threshold(temperature, rng);
            if (bin_of[first] == bin_of[second])
                continue;
            // Descent wants gains; annealing takes equal swaps too.
            const std::int64_t limit = search.cost() + allowed - (descend_only ? 1 : 0);
            const std::int64_t cost = search.cost_of_swap(first, second);
            if (cost > limit)
                continue;
            search.swap(first, second, cost);
            if (cost < best_cost) {
                best_cost = cost;
                best = bin_of;
            }
        }
        temperature = cooled(temperature);
    }
    bin_of = best;
    return best_cost;
}

} // namespace moe_rl
