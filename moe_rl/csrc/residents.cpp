#include "residents.h"

#include <algorithm>
#include <tuple>

#include "travel.h"

namespace moe_rl {

namespace {

// load [pools] += times * rows [pools].
MOE_RL_VECTOR_CLONES void add_pools(std::int32_t *__restrict load, const std::int32_t *__restrict rows, int times,
                                    int pools) {
    for (int pool = 0; pool < pools; ++pool)
        load[pool] += times * rows[pool];
}

// The cost of the busiest node's load [nodes, pools], all pools together; `most` [pools] is room for it.
MOE_RL_VECTOR_CLONES std::int64_t busiest_cost(const std::int32_t *__restrict load,
                                               const std::int64_t *__restrict row_cost, int nodes, int pools,
                                               std::int32_t *__restrict most) {
    std::copy(load, load + pools, most);
    for (int node = 1; node < nodes; ++node)
        for (int pool = 0; pool < pools; ++pool)
            most[pool] = std::max(most[pool], load[static_cast<std::ptrdiff_t>(node) * pools + pool]);
    std::int64_t sum = 0;
    for (int pool = 0; pool < pools; ++pool)
        sum += row_cost[pool] * most[pool];
    return sum;
}

// How the search works. What a copy saves depends on the others: of a token's two experts on the other node both have to
// be here before the token stays. And a layer waits for its busiest node, so that the copies that save most in all may
// leave one node with all the rest: three nodes that send 10, 10 and 40 are no better off than with 40 each. Hence the
// same annealing as over homes (reorder.cpp), on the same counts of tokens. A proposal puts another expert, or none, in
// a slot of a node; where homes may move, every other one swaps two homes. Where homes send no more than so many copies,
// every other one trades: two nodes give each other a copy, since else most experts cannot come before they have left.
class Exchange {
  public:
    Exchange(const ResidentProblem &problem, std::vector<std::int32_t> &node_of, std::vector<std::int32_t> &held)
        : p_(problem), node_of_(node_of), held_(held), travel_(*p_.tokens, node_of, p_.nodes),
          has_(static_cast<std::size_t>(p_.nodes) * p_.experts, 0),
          load_(static_cast<std::size_t>(p_.nodes) * p_.tokens->pools, 0), most_(p_.tokens->pools) {
        if (p_.fixed)
            std::copy(p_.fixed, p_.fixed + load_.size(), load_.begin());
        if (p_.home_rank)
            sent_.assign(*std::max_element(p_.home_rank, p_.home_rank + p_.experts) + 1, 0);
        for (int expert = 0; expert < p_.experts; ++expert)
            for (int node = 0; node < p_.nodes; ++node)
                shift(expert, node, node_of_[expert], 1);
        for (std::size_t at = 0; at < held_.size(); ++at)
            if (held_[at] >= 0) {
                changes_ = {{node_at(at), -1, held_[at]}};
                travel_.cost_of_exchange(changes_);
                make_changes();
                other_ += p_.held_cost;
            }
        for (int expert = 0; expert < p_.experts; ++expert)
            other_ += move_of(expert, node_of_[expert]);
        busiest_ = busiest();
    }

    std::int64_t cost() const { return travel_.cost() + other_ + busiest_; }

    bool propose(Rng &rng) {
        swaps_homes_ = p_.move_cost >= 0 && rng.below(2) == 0;
        if (swaps_homes_) {
            first_ = static_cast<int>(rng.below(p_.experts));
            second_ = static_cast<int>(rng.below(p_.experts));
            const int a = node_of_[first_], b = node_of_[second_];
            // An expert does not move to where a copy of it is: the slot would be lost.
            if (a == b || has(b, first_) || has(a, second_))
                return false;
            new_other_ = other_ + move_of(first_, b) + move_of(second_, a) - move_of(first_, a) - move_of(second_, b);
            swap_rows(first_, a, second_, b);
            new_busiest_ = busiest();
            swap_rows(first_, b, second_, a);
            new_cost_ = new_other_ + new_busiest_ + travel_.cost_of_swap(first_, second_, a, b);
            return true;
        }
        const auto slots = static_cast<std::int64_t>(held_.size());
        slots_.assign(1, static_cast<std::size_t>(rng.below(slots)));
        const int leaves = held_[slots_[0]];
        if (p_.home_rank && rng.below(2) == 0) {
            slots_.push_back(static_cast<std::size_t>(rng.below(slots)));
            const int comes = held_[slots_[1]];
            if (leaves < 0 || comes < 0)
                return false;
            changes_ = {{node_at(slots_[0]), leaves, comes}, {node_at(slots_[1]), comes, leaves}};
        } else {
            const int comes = static_cast<int>(rng.below(p_.experts + 1)) - 1;
            const int sender = comes >= 0 && p_.home_rank ? p_.home_rank[comes] : -1;
            if (sender >= 0 && sent_[sender] >= p_.most_sent && (leaves < 0 || p_.home_rank[leaves] != sender))
                return false;
            changes_ = {{node_at(slots_[0]), leaves, comes}};
        }
        new_other_ = other_;
        for (const auto &[node, leaves, comes] : changes_) {
            if (comes == leaves || (comes >= 0 && (node_of_[comes] == node || has(node, comes))))
                return false;
            new_other_ += ((comes >= 0) - (leaves >= 0)) * p_.held_cost;
        }
        serve_changes(1);
        new_busiest_ = busiest();
        serve_changes(-1);
        new_cost_ = new_other_ + new_busiest_ + travel_.cost_of_exchange(changes_);
        return true;
    }

    std::int64_t change() const { return new_cost_ - cost(); }

    void accept() {
        other_ = new_other_;
        busiest_ = new_busiest_;
        if (swaps_homes_) {
            const int a = node_of_[first_], b = node_of_[second_];
            swap_rows(first_, a, second_, b);
            std::swap(node_of_[first_], node_of_[second_]);
            travel_.swap(first_, second_);
            return;
        }
        make_changes();
        for (std::size_t i = 0; i < slots_.size(); ++i)
            held_[slots_[i]] = changes_[i].comes;
    }

  private:
    int node_at(std::size_t slot) const { return static_cast<int>(slot) / p_.slots; }
    std::uint8_t &has(int node, int expert) { return has_[static_cast<std::size_t>(node) * p_.experts + expert]; }
    std::int64_t move_of(int expert, int node) const {
        return p_.move_cost > 0 && p_.current[expert] != node ? p_.move_cost : 0;
    }

    // `times` the rows that `node` sends to the expert come to the node `there`.
    void shift(int expert, int node, int there, int times) {
        const int pools = p_.tokens->pools;
        const std::int32_t *rows = p_.rows + (static_cast<std::ptrdiff_t>(expert) * p_.nodes + node) * pools;
        std::int32_t *load = load_.data() + static_cast<std::ptrdiff_t>(there) * pools;
        if (pools == 1)
            *load += times * *rows;
        else
            add_pools(load, rows, times, pools);
    }
    // The node computes the rows that it sends to the expert (times 1), or the expert's home does again (-1).
    void serve(int node, int expert, int times) {
        if (expert < 0)
            return;
        if (p_.home_rank)
            sent_[p_.home_rank[expert]] += times;
        shift(expert, node, node, times);
        shift(expert, node, node_of_[expert], -times);
    }
    // What nodes serve once `changes_` are made (times 1), or without them again (-1).
    void serve_changes(int times) {
        for (const auto &[node, leaves, comes] : changes_) {
            serve(node, leaves, -times);
            serve(node, comes, times);
        }
    }
    // Does what `travel_` was last asked for.
    void make_changes() {
        travel_.exchange(changes_);
        serve_changes(1);
        for (const auto &[node, leaves, comes] : changes_)
            for (const int expert : {leaves, comes})
                if (expert >= 0)
                    has(node, expert) = expert == comes;
    }
    // What is left to the homes of two experts goes from a to b and from b to a.
    void swap_rows(int first, int a, int second, int b) {
        for (int node = 0; node < p_.nodes; ++node)
            for (const auto &[expert, from, to] : {std::tuple(first, a, b), std::tuple(second, b, a)})
                if (!has(node, expert)) {
                    shift(expert, node, from, -1);
                    shift(expert, node, to, 1);
                }
    }
    std::int64_t busiest() {
        if (p_.tokens->pools == 1)
            return *p_.row_cost * *std::max_element(load_.begin(), load_.end());
        return busiest_cost(load_.data(), p_.row_cost, p_.nodes, p_.tokens->pools, most_.data());
    }

    const ResidentProblem &p_;
    std::vector<std::int32_t> &node_of_, &held_;
    Travel travel_;
    std::vector<std::uint8_t> has_; // [nodes, E] copies
    std::vector<std::int32_t> load_; // [nodes, pools] rows
    std::vector<std::int32_t> most_; // [pools] of the busiest node
    std::vector<int> sent_;          // [ranks] copies
    std::int64_t other_ = 0;         // transfers and moves
    std::int64_t busiest_ = 0;       // rows

    // The proposal on the table.
    bool swaps_homes_ = false;
    int first_ = 0, second_ = 0;       // experts, where homes are swapped
    std::vector<CopyChange> changes_;  // one, or the two of a trade,
    std::vector<std::size_t> slots_;   // and their places in `held_`
    std::int64_t new_cost_ = 0, new_other_ = 0, new_busiest_ = 0;
};

constexpr int SAMPLES = 64;
// The start is good already: the search begins where a typical bad proposal is taken once in exp(8). Begun at exp(4) the
// development trace is 0.1 % slower (EP32, one resident slot).
constexpr int COOLER = 8;

} // namespace

std::int64_t improve_residents(const ResidentProblem &problem, std::int64_t iterations, std::uint64_t seed,
                       std::vector<std::int32_t> &node_of, std::vector<std::int32_t> &held) {
    if (problem.nodes < 2 || held.empty() || problem.tokens->words() == 0)
        return 0;
    Rng rng(seed);
    std::vector<std::int32_t> best_held = held, best_home = node_of;
    Exchange search(problem, node_of, held);
    const std::int64_t best = anneal(search, rng, SAMPLES, COOLER, iterations, [&] {
        best_held = held;
        best_home = node_of;
    });
    held = best_held;
    node_of = best_home;
    return best;
}

} // namespace moe_rl
