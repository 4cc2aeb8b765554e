#include "pack.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "rng.h"

namespace moe_rl {

namespace {

// How packing works. A micro-batch's load is the sum of its sequences', and sequences have tastes: one that sends 30
// rows to node 0 and 10 to node 1 is best met by one with 10 and 30. Two micro-batches of two such sequences cost 60 +
// 60 when like goes with like and 40 + 40 when they are mixed, for the same rows, and no expert has moved. Nothing is
// copied and nothing is sent, so of all levers this one is free, where the framework lets the layout be chosen.
//
// A proposal moves one sequence to another place, or swaps two, every other time two of like length; annealing as in
// reorder.cpp. What a sequence costs beside
// its experts is part of the cost: a micro-batch waits for its busiest place, so long sequences should meet long ones.

// Sum over layers of the price of the highest bin of a batch that gains `in` and loses `out`; `highest` is scratch of L entries.
MOE_RL_VECTOR_CLONES std::int64_t balance_cost(const std::int32_t *load, const std::int32_t *in,
                                               const std::int32_t *out, int bins, int layers, std::int32_t limit,
                                               const RowPrice &price, std::int32_t *highest) {
    for (int layer = 0; layer < layers; ++layer)
        highest[layer] = load[layer] + in[layer] - out[layer];
    for (int bin = 1; bin < bins; ++bin) {
        load += layers;
        in += layers;
        out += layers;
        for (int layer = 0; layer < layers; ++layer)
            highest[layer] = std::max(highest[layer], load[layer] + in[layer] - out[layer]);
    }
    if (price.power > 1)
        return price.of_all(highest, layers, limit);
    std::int64_t sum = 0;
    for (int layer = 0; layer < layers; ++layer)
        sum += highest[layer] + STEEP * std::max(0, highest[layer] - limit);
    return sum;
}

class Packing {
  public:
    Packing(const PackProblem &problem, std::vector<std::int32_t> &place_of)
        : p_(problem), width_(static_cast<std::size_t>(p_.bins) * p_.layers), place_of_(place_of), none_(width_, 0),
          scratch_(p_.layers), load_(width_ * p_.batches, 0), balance_(p_.batches, 0), tokens_(p_.places, 0),
          work_(static_cast<std::size_t>(p_.parts) * p_.places, 0), members_(p_.places), position_(p_.sequences),
          by_tokens_(p_.sequences), rank_(p_.sequences), distances_(std::bit_width(static_cast<unsigned>(p_.sequences))),
          places_(p_.batches), of_group_(p_.groups, 0), of_rank_(std::max(1, p_.ranks), 0) {
        std::iota(by_tokens_.begin(), by_tokens_.end(), 0);
        std::stable_sort(by_tokens_.begin(), by_tokens_.end(), [&](int a, int b) { return p_.tokens[a] < p_.tokens[b]; });
        for (int rank = 0; rank < p_.sequences; ++rank)
            rank_[by_tokens_[rank]] = rank;
        for (int place = 0; place < p_.places; ++place)
            places_[p_.batch_of[place]].push_back(place);
        for (int sequence = 0; sequence < p_.sequences; ++sequence) {
            enter(sequence, place_of_[sequence]);
            std::int32_t *load = load_.data() + width_ * p_.batch_of[place_of_[sequence]];
            for (std::size_t i = 0; i < width_; ++i)
                load[i] += of(sequence)[i];
        }
        price_ = {p_.power, std::max(1.0, most_rows_of_a_layer())};
        for (int batch = 0; batch < p_.batches; ++batch) {
            balance_[batch] = balance_after(batch, none_.data(), none_.data());
            of_group_[group_of(batch)] += balance_[batch] + busiest_places(batch, false);
        }
        cost_ = of_groups(-1, 0, -1, 0);
        for (int sequence = 0; sequence < p_.sequences; ++sequence)
            cost_ += travel(sequence, place_of_[sequence]);
    }

    std::int64_t cost() const { return cost_; }

    // Draws a move of one sequence, or a swap of two, and prices it. False when the move is not allowed: a place would
    // pass the token budget, or be left empty (a rank would have nothing to run while others wait for it).
    bool propose(Rng &rng) {
        first_ = static_cast<int>(rng.below(p_.sequences));
        from_ = place_of_[first_];
        if ((p_.ranks == 0 || p_.most > 0) && rng.below(2) == 0) {
            // With one about as long, places keep their work and their budgets: seven long-tailed batches at EP32 became
            // .17 % faster. All orders of distance are as likely, so that no length scale has to be known.
            const std::int64_t other = rank_[first_] + 1 + rng.below(std::int64_t{1} << rng.below(distances_));
            if (other >= p_.sequences || place_of_[by_tokens_[other]] == from_)
                return false;
            second_ = by_tokens_[other];
            to_ = place_of_[second_];
        } else {
            // Among all places, or those of the sequence's rank: every `stride`-th. Where it may change it, either, by halves.
            const int own = std::max(1, p_.ranks);
            const int stride = p_.most > 0 && (p_.places < 2 * own || rng.below(2) == 0) ? 1 : own;
            const int other = static_cast<int>(rng.below(p_.places / stride - 1));
            to_ = from_ % stride + stride * (other + (other >= from_ / stride ? 1 : 0));
            const auto partners = static_cast<std::int64_t>(members_[to_].size());
            const bool moves = p_.most == 0 || to_ % own == from_ % own || of_rank_[to_ % own] < p_.most;
            if (!moves && partners == 0)
                return false;
            const std::int64_t pick = rng.below(partners + (moves ? 1 : 0));
            second_ = pick < partners ? members_[to_][pick] : -1;
        }
        if (second_ < 0 && members_[from_].size() == 1)
            return false;
        const std::int64_t grows = p_.tokens[first_] - (second_ >= 0 ? p_.tokens[second_] : 0);
        if (tokens_[to_] + grows > p_.budget || tokens_[from_] - grows > p_.budget)
            return false;
        price();
        return true;
    }

    std::int64_t change() const { return change_; }

    void accept() {
        const int a = p_.batch_of[from_], b = p_.batch_of[to_];
        if (a != b) {
            const std::int32_t *goes = of(first_), *comes = of(second_);
            std::int32_t *load_a = load_.data() + width_ * a, *load_b = load_.data() + width_ * b;
            for (std::size_t i = 0; i < width_; ++i) {
                const std::int32_t moved = goes[i] - comes[i];
                load_a[i] -= moved;
                load_b[i] += moved;
            }
            balance_[a] = new_balance_a_;
            balance_[b] = new_balance_b_;
        }
        of_group_[group_of(a)] += change_a_;
        of_group_[group_of(b)] += change_b_;
        leave(first_);
        if (second_ >= 0) {
            leave(second_);
            enter(second_, from_);
        }
        enter(first_, to_);
        cost_ += change_;
    }

  private:
    const std::int32_t *of(int sequence) const {
        return sequence < 0 ? none_.data() : p_.load + width_ * static_cast<std::size_t>(p_.row_of[sequence]);
    }

    double most_rows_of_a_layer() const {
        std::vector<double> rows(p_.layers, 0.0);
        for (std::size_t i = 0; i < load_.size(); ++i)
            rows[i % p_.layers] += load_[i];
        return rows.empty() ? 0.0 : *std::max_element(rows.begin(), rows.end());
    }

    std::int64_t balance_after(int batch, const std::int32_t *in, const std::int32_t *out) {
        return balance_cost(load_.data() + width_ * batch, in, out, p_.bins, p_.layers, p_.limit,
                            price_, scratch_.data());
    }

    // What a batch waits for beside its experts, now or after the proposal: in every part the place with most work.
    std::int64_t busiest_places(int batch, bool after) const {
        std::int64_t sum = 0;
        for (int part = 0; part < p_.parts; ++part) {
            const std::int64_t *own = p_.work + static_cast<std::int64_t>(part) * p_.sequences;
            const std::int64_t *work = work_.data() + static_cast<std::int64_t>(part) * p_.places;
            const std::int64_t moved = after ? own[first_] - (second_ >= 0 ? own[second_] : 0) : 0;
            std::int64_t most = 0;
            for (const int place : places_[batch])
                most = std::max(most, work[place] + (place == to_ ? moved : place == from_ ? -moved : 0));
            sum += most;
        }
        return sum;
    }

    // Only the two batches concerned change, so a proposal costs O(bins * layers) whatever the number of sequences.
    void price() {
        const int a = p_.batch_of[from_], b = p_.batch_of[to_];
        change_a_ = busiest_places(a, true) - busiest_places(a, false);
        change_b_ = 0;
        if (a != b) {
            new_balance_a_ = balance_after(a, of(second_), of(first_));
            new_balance_b_ = balance_after(b, of(first_), of(second_));
            change_a_ += new_balance_a_ - balance_[a];
            change_b_ = busiest_places(b, true) - busiest_places(b, false) + new_balance_b_ - balance_[b];
        }
        change_ = of_groups(group_of(a), change_a_, group_of(b), change_b_) - of_groups(-1, 0, -1, 0);
        change_ += travel(first_, to_) - travel(first_, from_) + travel(second_, from_) - travel(second_, to_);
    }

    int group_of(int batch) const { return batch / (p_.batches / p_.groups); }

    // Groups run side by side and the step waits for the slowest; the others count as well, or most moves would be free.
    std::int64_t of_groups(int one, std::int64_t one_gains, int two, std::int64_t two_gains) const {
        std::int64_t most = 0, sum = 0;
        for (int group = 0; group < p_.groups; ++group) {
            const std::int64_t own =
                of_group_[group] + (group == one ? one_gains : 0) + (group == two ? two_gains : 0);
            most = std::max(most, own);
            sum += own;
        }
        return p_.groups == 1 || !p_.slowest_group ? sum : (sum + p_.groups * most) / 2;
    }

    std::int64_t travel(int sequence, int place) const {
        if (sequence < 0 || !p_.travel || p_.node_of[place] < 0)
            return 0;
        return p_.travel[static_cast<std::int64_t>(sequence) * p_.nodes + p_.node_of[place]];
    }

    void weigh(int sequence, int place, int sign) {
        tokens_[place] += sign * p_.tokens[sequence];
        for (std::int64_t part = 0; part < p_.parts; ++part)
            work_[part * p_.places + place] += sign * p_.work[part * p_.sequences + sequence];
    }

    void enter(int sequence, int place) {
        place_of_[sequence] = place;
        weigh(sequence, place, 1);
        ++of_rank_[place % std::max(1, p_.ranks)];
        position_[sequence] = static_cast<int>(members_[place].size());
        members_[place].push_back(sequence);
    }

    void leave(int sequence) {
        const int place = place_of_[sequence];
        --of_rank_[place % std::max(1, p_.ranks)];
        weigh(sequence, place, -1);
        const int last = members_[place].back();
        members_[place][position_[sequence]] = last;
        position_[last] = position_[sequence];
        members_[place].pop_back();
    }

    const PackProblem &p_;
    std::size_t width_;
    RowPrice price_{};
    std::vector<std::int32_t> &place_of_;
    std::vector<std::int32_t> none_, scratch_, load_;  // load_ [batches, bins, L]
    std::vector<std::int64_t> balance_, tokens_, work_;
    std::vector<std::vector<int>> members_;
    std::vector<int> position_, by_tokens_, rank_; // rank_: where a sequence stands in by_tokens_
    int distances_;                                // orders of distance in it
    std::vector<std::vector<int>> places_; // of each batch
    std::vector<std::int64_t> of_group_;
    std::vector<int> of_rank_; // sequences of each
    std::int64_t cost_ = 0;

    // The proposal on the table.
    int first_ = 0, second_ = -1, from_ = 0, to_ = 0;
    std::int64_t change_ = 0, change_a_ = 0, change_b_ = 0, new_balance_a_ = 0, new_balance_b_ = 0;
};

} // namespace

std::int64_t pack(const PackProblem &problem, std::int64_t iterations, int heat_shift,
                  std::uint64_t seed, std::vector<std::int32_t> &place_of) {
    Rng rng(seed);
    Packing packing(problem, place_of);
    if (problem.places / (problem.most > 0 ? 1 : std::max(1, problem.ranks)) < 2 || problem.sequences == 0)
        return packing.cost();
    std::vector<std::int32_t> best = place_of;
    const std::int64_t best_cost =
        anneal(packing, rng, 256, std::int64_t{1} << heat_shift, iterations, [&] { best = place_of; });
    place_of = best;
    return best_cost;
}

bool staircase(const std::vector<std::int32_t> &descending, const std::int64_t *work, const std::int64_t *tokens,
               int ranks, std::int64_t budget, int count, std::vector<std::int32_t> &place_of) {
    std::vector<std::int32_t> left = descending, kept;
    std::int64_t sum = 0;
    for (const int sequence : left)
        sum += work[sequence];
    std::vector<std::int64_t> held(ranks), room(ranks);
    for (int batch = 0; batch < count && !left.empty(); ++batch) {
        const std::int64_t mean = sum / (static_cast<std::int64_t>(ranks) * (count - batch));
        // 1 / 333 above the mean: some sequences never fit exactly. The last one takes whatever is left.
        const bool last = batch == count - 1;
        const std::int64_t cap = last ? INT64_MAX : std::max(work[left[0]], mean + mean / 333);
        std::fill(held.begin(), held.end(), 0);
        std::fill(room.begin(), room.end(), budget);
        kept.clear();
        for (const int sequence : left) {
            int best = -1;
            for (int rank = 0; rank < ranks; ++rank)
                if (room[rank] >= tokens[sequence] && (best < 0 || held[rank] < held[best]))
                    best = rank;
            if (best < 0 || held[best] > cap - work[sequence]) {
                kept.push_back(sequence);
                continue;
            }
            held[best] += work[sequence];
            room[best] -= tokens[sequence];
            sum -= work[sequence];
            place_of[sequence] = batch * ranks + best;
        }
        left.swap(kept);
    }
    return left.empty();
}

namespace {

// The sequences of one place in order, and what their tokens' travel costs when nodes cut the run evenly.
class Run {
  public:
    Run(const ArrangeProblem &problem, int place, std::vector<int> members)
        : p_(problem), first_node_(p_.first_node[place]), nodes_(p_.num_nodes[place]), members_(std::move(members)) {
        for (const int sequence : members_)
            total_ += p_.tokens[sequence];
    }

    const std::vector<int> &members() const { return members_; }

    // Cost of the members from `begin` to `end`, the first of which starts at token `at`.
    std::int64_t cost(std::size_t begin, std::size_t end, std::int64_t at) const {
        std::int64_t cost = 0;
        for (std::size_t i = begin; i < end; ++i) {
            const int sequence = members_[i];
            const std::int64_t tokens = p_.tokens[sequence], stop = at + tokens;
            if (tokens == 0)
                continue;
            for (std::int64_t node = at * nodes_ / total_; node < nodes_; ++node) {
                const std::int64_t upto = std::min(stop, (total_ * (node + 1) + nodes_ - 1) / nodes_);
                cost += travel(sequence, node) * (upto - at) / tokens;
                at = upto;
                if (at == stop)
                    break;
            }
        }
        return cost;
    }

    // Members with much to gain choose first, each the node it likes best that still has room.
    void by_preference() {
        const auto regret = [&](int sequence) {
            std::int64_t best = travel(sequence, 0), sum = 0;
            for (int node = 0; node < nodes_; ++node) {
                best = std::min(best, travel(sequence, node));
                sum += travel(sequence, node);
            }
            return sum - nodes_ * best;
        };
        std::vector<int> by_regret = members_;
        std::stable_sort(by_regret.begin(), by_regret.end(), [&](int a, int b) { return regret(a) > regret(b); });
        std::vector<std::vector<int>> chosen(nodes_);
        std::vector<std::int64_t> room(nodes_, total_ / nodes_);
        for (const int sequence : by_regret) {
            int best = -1;
            for (int node = 0; node < nodes_; ++node)
                if (best < 0 || std::pair(room[node] <= 0, travel(sequence, node)) <
                                    std::pair(room[best] <= 0, travel(sequence, best)))
                    best = node;
            chosen[best].push_back(sequence);
            room[best] -= p_.tokens[sequence];
        }
        members_.clear();
        for (const std::vector<int> &of_node : chosen)
            members_.insert(members_.end(), of_node.begin(), of_node.end());
    }

    // Swaps two members where that helps; only the stretch between them moves.
    void improve(Rng &rng) {
        const auto count = static_cast<std::int64_t>(members_.size());
        for (std::int64_t proposal = 0; count > 1 && proposal < std::min<std::int64_t>(32 * count, 4096); ++proposal) {
            auto a = static_cast<std::size_t>(rng.below(count)), b = static_cast<std::size_t>(rng.below(count));
            if (a == b)
                continue;
            if (a > b)
                std::swap(a, b);
            std::int64_t at = 0;
            for (std::size_t i = 0; i < a; ++i)
                at += p_.tokens[members_[i]];
            const std::int64_t before = cost(a, b + 1, at);
            std::swap(members_[a], members_[b]);
            if (cost(a, b + 1, at) > before)
                std::swap(members_[a], members_[b]);
        }
    }

  private:
    std::int64_t travel(int sequence, std::int64_t node) const {
        return p_.travel[static_cast<std::int64_t>(sequence) * p_.nodes + first_node_ + node];
    }

    const ArrangeProblem &p_;
    std::int64_t first_node_, nodes_, total_ = 0;
    std::vector<int> members_;
};

} // namespace

void arrange(const ArrangeProblem &problem, std::uint64_t seed, std::vector<std::int32_t> &order) {
    std::vector<std::vector<int>> members(problem.places);
    for (int sequence = 0; sequence < problem.sequences; ++sequence)
        members[problem.place_of[sequence]].push_back(sequence);
    for (int place = 0; place < problem.places; ++place) {
        if (problem.num_nodes[place] < 2 || members[place].size() < 2)
            continue;
        std::stable_sort(members[place].begin(), members[place].end(), [&](int a, int b) { return order[a] < order[b]; });
        Rng rng = stream(seed, place);
        Run given(problem, place, members[place]), sorted(problem, place, members[place]);
        sorted.by_preference();
        given.improve(rng);
        sorted.improve(rng);
        const std::size_t count = members[place].size();
        const Run &best = sorted.cost(0, count, 0) < given.cost(0, count, 0) ? sorted : given;
        for (std::size_t i = 0; i < count; ++i)
            order[best.members()[i]] = static_cast<std::int32_t>(i);
    }
}

} // namespace moe_rl
