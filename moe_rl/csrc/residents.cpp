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
          has_(static_cast<std::size_t>(p_.nodes) * p_.experts, 0), most_(p_.tokens->pools) {
        if (p_.rows)
            load_.assign(static_cast<std::size_t>(p_.nodes) * p_.tokens->pools, 0);
        if (p_.fixed)
            std::copy(p_.fixed, p_.fixed + load_.size(), load_.begin());
        if (p_.home_rank)
            sent_.assign(*std::max_element(p_.home_rank, p_.home_rank + p_.experts) + 1, 0);
        for (int expert = 0; p_.rows && expert < p_.experts; ++expert)
            for (int node = 0; node < p_.nodes; ++node)
                shift(expert, node, node_of_[expert], 1);
        for (std::size_t at = 0; at < held_.size(); ++at)
            if (held_[at] >= 0) {
                serve(static_cast<int>(at) / p_.slots, held_[at], 1);
                travel_.cost_of_exchange(static_cast<int>(at) / p_.slots, -1, held_[at]);
                travel_.exchange(static_cast<int>(at) / p_.slots, -1, held_[at]);
                has(static_cast<int>(at) / p_.slots, held_[at]) = 1;
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
            leaves_ = static_cast<int>(rng.below(p_.experts));
            comes_ = static_cast<int>(rng.below(p_.experts));
            const int a = node_of_[leaves_], b = node_of_[comes_];
            // An expert does not move to where a copy of it is: the slot would be lost.
            if (a == b || has(b, leaves_) || has(a, comes_))
                return false;
            new_other_ = other_ + move_of(leaves_, b) + move_of(comes_, a) - move_of(leaves_, a) - move_of(comes_, b);
            swap_rows(leaves_, a, comes_, b);
            new_busiest_ = busiest();
            swap_rows(leaves_, b, comes_, a);
            new_cost_ = new_other_ + new_busiest_ + travel_.cost_of_swap(leaves_, comes_, a, b);
            return true;
        }
        slot_ = static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(held_.size())));
        trades_ = p_.home_rank && rng.below(2) == 0;
        if (trades_)
            return propose_trade(static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(held_.size()))));
        const int node = static_cast<int>(slot_) / p_.slots;
        leaves_ = held_[slot_];
        comes_ = static_cast<int>(rng.below(p_.experts + 1)) - 1;
        if (comes_ == leaves_ || (comes_ >= 0 && (node_of_[comes_] == node || has(node, comes_))))
            return false;
        const int sender = comes_ >= 0 && p_.home_rank ? p_.home_rank[comes_] : -1;
        if (sender >= 0 && sent_[sender] >= p_.most_sent && (leaves_ < 0 || p_.home_rank[leaves_] != sender))
            return false;
        new_other_ = other_ + ((comes_ >= 0) - (leaves_ >= 0)) * p_.held_cost;
        serve(node, leaves_, -1);
        serve(node, comes_, 1);
        new_busiest_ = busiest();
        serve(node, comes_, -1);
        serve(node, leaves_, 1);
        new_cost_ = new_other_ + new_busiest_ + travel_.cost_of_exchange(node, leaves_, comes_);
        return true;
    }

    bool propose_trade(std::size_t with) {
        const int a = static_cast<int>(slot_) / p_.slots, b = static_cast<int>(with) / p_.slots;
        with_ = with;
        leaves_ = held_[slot_];
        comes_ = held_[with];
        if (a == b || leaves_ < 0 || comes_ < 0 || leaves_ == comes_)
            return false;
        if (node_of_[leaves_] == b || node_of_[comes_] == a || has(b, leaves_) || has(a, comes_))
            return false;
        new_other_ = other_;
        serve_traded(a, b, 1);
        new_busiest_ = busiest();
        serve_traded(a, b, -1);
        new_cost_ = new_other_ + new_busiest_ + travel_.cost_of_trade(a, leaves_, b, comes_);
        return true;
    }

    std::int64_t change() const { return new_cost_ - cost(); }

    void accept() {
        other_ = new_other_;
        busiest_ = new_busiest_;
        if (swaps_homes_) {
            const int a = node_of_[leaves_], b = node_of_[comes_];
            swap_rows(leaves_, a, comes_, b);
            std::swap(node_of_[leaves_], node_of_[comes_]);
            travel_.swap(leaves_, comes_, a, b);
            return;
        }
        const int node = static_cast<int>(slot_) / p_.slots;
        if (trades_) {
            const int other = static_cast<int>(with_) / p_.slots;
            travel_.trade(node, leaves_, other, comes_);
            serve_traded(node, other, 1);
            std::swap(held_[slot_], held_[with_]);
            for (const auto &[at, expert, now] : {std::tuple(node, leaves_, 0), std::tuple(node, comes_, 1),
                                                  std::tuple(other, comes_, 0), std::tuple(other, leaves_, 1)})
                has(at, expert) = static_cast<std::uint8_t>(now);
            return;
        }
        travel_.exchange(node, leaves_, comes_);
        serve(node, leaves_, -1);
        serve(node, comes_, 1);
        held_[slot_] = comes_;
        for (const int expert : {leaves_, comes_})
            if (expert >= 0)
                has(node, expert) = expert == comes_;
    }

  private:
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
        if (p_.rows) {
            shift(expert, node, node, times);
            shift(expert, node, node_of_[expert], -times);
        }
    }
    // Node a's copy and node b's change places (times 1), or go back (-1).
    void serve_traded(int a, int b, int times) {
        serve(a, leaves_, -times);
        serve(a, comes_, times);
        serve(b, comes_, -times);
        serve(b, leaves_, times);
    }
    // What is left to the homes of two experts goes from a to b and from b to a.
    void swap_rows(int first, int a, int second, int b) {
        for (int node = 0; p_.rows && node < p_.nodes; ++node)
            for (const auto &[expert, from, to] : {std::tuple(first, a, b), std::tuple(second, b, a)})
                if (!has(node, expert)) {
                    shift(expert, node, from, -1);
                    shift(expert, node, to, 1);
                }
    }
    std::int64_t busiest() {
        if (!p_.rows)
            return 0;
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
    bool swaps_homes_ = false, trades_ = false;
    std::size_t slot_ = 0, with_ = 0;
    int leaves_ = -1, comes_ = -1;
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
