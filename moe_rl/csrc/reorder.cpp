#include "reorder.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "travel.h"

namespace moe_rl {

namespace {

// How the search works. Homes hold for a whole step, so a home is judged in all micro-batches (cells) at once: the cost
// is the sum over cells of the busiest bin, not the busiest sum. Two experts of 10 and 0 rows in one cell and 0 and 10
// in the next look alike in total, 10 and 10, but only in one bin do they complement each other.
//
// Proposals are swaps of two experts of different bins, which keep every bin full; annealing.h says when one is taken.
//
// Where the peak alone counts the search runs again and again, each time with a limit below the fullest bin so far: rows
// above it cost STEEP times as much. Two cells whose busiest bins have 20 and 12 rows become 18 and 16 then, though the
// sum is two rows worse.

// most[cell] = the highest of the bins after first's values left bin a for b and second's came back. Returns their sum,
// at their price, rows above the limit counted STEEP times more.
MOE_RL_VECTOR_CLONES std::int64_t busiest_after_swap(const std::int32_t *values, int bins, int cells, int a, int b,
                                             const std::int32_t *first, const std::int32_t *second,
                                             std::int32_t limit, const RowPrice &price, std::int32_t *most) {
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
    if (price.power > 1)
        return price.of_all(most, cells, limit);
    std::int64_t sum = 0;
    for (int cell = 0; cell < cells; ++cell)
        sum += most[cell];
    if (limit != NO_LIMIT)
        for (int cell = 0; cell < cells; ++cell)
            sum += STEEP * std::max(0, most[cell] - limit);
    return sum;
}

class Search {
  public:
    Search(const ReorderProblem &problem, std::int32_t limit, std::vector<std::int32_t> &bin_of, Rng &rng)
        : p_(problem), limit_(limit), bin_of_(bin_of), load_(static_cast<std::size_t>(p_.bins) * p_.cells, 0), most_(p_.cells) {
        if (p_.tokens)
            travel_.emplace(*p_.tokens, bin_of_, p_.bins);
        for (int expert = 0; expert < p_.experts; ++expert) {
            shift(expert, bin_of_[expert], 1);
            moves_ += p_.moves.of(expert, bin_of_[expert]);
        }
        const std::vector<std::int32_t> nothing(p_.cells, 0);
        cost_ = moves_ + p_.row_cost * busiest_after_swap(load_.data(), p_.bins, p_.cells, 0, 1, nothing.data(),
                                                          nothing.data(), limit_, p_.price, most_.data()) +
                (travel_ ? travel_->cost() : 0);
        draw(rng);
    }

    std::int64_t cost() const { return cost_; }
    std::int64_t change() const { return new_cost_ - cost_; }

    // Prices the swap of the two experts that were drawn, in O(bins * cells): only two bins change, but which one is the
    // busiest may change in every cell. False where they share a bin.
    bool propose(Rng &rng) {
        first_ = next_first_;
        second_ = next_second_;
        draw(rng);
        const int a = bin_of_[first_], b = bin_of_[second_];
        if (a == b)
            return false;
        const MoveCost &move = p_.moves;
        new_moves_ = moves_ - move.of(first_, a) - move.of(second_, b) + move.of(first_, b) + move.of(second_, a);
        const std::int64_t rows = busiest_after_swap(load_.data(), p_.bins, p_.cells, a, b, rows_of(first_),
                                                     rows_of(second_), limit_, p_.price, most_.data());
        new_cost_ = new_moves_ + rows * p_.row_cost + (travel_ ? travel_->cost_of_swap(first_, second_, a, b) : 0);
        return true;
    }

    void accept() {
        const int a = bin_of_[first_], b = bin_of_[second_];
        shift(first_, a, -1);
        shift(first_, b, 1);
        shift(second_, b, -1);
        shift(second_, a, 1);
        std::swap(bin_of_[first_], bin_of_[second_]);
        if (travel_)
            travel_->swap(first_, second_);
        moves_ = new_moves_;
        cost_ = new_cost_;
    }

  private:
    // One proposal ahead: the stream of draws is then (pair, threshold), as for the tables of docs/planner.md.
    void draw(Rng &rng) {
        next_first_ = static_cast<int>(rng.below(p_.experts));
        next_second_ = static_cast<int>(rng.below(p_.experts));
    }

    const std::int32_t *rows_of(int expert) const { return p_.rows + static_cast<std::int64_t>(expert) * p_.cells; }

    void shift(int expert, int bin, int sign) {
        const std::int32_t *rows = rows_of(expert);
        std::int32_t *load = load_.data() + static_cast<std::int64_t>(bin) * p_.cells;
        for (int cell = 0; cell < p_.cells; ++cell)
            load[cell] += sign * rows[cell];
    }

    const ReorderProblem &p_;
    const std::int32_t limit_; // rows of a bin above which rows cost more
    std::vector<std::int32_t> &bin_of_;
    std::vector<std::int32_t> load_; // [bins, cells]
    std::vector<std::int32_t> most_; // [cells]
    std::optional<Travel> travel_;
    std::int64_t cost_ = 0, moves_ = 0;

    // The proposal on the table.
    int first_ = 0, second_ = 0, next_first_ = 0, next_second_ = 0;
    std::int64_t new_cost_ = 0, new_moves_ = 0;
};

constexpr int SAMPLES = 64;
// At half the mean change of random swaps a typical bad one is taken one time in seven (exp(-2)): enough to leave a poor
// start and not so much as to forget a good one.
constexpr int COOLER = 2;
// Searches for a lower peak after the first, each for at least a row and 2 % fewer, like those of packing for buffers.
constexpr int PEAK_TURNS = 6;
constexpr double PEAK_STEP = 0.98;

std::int64_t lower_sum(const ReorderProblem &problem, std::int32_t limit, std::int64_t iterations, Rng &rng,
                       std::vector<std::int32_t> &bin_of) {
    std::vector<std::int32_t> best = bin_of;
    Search search(problem, limit, bin_of, rng);
    const std::int64_t cost = anneal(search, rng, SAMPLES, COOLER, iterations, [&] { best = bin_of; });
    bin_of = best;
    return cost;
}

// Rows of the fullest bin of all cells.
std::int32_t peak_of(const ReorderProblem &problem, const std::vector<std::int32_t> &bin_of) {
    std::vector<std::int32_t> load(static_cast<std::size_t>(problem.bins) * problem.cells, 0);
    for (int expert = 0; expert < problem.experts; ++expert)
        for (int cell = 0; cell < problem.cells; ++cell)
            load[static_cast<std::size_t>(bin_of[expert]) * problem.cells + cell] +=
                problem.rows[static_cast<std::int64_t>(expert) * problem.cells + cell];
    return std::ranges::max(load);
}

std::int64_t lower_peak(const ReorderProblem &problem, std::int64_t iterations, Rng &rng,
                        std::vector<std::int32_t> &bin_of) {
    std::int32_t peak = peak_of(problem, bin_of);
    std::vector<std::int32_t> next = bin_of;
    lower_sum(problem, NO_LIMIT, iterations, rng, next);
    for (int turn = 0; turn < PEAK_TURNS; ++turn) {
        const std::int32_t reached = peak_of(problem, next);
        if (reached < peak) {
            peak = reached;
            bin_of = next;
        } else if (turn > 0) {
            break;
        }
        lower_sum(problem, std::min(peak - 1, static_cast<std::int32_t>(PEAK_STEP * peak)), iterations, rng, next);
    }
    if (peak_of(problem, next) < peak)
        bin_of = next;
    return peak_of(problem, bin_of);
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

std::int64_t reorder(const ReorderProblem &problem, std::int64_t iterations, std::uint64_t seed,
                     std::vector<std::int32_t> &bin_of) {
    if (problem.bins < 2 || problem.cells == 0)
        return 0;
    Rng rng(seed);
    return problem.peak ? lower_peak(problem, iterations, rng, bin_of) : lower_sum(problem, NO_LIMIT, iterations, rng, bin_of);
}

} // namespace moe_rl
