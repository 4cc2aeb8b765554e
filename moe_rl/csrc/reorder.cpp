#include "reorder.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <optional>

namespace moe_rl {

namespace {

// How the search works. Homes hold for a whole step, so a home is judged in all micro-batches (cells) at once: the cost
// is the sum over cells of the busiest bin, not the busiest sum. Two experts of 10 and 0 rows in one cell and 0 and 10
// in the next look alike in total, 10 and 10, but only in one bin do they complement each other.
//
// Proposals are swaps of two experts of different bins, which keep every bin full; annealing.h says when one is taken.

// most[cell] = the highest of the bins after first's values left bin a for b and second's came back.
MOE_RL_VECTOR_CLONES void busiest_after_swap(const std::int32_t *values, int bins, int cells, int a, int b,
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
}

// visitors[block] = tokens of the block with an expert in a node that `leaves` leaves and `comes` enters. A token stays a
// visitor when another expert of it remains: `once` has the tokens with exactly one.
MOE_RL_VECTOR_CLONES void visitors_after_swap(const std::uint64_t *any, const std::uint64_t *once,
                                              const std::uint64_t *leaves, const std::uint64_t *comes,
                                              const std::int32_t *block_start, int blocks, std::int32_t *visitors) {
    for (int block = 0; block < blocks; ++block) {
        std::int32_t count = 0;
        for (std::int32_t word = block_start[block]; word < block_start[block + 1]; ++word)
            count += std::popcount((any[word] & ~(leaves[word] & once[word])) | comes[word]);
        visitors[block] = count;
    }
}

// Copies of tokens between nodes, for all pools. Which node an expert is on matters only through the tokens that choose
// it, so they are bits, 64 at a time: swapping two experts costs two passes over some hundred words.
class Travel {
  public:
    Travel(const TokenBits &tokens, const std::vector<std::int32_t> &bin_of, int bins)
        : t_(tokens), bins_per_node_(bins / t_.nodes), blocks_(t_.pools * t_.nodes),
          any_(static_cast<std::size_t>(t_.nodes) * t_.words, 0), once_(any_), none_(t_.words, 0),
          visitors_(static_cast<std::size_t>(t_.nodes) * blocks_, 0), new_a_(blocks_), new_b_(blocks_),
          in_(blocks_, 0), out_(blocks_, 0) {
        if (!t_.deduplicated)
            for (std::size_t expert = 0; expert < bin_of.size(); ++expert)
                for (int block = 0; block < blocks_; ++block)
                    rows_.push_back(count(bits(static_cast<int>(expert)), block));
        for (int node = 0; node < t_.nodes; ++node) {
            refill(node, bin_of);
            after_swap(node, -1, -1, new_a_);
            keep(node, new_a_);
        }
        cost_ = 0;
        for (int pool = 0; pool < t_.pools; ++pool)
            cost_ += t_.copy_cost[pool] * busiest(pool, -1, -1);
    }

    std::int64_t cost() const { return cost_; }

    std::int64_t cost_of_swap(int first, int second, int a, int b) {
        a /= bins_per_node_;
        b /= bins_per_node_;
        if (a == b)
            return cost_;
        after_swap(a, first, second, new_a_);
        after_swap(b, second, first, new_b_);
        std::int64_t cost = 0;
        for (int pool = 0; pool < t_.pools; ++pool)
            cost += t_.copy_cost[pool] * busiest(pool, a, b);
        return cost;
    }

    // `bin_of` already has the two in their new bins.
    void swap(int first, int second, int a, int b, const std::vector<std::int32_t> &bin_of) {
        a /= bins_per_node_;
        b /= bins_per_node_;
        if (a == b)
            return;
        cost_ = cost_of_swap(first, second, a * bins_per_node_, b * bins_per_node_);
        keep(a, new_a_);
        keep(b, new_b_);
        refill(a, bin_of);
        refill(b, bin_of);
    }

  private:
    const std::uint64_t *bits(int expert) const {
        return expert < 0 ? none_.data() : t_.chosen + static_cast<std::int64_t>(expert) * t_.words;
    }

    std::int32_t count(const std::uint64_t *chosen, int block) const {
        std::int32_t sum = 0;
        for (std::int32_t word = t_.block_start[block]; word < t_.block_start[block + 1]; ++word)
            sum += std::popcount(chosen[word]);
        return sum;
    }

    std::int32_t *visitors(int node) { return visitors_.data() + static_cast<std::int64_t>(node) * blocks_; }

    // [blocks] copies that the node gets of each block once `leaves` left and `comes` came.
    void after_swap(int node, int leaves, int comes, std::vector<std::int32_t> &result) {
        if (t_.deduplicated) {
            const std::int64_t from = static_cast<std::int64_t>(node) * t_.words;
            visitors_after_swap(any_.data() + from, once_.data() + from, bits(leaves), bits(comes), t_.block_start,
                                blocks_, result.data());
            return;
        }
        for (int block = 0; block < blocks_; ++block)
            result[block] = (leaves < 0 ? all_rows_[block] : visitors(node)[block] - row(leaves, block)) +
                            (comes < 0 ? 0 : row(comes, block));
    }

    std::int32_t row(int expert, int block) const { return rows_[static_cast<std::size_t>(expert) * blocks_ + block]; }

    // Copies of the busiest node of a pool, in or out, when the nodes a and b have `new_a_` and `new_b_`.
    std::int64_t busiest(int pool, int a, int b) const {
        const std::int32_t *into = in_.data() + static_cast<std::ptrdiff_t>(pool) * t_.nodes;
        const std::int32_t *out = out_.data() + static_cast<std::ptrdiff_t>(pool) * t_.nodes;
        std::int32_t most = 0;
        if (a < 0) {
            for (int node = 0; node < t_.nodes; ++node)
                most = std::max({most, into[node], out[node]});
            return most;
        }
        const std::size_t first = static_cast<std::size_t>(pool) * t_.nodes;
        const std::int32_t *old_a = visitors_.data() + static_cast<std::size_t>(a) * blocks_ + first;
        const std::int32_t *old_b = visitors_.data() + static_cast<std::size_t>(b) * blocks_ + first;
        std::int32_t into_a = 0, into_b = 0;
        for (int node = 0; node < t_.nodes; ++node) {
            const std::int32_t of_a = node == a ? 0 : new_a_[first + node] - old_a[node];
            const std::int32_t of_b = node == b ? 0 : new_b_[first + node] - old_b[node];
            into_a += of_a;
            into_b += of_b;
            most = std::max(most, out[node] + of_a + of_b);
        }
        for (int node = 0; node < t_.nodes; ++node)
            most = std::max(most, into[node] + (node == a ? into_a : node == b ? into_b : 0));
        return most;
    }

    void keep(int node, const std::vector<std::int32_t> &now) {
        std::int32_t *before = visitors(node);
        for (int block = 0; block < blocks_; ++block) {
            const int source = block % t_.nodes, pool = block / t_.nodes;
            if (source != node) {
                in_[pool * t_.nodes + node] += now[block] - before[block];
                out_[block] += now[block] - before[block];
            }
            before[block] = now[block];
        }
    }

    void refill(int node, const std::vector<std::int32_t> &bin_of) {
        if (!t_.deduplicated) {
            all_rows_.assign(blocks_, 0);
            for (std::size_t expert = 0; expert < bin_of.size(); ++expert)
                for (int block = 0; bin_of[expert] / bins_per_node_ == node && block < blocks_; ++block)
                    all_rows_[block] += row(static_cast<int>(expert), block);
            return;
        }
        std::uint64_t *any = any_.data() + static_cast<std::int64_t>(node) * t_.words;
        std::uint64_t *once = once_.data() + static_cast<std::int64_t>(node) * t_.words;
        std::fill(any, any + t_.words, 0);
        std::fill(once, once + t_.words, 0);
        for (std::size_t expert = 0; expert < bin_of.size(); ++expert) {
            if (bin_of[expert] / bins_per_node_ != node)
                continue;
            const std::uint64_t *chosen = bits(static_cast<int>(expert));
            for (int word = 0; word < t_.words; ++word) {
                once[word] = (once[word] & ~chosen[word]) | (chosen[word] & ~any[word]);
                any[word] |= chosen[word];
            }
        }
    }

    const TokenBits &t_;
    int bins_per_node_, blocks_;
    std::vector<std::uint64_t> any_, once_, none_;             // [nodes, words] tokens with an expert, with exactly one
    std::vector<std::int32_t> visitors_, new_a_, new_b_;       // [nodes, blocks]; [blocks]
    std::vector<std::int32_t> in_, out_;                       // [pools, nodes] copies
    std::vector<std::int32_t> rows_, all_rows_;                // [E, blocks]; [blocks]; where nothing is deduplicated
    std::int64_t cost_ = 0;
};

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
            travel_->swap(first, second, a, b, bin_of_);
        cost_ = new_cost;
    }

  private:
    std::int64_t busiest_cost(int a, int b, const std::int32_t *first_rows, const std::int32_t *second_rows,
                              const std::int32_t *first_stays, const std::int32_t *second_stays) {
        busiest_after_swap(load_.data(), p_.bins, p_.cells, a, b, first_rows, second_rows, most_.data());
        std::int64_t rows = 0, visits = 0;
        for (int cell = 0; cell < p_.cells; ++cell)
            rows += most_[cell];
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
                     bool descend_only, std::uint64_t seed, Deadline &deadline, std::vector<std::int32_t> &bin_of) {
    if (problem.bins < 2 || problem.cells == 0)
        return 0;
    Rng rng(seed);
    Search search(problem, bin_of);
    std::int64_t temperature = descend_only ? 0 : typical_change(search, problem, bin_of, rng);
    std::vector<std::int32_t> best = bin_of;
    std::int64_t best_cost = search.cost();
    for (int stage = 0; stage < STAGES && !deadline.reached(); ++stage) {
        for (std::int64_t iteration = 0; iteration < iterations / STAGES; ++iteration) {
            if (iteration % CHECKED_EVERY == CHECKED_EVERY - 1 && deadline.reached())
                break;
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
