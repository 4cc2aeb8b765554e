// When each atom of a weight sync goes where: the C++ form of moe_rl/sync/schedule.py, with the same deliveries.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/tuple.h>

#include "bindings.h"

namespace {

using namespace moe_rl;

// Atoms that a rank hands on inside its node in one step; moe_rl/sync/schedule.py says why.
constexpr std::int64_t INNER_PER_STEP = 4;

// Steps in which something is busy; steps beyond the last word are free.
class Busy {
  public:
    bool at(std::int64_t step) const {
        const auto word = static_cast<std::size_t>(step >> 6);
        return word < words_.size() && (words_[word] >> (step & 63) & 1);
    }

    void take(std::int64_t step) {
        const auto word = static_cast<std::size_t>(step >> 6);
        if (word >= words_.size())
            words_.resize(std::max(word + 1, 2 * words_.size()));
        words_[word] |= std::uint64_t{1} << (step & 63);
    }

    // The first step from `start` on that is free here and there.
    std::int64_t first_free(const Busy &there, std::int64_t start) const {
        auto word = static_cast<std::size_t>(start >> 6);
        std::uint64_t taken = at_word(word) | there.at_word(word) | ((std::uint64_t{1} << (start & 63)) - 1);
        while (taken == ~std::uint64_t{0}) {
            ++word;
            taken = at_word(word) | there.at_word(word);
        }
        return static_cast<std::int64_t>(word) * 64 + std::countr_one(taken);
    }

  private:
    std::uint64_t at_word(std::size_t word) const { return word < words_.size() ? words_[word] : 0; }

    std::vector<std::uint64_t> words_;
};

struct Source {
    int rank;
    std::int64_t ready; // first step in which it can send the atom
};

struct Delivery {
    int atom, source, ingress;
    std::int64_t step;
};

class Calendars {
  public:
    Calendars(Array<const std::int32_t, 1> node_of, int trainers, Array<const std::int32_t, 2> holders,
              Array<const std::int32_t, 1> sender, Array<const std::int32_t, 1> spare, int steps_per_round, bool relays)
        : node_of_(node_of.data(), node_of.data() + node_of.shape(0)), holders_(holders), sender_(sender),
          trainers_(trainers), steps_per_round_(steps_per_round), relays_(relays), spare_(spare.data(), spare.data() + trainers),
          out_(node_of_.size()), into_(node_of_.size()), inner_out_(node_of_.size()), inner_into_(node_of_.size()),
          load_(node_of_.size()), sent_(node_of_.size()) {
        const int nodes = 1 + *std::max_element(node_of_.begin(), node_of_.end());
        ports_.resize(nodes), full_.resize(nodes), taken_.resize(nodes), waiting_.resize(nodes);
        for (int rank = trainers; rank < static_cast<int>(node_of_.size()); ++rank)
            ports_[node_of_[rank]].push_back(rank);
    }

    // Ranks that need each atom, ascending by (atom, node, rank): wanting_[begin_[a] .. begin_[a + 1]).
    void need(std::int64_t atoms, int trainers, Array<const std::int64_t, 1> start, Array<const std::int32_t, 1> wanted) {
        begin_.assign(atoms + 1, 0);
        for (std::size_t i = 0; i < wanted.shape(0); ++i)
            ++begin_[wanted(i) + 1];
        std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
        wanting_.resize(wanted.shape(0));
        std::vector<std::int64_t> next(begin_.begin(), begin_.end() - 1);
        std::vector<int> ranks(node_of_.size() - trainers);
        std::iota(ranks.begin(), ranks.end(), trainers);
        std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) { return node_of_[a] < node_of_[b]; });
        for (const int rank : ranks)
            for (std::int64_t i = start(rank - trainers); i < start(rank - trainers + 1); ++i)
                wanting_[next[wanted(i)]++] = rank;
        for (std::int64_t atom = 0; atom < atoms; ++atom)
            for (std::int64_t i = begin_[atom]; i < begin_[atom + 1]; ++i)
                if (i == begin_[atom] || node_of_[wanting_[i]] != node_of_[wanting_[i - 1]])
                    ++waiting_[node_of_[wanting_[i]]];
    }

    void plan(int atom, std::int64_t place) {
        list_nodes(atom, place);
        serve_inside(atom);
        const int sender = sender_(atom);
        bool first_hop = sources_.empty();
        while (!away_.empty()) {
            const bool may_send = first_hop || spare_[sender] > 0 || !relays_;
            if (may_send)
                sources_.push_back({sender, 0});
            const auto [source, which, step] = earliest();
            if (may_send)
                sources_.pop_back();
            if (source == sender && !first_hop)
                --spare_[sender];
            first_hop = false;
            const auto needing = away_[which];
            const int node = node_of_[wanting_[needing.first]], ingress = port(node, step, needing);
            book(atom, source, ingress, node, step);
            away_.erase(away_.begin() + static_cast<std::ptrdiff_t>(which));
            if (relays_)
                sources_.push_back({ingress, after(step)});
        }
    }

    std::vector<Delivery> deliveries;

  private:
    using Needing = std::pair<std::int64_t, std::int64_t>; // a run of wanting_: the ranks of one node

    void list_nodes(int atom, std::int64_t place) {
        away_.clear();
        for (std::int64_t i = begin_[atom]; i < begin_[atom + 1];) {
            std::int64_t stop = i + 1;
            while (stop < begin_[atom + 1] && node_of_[wanting_[stop]] == node_of_[wanting_[i]])
                ++stop;
            away_.emplace_back(i, stop);
            i = stop;
        }
        // Another node is the first for every atom of a trainer, so that no node's ports pass on more than others.
        if (!away_.empty())
            std::rotate(away_.begin(),
                        away_.begin() + (place + place / trainers_) % static_cast<std::int64_t>(away_.size()),
                        away_.end());
    }

    void serve_inside(int atom) {
        sources_.clear();
        const auto twins = static_cast<int>(holders_.shape(1));
        std::erase_if(away_, [&](const Needing &needing) {
            const int node = node_of_[wanting_[needing.first]];
            std::tuple<std::int64_t, std::int64_t, int, int> best{-1, 0, 0, 0}; // slot, atoms sent, ingress, source
            for (int twin = 0; twin < twins; ++twin) {
                const int holder = holders_(atom, twin);
                if (node_of_[holder] != node)
                    continue;
                for (std::int64_t i = needing.first; i < needing.second; ++i) {
                    const std::int64_t slot = inner_out_[holder].first_free(inner_into_[wanting_[i]], 0);
                    const std::tuple hop{slot, sent_[wanting_[i]], wanting_[i], holder};
                    if (std::get<0>(best) < 0 || hop < best)
                        best = hop;
                }
            }
            const auto [slot, _, ingress, source] = best;
            if (slot < 0)
                return false;
            inner_out_[source].take(slot), inner_into_[ingress].take(slot);
            --waiting_[node];
            const std::int64_t step = slot / INNER_PER_STEP;
            deliveries.push_back({atom, source, ingress, step});
            if (relays_)
                sources_.push_back({ingress, after(step)});
            return true;
        });
    }

    std::int64_t after(std::int64_t step) const { return (step / steps_per_round_ + 1) * steps_per_round_; }

    // (source, index in away_, step): the earliest step; then the port that sent least, then the node that lacks most.
    std::tuple<int, std::size_t, std::int64_t> earliest() const {
        std::tuple<std::int64_t, std::int64_t, std::int64_t> best_key{};
        std::tuple<int, std::size_t, std::int64_t> best{-1, 0, 0};
        for (const Source &source : sources_)
            for (std::size_t which = 0; which < away_.size(); ++which) {
                const int node = node_of_[wanting_[away_[which].first]];
                const std::int64_t step = out_[source.rank].first_free(full_[node], source.ready);
                const std::tuple key{step, sent_[source.rank], -waiting_[node]};
                if (std::get<0>(best) < 0 || key < best_key)
                    best_key = key, best = {source.rank, which, step};
            }
        return best;
    }

    // A free port of the node: one that needs the atom before one that does not, then the least loaded.
    int port(int node, std::int64_t step, const Needing &needing) const {
        const auto first = wanting_.begin() + needing.first, last = wanting_.begin() + needing.second;
        std::pair<bool, std::int64_t> best_key{};
        int best = -1;
        for (const int rank : ports_[node]) {
            if (into_[rank].at(step))
                continue;
            const std::pair key{!std::binary_search(first, last, rank), load_[rank]};
            if (best < 0 || key < best_key)
                best_key = key, best = rank;
        }
        return best;
    }

    void book(int atom, int source, int ingress, int node, std::int64_t step) {
        out_[source].take(step), into_[ingress].take(step);
        ++load_[ingress], ++sent_[source], --waiting_[node];
        auto &taken = taken_[node];
        if (static_cast<std::size_t>(step) >= taken.size())
            taken.resize(std::max(static_cast<std::size_t>(step) + 1, 2 * taken.size()));
        if (++taken[step] == static_cast<std::int64_t>(ports_[node].size()))
            full_[node].take(step);
        deliveries.push_back({atom, source, ingress, step});
    }

    std::vector<int> node_of_;
    Array<const std::int32_t, 2> holders_;
    Array<const std::int32_t, 1> sender_;
    int trainers_, steps_per_round_;
    bool relays_;
    std::vector<std::int32_t> spare_;
    std::vector<Busy> out_, into_, inner_out_, inner_into_; // per rank
    std::vector<std::int64_t> load_, sent_;
    std::vector<std::vector<int>> ports_; // per node
    std::vector<Busy> full_;
    std::vector<std::vector<std::int64_t>> taken_; // ports that are busy in each step
    std::vector<std::int64_t> waiting_;
    std::vector<std::int64_t> begin_;
    std::vector<int> wanting_;
    std::vector<Needing> away_;
    std::vector<Source> sources_;
};

using Column = nb::ndarray<std::int32_t, nb::numpy, nb::ndim<1>>;

Column column(const std::vector<Delivery> &deliveries, const std::vector<std::size_t> &order,
              std::int32_t (*read)(const Delivery &)) {
    auto *values = new std::int32_t[deliveries.size()];
    const nb::capsule owner(values, [](void *data) noexcept { delete[] static_cast<std::int32_t *>(data); });
    for (std::size_t i = 0; i < order.size(); ++i)
        values[i] = read(deliveries[order[i]]);
    return Column(values, {deliveries.size()}, owner);
}

std::tuple<Column, Column, Column, Column>
fill_calendars(Array<const std::int32_t, 1> node_of, int num_trainers, Array<const std::int32_t, 2> holders,
               Array<const std::int32_t, 1> sender, Array<const std::int32_t, 1> spare_sends,
               Array<const std::int32_t, 1> order, Array<const std::int64_t, 1> wanted_start,
               Array<const std::int32_t, 1> wanted_atom, int steps_per_round, bool relays) {
    const auto ranks = static_cast<std::int64_t>(node_of.shape(0)), atoms = static_cast<std::int64_t>(sender.shape(0));
    check(0 < num_trainers && num_trainers < ranks, "there must be trainers and engine ranks");
    check(steps_per_round >= 1, "a round needs a step");
    check(static_cast<std::int64_t>(spare_sends.shape(0)) == num_trainers, "one entry of spare_sends per trainer");
    check(holders.shape(0) == sender.shape(0) && order.shape(0) == sender.shape(0), "one entry per atom");
    check(static_cast<std::int64_t>(wanted_start.shape(0)) == ranks - num_trainers + 1, "one run per engine rank");
    check(wanted_start(0) == 0 && wanted_start(ranks - num_trainers) == static_cast<std::int64_t>(wanted_atom.shape(0)),
          "runs must cover wanted_atom");
    for (std::int64_t rank = 0; rank < ranks; ++rank)
        check(node_of(rank) >= 0, "nodes must not be negative");
    for (std::int64_t run = 0; run < ranks - num_trainers; ++run)
        check(wanted_start(run) <= wanted_start(run + 1), "runs must ascend");
    for (std::size_t i = 0; i < wanted_atom.shape(0); ++i)
        check(0 <= wanted_atom(i) && wanted_atom(i) < atoms, "wanted atoms must be atoms");
    for (std::int64_t atom = 0; atom < atoms; ++atom) {
        check(0 <= order(atom) && order(atom) < atoms, "the order must name atoms");
        check(0 <= sender(atom) && sender(atom) < num_trainers, "senders must be trainers");
        for (std::size_t twin = 0; twin < holders.shape(1); ++twin)
            check(0 <= holders(atom, twin) && holders(atom, twin) < num_trainers, "holders must be trainers");
    }
    Calendars calendars(node_of, num_trainers, holders, sender, spare_sends, steps_per_round, relays);
    std::vector<std::size_t> sorted;
    {
        const nb::gil_scoped_release no_gil;
        calendars.need(atoms, num_trainers, wanted_start, wanted_atom);
        for (std::int64_t place = 0; place < atoms; ++place)
            calendars.plan(order(place), place);
        sorted.resize(calendars.deliveries.size());
        std::iota(sorted.begin(), sorted.end(), std::size_t{0});
        const auto &made = calendars.deliveries;
        std::stable_sort(sorted.begin(), sorted.end(), [&](auto a, auto b) { return made[a].step < made[b].step; });
    }
    const auto &made = calendars.deliveries;
    return {
        column(made, sorted, [](const Delivery &each) { return static_cast<std::int32_t>(each.atom); }),
        column(made, sorted, [](const Delivery &each) { return static_cast<std::int32_t>(each.source); }),
        column(made, sorted, [](const Delivery &each) { return static_cast<std::int32_t>(each.ingress); }),
        column(made, sorted, [](const Delivery &each) { return static_cast<std::int32_t>(each.step); })};
}

} // namespace

void bind_sync_schedule(nb::module_ &module) {
    module.def("fill_calendars", &fill_calendars, nb::arg("node_of"), nb::arg("num_trainers"), nb::arg("holders"),
               nb::arg("sender"), nb::arg("spare_sends"), nb::arg("order"), nb::arg("wanted_start"),
               nb::arg("wanted_atom"), nb::arg("steps_per_round"), nb::arg("relays"),
               "Return atom, source, ingress and step [D] of the deliveries of a weight sync, in the order of steps.");
}
