#include "pack.h"

#include <algorithm>

#include "rng.h"

namespace moe_rl {

namespace {

// How packing works. A micro-batch's load is the sum of its sequences', and sequences have tastes: one that sends 30
// rows to node 0 and 10 to node 1 is best met by one with 10 and 30. Two micro-batches of two such sequences cost 60 +
// 60 when like goes with like and 40 + 40 when they are mixed, for the same rows, and no expert has moved. Nothing is
// copied and nothing is sent, so of all levers this one is free, where the framework lets the layout be chosen.
//
// A proposal moves one sequence to another place, or swaps two; annealing as in reorder.cpp. Attention is part of the
// cost, else the search would put long sequences together, whose attention grows with the square of their length.

// Sum over layers of the highest bin of a batch that gains `in` and loses `out`; `highest` is scratch of L entries.
MOE_RL_VECTOR_CLONES std::int64_t balance_cost(const std::int32_t *load, const std::int32_t *in,
                                               const std::int32_t *out, int bins, int layers,
                                               std::int32_t *highest) {
    for (int layer = 0; layer < layers; ++layer)
        highest[layer] = load[layer] + in[layer] - out[layer];
    for (int bin = 1; bin < bins; ++bin) {
        load += layers;
        in += layers;
        out += layers;
        for (int layer = 0; layer < layers; ++layer)
            highest[layer] = std::max(highest[layer], load[layer] + in[layer] - out[layer]);
    }
    std::int64_t sum = 0;
    for (int layer = 0; layer < layers; ++layer)
        sum += highest[layer];
    return sum;
}

class Packing {
  public:
    Packing(const PackProblem &problem, std::vector<std::int32_t> &place_of)
        : p_(problem), width_(static_cast<std::size_t>(p_.bins) * p_.layers), place_of_(place_of), none_(width_, 0),
          scratch_(p_.layers), load_(width_ * p_.batches, 0), balance_(p_.batches, 0), tokens_(p_.places, 0),
          attention_(p_.places, 0), members_(p_.places), position_(p_.sequences), places_(p_.batches) {
        for (int place = 0; place < p_.places; ++place)
            places_[p_.batch_of[place]].push_back(place);
        for (int sequence = 0; sequence < p_.sequences; ++sequence) {
            enter(sequence, place_of_[sequence]);
            std::int32_t *load = load_.data() + width_ * p_.batch_of[place_of_[sequence]];
            for (std::size_t i = 0; i < width_; ++i)
                load[i] += of(sequence)[i];
        }
        for (int batch = 0; batch < p_.batches; ++batch) {
            balance_[batch] = balance_after(batch, none_.data(), none_.data());
            cost_ += balance_[batch] + busiest_place(batch, -1, 0, -1, 0);
        }
    }

    std::int64_t cost() const { return cost_; }

    // Draws a move of one sequence, or a swap of two, and prices it. False when the move is not allowed: a place would
    // pass the token budget, be left empty (a rank would have nothing to run while others wait for it) or hold two of
    // a group that is to be kept apart.
    bool propose(Rng &rng) {
        first_ = static_cast<int>(rng.below(p_.sequences));
        from_ = place_of_[first_];
        to_ = static_cast<int>(rng.below(p_.places - 1));
        to_ += to_ >= from_ ? 1 : 0;
        const auto partners = static_cast<std::int64_t>(members_[to_].size());
        const std::int64_t pick = rng.below(partners + 1);
        second_ = pick < partners ? members_[to_][pick] : -1;
        if (second_ < 0 && members_[from_].size() == 1)
            return false;
        const std::int64_t grows = p_.tokens[first_] - (second_ >= 0 ? p_.tokens[second_] : 0);
        if (tokens_[to_] + grows > p_.budget || tokens_[from_] - grows > p_.budget)
            return false;
        if (meets_own_group(first_, to_, second_) || meets_own_group(second_, from_, first_))
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
        return sequence < 0 ? none_.data() : p_.load + width_ * static_cast<std::size_t>(sequence);
    }

    std::int64_t balance_after(int batch, const std::int32_t *in, const std::int32_t *out) {
        return balance_cost(load_.data() + width_ * batch, in, out, p_.bins, p_.layers, scratch_.data());
    }

    bool meets_own_group(int sequence, int place, int leaver) const {
        if (!p_.group_of || sequence < 0)
            return false;
        return std::any_of(members_[place].begin(), members_[place].end(), [&](int other) {
            return other != leaver && p_.group_of[other] == p_.group_of[sequence];
        });
    }

    // Attention of the costliest place of a batch after two places changed.
    std::int64_t busiest_place(int batch, int one, std::int64_t one_gains, int two, std::int64_t two_gains) const {
        std::int64_t most = 0;
        for (const int place : places_[batch])
            most = std::max(most, attention_[place] + (place == one ? one_gains : place == two ? two_gains : 0));
        return most;
    }

    // Only the two batches concerned change, so a proposal costs O(bins * layers) whatever the number of sequences.
    void price() {
        const int a = p_.batch_of[from_], b = p_.batch_of[to_];
        const std::int64_t moved = p_.attention[first_] - (second_ >= 0 ? p_.attention[second_] : 0);
        change_ = busiest_place(a, from_, -moved, to_, moved) - busiest_place(a, -1, 0, -1, 0);
        if (a == b)
            return;
        change_ += busiest_place(b, from_, -moved, to_, moved) - busiest_place(b, -1, 0, -1, 0);
        new_balance_a_ = balance_after(a, of(second_), of(first_));
        new_balance_b_ = balance_after(b, of(first_), of(second_));
        change_ += new_balance_a_ + new_balance_b_ - balance_[a] - balance_[b];
    }

    void enter(int sequence, int place) {
        place_of_[sequence] = place;
        tokens_[place] += p_.tokens[sequence];
        attention_[place] += p_.attention[sequence];
        position_[sequence] = static_cast<int>(members_[place].size());
        members_[place].push_back(sequence);
    }

    void leave(int sequence) {
        const int place = place_of_[sequence];
        tokens_[place] -= p_.tokens[sequence];
        attention_[place] -= p_.attention[sequence];
        const int last = members_[place].back();
        members_[place][position_[sequence]] = last;
        position_[last] = position_[sequence];
        members_[place].pop_back();
    }

    const PackProblem &p_;
    std::size_t width_;
    std::vector<std::int32_t> &place_of_;
    std::vector<std::int32_t> none_, scratch_, load_;  // load_ [batches, bins, L]
    std::vector<std::int64_t> balance_, tokens_, attention_;
    std::vector<std::vector<int>> members_;
    std::vector<int> position_;
    std::vector<std::vector<int>> places_; // of each batch
    std::int64_t cost_ = 0;

    // The proposal on the table.
    int first_ = 0, second_ = -1, from_ = 0, to_ = 0;
    std::int64_t change_ = 0, new_balance_a_ = 0, new_balance_b_ = 0;
};

} // namespace

std::int64_t pack(const PackProblem &problem, std::int64_t iterations, int heat_shift,
                  std::uint64_t seed, Deadline &deadline, std::vector<std::int32_t> &place_of) {
    Rng rng(seed);
    Packing packing(problem, place_of);
    if (problem.places < 2 || problem.sequences == 0)
        return packing.cost();
    std::int64_t sum = 0, count = 0;
    for (int sample = 0; sample < 256; ++sample) {
        if (!packing.propose(rng))
            continue;
        sum += packing.change() < 0 ? -packing.change() : packing.change();
        ++count;
    }
    std::int64_t temperature = count ? (sum / count) >> heat_shift : 0;
    std::vector<std::int32_t> best = place_of;
    std::int64_t best_cost = packing.cost();
    for (int stage = 0; stage < STAGES && !deadline.reached(); ++stage) {
        for (std::int64_t iteration = 0; iteration < iterations / STAGES; ++iteration) {
            if (iteration % CHECKED_EVERY == CHECKED_EVERY - 1 && deadline.reached())
                break;
            const std::int64_t allowed = threshold(temperature, rng);
            if (!packing.propose(rng) || packing.change() > allowed)
                continue;
            packing.accept();
            if (packing.cost() < best_cost) {
                best_cost = packing.cost();
                best = place_of;
            }
        }
        temperature = cooled(temperature);
    }
    place_of = best;
    return best_cost;
}

} // namespace moe_rl
