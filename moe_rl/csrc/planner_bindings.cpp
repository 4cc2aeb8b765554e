// The planner's functions as Python sees them: numpy buffers in, numpy buffers out, the GIL released in between.

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <span>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "bindings.h"
#include "pack.h"
#include "parallel.h"
#include "step.h"
#include "travel_passes.h"

namespace {

using namespace moe_rl;

template <class Value, int Dimensions> using In = Array<const Value, Dimensions>;
template <class Value, int Dimensions> using Out = nb::ndarray<nb::numpy, Value, nb::ndim<Dimensions>>;

template <class Value, class... Sizes> Out<Value, sizeof...(Sizes)> array_out(std::vector<Value> values, Sizes... shape) {
    auto *held = new std::vector<Value>(std::move(values));
    nb::capsule owner(held, [](void *pointer) noexcept { delete static_cast<std::vector<Value> *>(pointer); });
    return {held->data(), {static_cast<std::size_t>(shape)...}, owner};
}

template <class Value> Out<Value, 1> vector_out(std::vector<Value> values) {
    const std::size_t size = values.size();
    return array_out(std::move(values), size);
}

void check_power(int power) { check(power >= 1 && power <= 4, "rows count to a power of 1 to 4"); }

// What `work` returns, which lets Python's other threads run meanwhile.
template <class Work> auto unlocked(Work work) {
    const nb::gil_scoped_release no_gil;
    return work();
}

void check_ranks(const std::int32_t *ranks, std::size_t count, std::size_t num_ranks) {
    const auto inside = [=](std::int32_t rank) { return rank >= 0 && static_cast<std::size_t>(rank) < num_ranks; };
    check(std::all_of(ranks, ranks + count, inside), "a rank lies outside the EP group");
}

MOE_RL_VECTOR_CLONES std::uint16_t highest_id(const std::uint16_t *ids, std::size_t count) {
    std::uint16_t highest = 0; // all are looked at: a search that stops at the first bad one takes them one by one
    for (std::size_t i = 0; i < count; ++i)
        highest = std::max(highest, ids[i]);
    return highest;
}

void check_experts(const In<std::uint16_t, 3> &routes, std::size_t experts) {
    check(routes.size() == 0 || highest_id(routes.data(), routes.size()) < experts,
          "a route names an expert that there is not");
}

// Drawn tokens as Python holds them: routes [L, n, K], token [n], source [n], cell_start [cells + 1].
using Routes = std::optional<std::tuple<In<std::uint16_t, 3>, In<std::int64_t, 1>, In<std::int32_t, 1>,
                                        In<std::int64_t, 1>>>;

// A core.load.StepLoad, checked once for all searches that read it.
class Load {
  public:
    Load(In<std::int32_t, 5> pairs, In<std::int64_t, 3> tokens, Routes routes, int ranks_per_domain)
        : pairs_(std::move(pairs)), tokens_(std::move(tokens)), routes_(std::move(routes)),
          step_{static_cast<int>(pairs_.shape(0)), static_cast<int>(pairs_.shape(1)), static_cast<int>(layers()),
                static_cast<int>(ranks()), static_cast<int>(experts()), ranks_per_domain, pairs_.data(), tokens_.data(),
                nullptr, {}} {
        check(tokens_.shape(0) == pairs_.shape(0) && tokens_.shape(1) == pairs_.shape(1) && tokens_.shape(2) == ranks(),
              "tokens must be [G, M, P] of pairs [G, M, L, P, E]");
        check(ranks_per_domain > 0 && ranks() > 0 && ranks() % ranks_per_domain == 0, "ranks_per_domain must divide P");
        check(experts() % ranks() == 0, "P must divide E");
        if (!routes_)
            return;
        const auto &[ids, token, source, cell_start] = *routes_;
        const std::size_t entries = token.shape(0);
        check(ids.shape(0) == layers(), "routes must be [L, n, K]");
        check(source.shape(0) == entries, "every drawn token needs a source");
        check_runs(cell_start, cells(), entries, "cells must hold all drawn tokens, one after the other");
        check_ranks(source.data(), entries, ranks());
        check_experts(ids, experts());
        const auto drawn = static_cast<std::int64_t>(ids.shape(1));
        check(std::all_of(token.data(), token.data() + entries, [=](std::int64_t at) { return at >= 0 && at < drawn; }),
              "a token was not drawn");
        step_.routes = {ids.data(), token.data(), cell_start.data(), source.data(), drawn, static_cast<int>(ids.shape(2))};
    }

    std::size_t cells() const { return pairs_.shape(0) * pairs_.shape(1); }
    std::size_t layers() const { return pairs_.shape(2); }
    std::size_t ranks() const { return pairs_.shape(3); }
    std::size_t experts() const { return pairs_.shape(4); }

    Step with(const In<std::int32_t, 2> &home) const {
        check(home.shape(0) == layers() && home.shape(1) == experts(), "home must be [L, E] of pairs [G, M, L, P, E]");
        check_ranks(home.data(), home.size(), ranks());
        Step step = step_;
        step.home = home.data();
        return step;
    }

    // start [count + 1] must cut `entries` into runs.
    static void check_runs(const In<std::int64_t, 1> &start, std::size_t count, std::size_t entries, const char *message) {
        check(start.shape(0) == count + 1 && start(0) == 0 && start(count) == static_cast<std::int64_t>(entries) &&
                  std::is_sorted(start.data(), start.data() + count + 1),
              message);
    }

  private:
    In<std::int32_t, 5> pairs_;
    In<std::int64_t, 3> tokens_;
    Routes routes_;
    Step step_;
};

LayerCostParams cost_of(nb::handle given) {
    LayerCostParams cost;
#define MOE_RL_READ(name) cost.name = nb::cast<double>(given.attr(#name));
    MOE_RL_COST_FIELDS(MOE_RL_READ)
#undef MOE_RL_READ
    return cost;
}

auto count_visits_arrays(const Load &load, In<std::int32_t, 2> home, In<std::int64_t, 1> offsets,
                         In<std::int32_t, 1> expert, In<std::int32_t, 1> rank, In<std::int32_t, 2> quota,
                         int num_threads) {
    const std::size_t places = load.cells() * load.layers(), ranks = load.ranks(), instances = expert.shape(0);
    const Step step = load.with(home);
    check(num_threads >= 0, "threads must not be negative");
    check(rank.shape(0) == instances && quota.shape(0) == instances && quota.shape(1) == ranks,
          "every instance needs a rank and a quota");
    Load::check_runs(offsets, places, instances, "cells must hold all instances, one after the other");
    check_ranks(rank.data(), instances, ranks);
    check_ranks(expert.data(), instances, load.experts());
    StepVisits visits = unlocked([&] {
        return count_visits(step, {offsets.data(), expert.data(), rank.data(), quota.data()}, num_threads);
    });
    const std::size_t nodes = ranks / step.ranks_per_domain;
    return std::make_tuple(array_out(std::move(visits.ranks), places, ranks),
                           array_out(std::move(visits.between), places, nodes * nodes),
                           array_out(std::move(visits.nics), step.routes.routes ? 0 : places, 2 * ranks));
}

using Named = nb::typed<nb::dict, nb::str, nb::object>;

Named replicate_arrays(const Load &load, In<std::int32_t, 2> home, In<std::int32_t, 3> residents, nb::object cost,
                       int replica_slots, int cross_node_slots, int spare_slots, int search_nodes,
                       std::int64_t tolerance_ppm, std::int64_t cross_gain_ppm, int num_threads, bool thorough, int every) {
    Step step = load.with(home);
    check(replica_slots >= 0 && cross_node_slots >= 0 && num_threads >= 0 && tolerance_ppm >= 0 && cross_gain_ppm >= 0,
          "slots, threads and tolerances must not be negative");
    check(every >= 1, "every must be at least 1");
    check(spare_slots >= replica_slots + cross_node_slots, "spare_slots must hold replica and cross-node slots");
    check(residents.shape(0) == load.layers() && residents.shape(1) == load.ranks(), "residents must be [L, P, S]");
    check(std::all_of(residents.data(), residents.data() + residents.size(),
                      [&](std::int32_t expert) { return expert >= -1 && expert < step.experts; }),
          "a resident is no expert");
    step.residents = residents.data();
    step.resident_slots = static_cast<int>(residents.shape(2));
    const ReplicateOptions options{.slots = replica_slots, .cross_slots = cross_node_slots, .spare_slots = spare_slots,
                                   .price = !cost.is_none(), .search_nodes = search_nodes,
                                   .tolerance_ppm = tolerance_ppm, .cross_gain_ppm = cross_gain_ppm,
                                   .cost = cost.is_none() ? LayerCostParams{} : cost_of(cost), .every = every,
                                   .thorough = thorough};
    std::vector<std::int64_t> offsets{0}, highest;
    std::vector<std::int32_t> expert, physical_id, quota;
    std::vector<std::uint8_t> kind;
    std::vector<double> seconds;
    {
        const nb::gil_scoped_release no_gil;
        for (const CellResult &result : replicate_step(step, options, num_threads)) {
            for (const PlacedCopy &copy : result.copies) {
                expert.push_back(copy.expert);
                physical_id.push_back(copy.physical_id);
                kind.push_back(static_cast<std::uint8_t>(copy.kind));
            }
            quota.insert(quota.end(), result.source_quota.begin(), result.source_quota.end());
            offsets.push_back(static_cast<std::int64_t>(expert.size()));
            highest.push_back(result.highest_load);
            seconds.push_back(result.time_s);
        }
    }
    const std::size_t count = expert.size();
    Named found;
    found["offsets"] = vector_out(std::move(offsets));
    found["expert"] = vector_out(std::move(expert));
    found["physical_id"] = vector_out(std::move(physical_id));
    found["kind"] = vector_out(std::move(kind));
    found["source_quota"] = array_out(std::move(quota), count, load.ranks());
    found["highest_load"] = vector_out(std::move(highest));
    found["seconds"] = vector_out(std::move(seconds));
    return found;
}

// Drawn tokens for the search over homes: routes [L, n, K], bit [n], pools_of_row, copy_cost [pools], and whether
// a token goes to a node once.
using Bits = std::optional<std::tuple<In<std::uint16_t, 3>, In<std::int32_t, 1>, In<std::int32_t, 1>,
                                      In<std::int64_t, 1>, bool>>;

StepBits checked_bits(const Bits &given, std::size_t layers, std::size_t nodes, std::size_t experts) {
    if (!given)
        return {};
    const auto &[routes, bit, pools_of_row, copy_cost, deduplicated] = *given;
    const std::span rows(pools_of_row.data(), pools_of_row.shape(0));
    const auto pools = static_cast<std::int32_t>(copy_cost.shape(0));
    check(routes.shape(0) == layers && bit.shape(0) == routes.shape(1), "every drawn token [L, n, K] needs a bit");
    check(std::all_of(rows.begin(), rows.end(), [=](std::int32_t held) { return held >= 0 && held <= pools; }),
          "a row has words of pools that there are not");
    const std::int64_t words = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    const std::int64_t bits = std::int64_t{64} * static_cast<std::int64_t>(nodes) * words;
    check(std::all_of(bit.data(), bit.data() + bit.size(), [=](std::int32_t at) { return at >= -1 && at < bits; }),
          "a bit lies outside the words");
    check_experts(routes, experts);
    std::vector<std::int32_t> placed;
    for (std::size_t token = 0; token < bit.size(); ++token)
        if (bit(token) >= 0)
            placed.push_back(static_cast<std::int32_t>(token));
    std::sort(placed.begin(), placed.end(), [&](std::int32_t a, std::int32_t b) { return bit(a) < bit(b); });
    return {routes.data(), bit.data(), std::move(placed), static_cast<std::int64_t>(routes.shape(1)),
            {pools, static_cast<int>(nodes), static_cast<int>(routes.shape(2)), deduplicated, rows, nullptr, copy_cost.data()}};
}

auto resident_arrays(const Load &load, In<std::int32_t, 2> home, nb::object cost, const Bits &bits, int slots,
                     In<std::int32_t, 2> current, std::int64_t move_cost, double row_share, std::int64_t iterations,
                     std::uint64_t seed, int num_threads) {
    const std::size_t layers = load.layers(), ranks = load.ranks(), experts = load.experts();
    const Step step = load.with(home);
    load.with(current);
    check(slots >= 0 && num_threads >= 0, "slots and threads must not be negative");
    check(step.routes.routes != nullptr && bits.has_value(), "residents are chosen by routes");
    const StepBits tokens_as_bits = checked_bits(bits, layers, ranks / step.ranks_per_domain, experts);
    const ReplicateOptions options{.price = true, .cost = cost_of(cost)};
    Residents chosen = unlocked([&] {
        return choose_residents(step, tokens_as_bits, options,
                                {slots, iterations, seed, current.data(), move_cost, row_share}, num_threads);
    });
    return std::make_tuple(array_out(std::move(chosen.home), layers, experts),
                           array_out(std::move(chosen.slots), layers, ranks * slots));
}

auto reorder_arrays(In<std::int32_t, 3> load, std::int64_t row_cost, std::int64_t move_cost,
                    std::int64_t move_inside_cost, In<std::int32_t, 2> start, In<std::int32_t, 2> current, int nodes,
                    int ranks_per_node, bool by_rank, bool moving_is_free, bool peak, int power, std::int64_t iterations,
                    std::int64_t iterations_inside, std::uint64_t seed, int num_threads, const Bits &tokens) {
    const std::size_t cells = load.shape(0), layers = load.shape(1), experts = load.shape(2);
    const std::size_t ranks = static_cast<std::size_t>(nodes) * ranks_per_node;
    check(nodes > 0 && ranks_per_node > 0 && experts % ranks == 0, "the ranks must divide the experts");
    for (const auto *homes : {&start, &current}) {
        check(homes->shape(0) == layers && homes->shape(1) == experts, "placements must be [L, E]");
        check_ranks(homes->data(), homes->size(), ranks);
    }
    std::vector<std::size_t> held(ranks);
    for (std::size_t layer = 0; layer < layers; ++layer) {
        held.assign(ranks, 0);
        for (std::size_t expert = 0; expert < experts; ++expert)
            ++held[start(layer, expert)];
        check(std::all_of(held.begin(), held.end(), [&](std::size_t count) { return count == experts / ranks; }),
              "every rank must be the home of E / P experts");
    }
    check_power(power);
    const ReorderStep step{.cells = static_cast<int>(cells), .layers = static_cast<int>(layers),
                           .experts = static_cast<int>(experts), .nodes = nodes, .ranks_per_node = ranks_per_node,
                           .load = load.data(), .row_cost = row_cost, .move_cost = move_cost,
                           .move_inside_cost = move_inside_cost, .start = start.data(), .current = current.data(),
                           .by_rank = by_rank, .moving_is_free = moving_is_free, .peak = peak, .power = power,
                           .iterations = iterations, .iterations_inside = iterations_inside, .seed = seed,
                           .tokens = checked_bits(tokens, layers, nodes, experts)};
    return array_out(unlocked([&] { return reorder_step(step, num_threads); }), layers, experts);
}

auto bin_loads(In<std::int32_t, 3> sequence_load, In<std::int32_t, 2> bin_of, int bins, int num_threads) {
    const std::size_t sequences = sequence_load.shape(0), layers = sequence_load.shape(1);
    const std::size_t experts = sequence_load.shape(2);
    check(bin_of.shape(0) == layers && bin_of.shape(1) == experts, "bin_of must be [L, E]");
    check(bins > 0 && num_threads >= 0, "there must be a bin");
    check_ranks(bin_of.data(), bin_of.size(), static_cast<std::size_t>(bins));
    std::vector<std::int32_t> load(sequences * bins * layers, 0);
    const auto add_up = [&](std::int64_t sequence) {
        const std::int32_t *rows = sequence_load.data() + sequence * layers * experts;
        std::int32_t *to = load.data() + sequence * bins * layers;
        for (std::size_t layer = 0; layer < layers; ++layer)
            for (std::size_t expert = 0; expert < experts; ++expert)
                to[bin_of.data()[layer * experts + expert] * layers + layer] += *rows++;
    };
    unlocked([&] { parallel_for(static_cast<std::int64_t>(sequences), num_threads, add_up); });
    return array_out(std::move(load), sequences, bins * layers);
}

auto pack_arrays(In<std::int32_t, 2> bin_load, In<std::int32_t, 1> row, int bins, In<std::int64_t, 1> tokens, In<std::int64_t, 2> work,
          In<std::int32_t, 1> place, In<std::int32_t, 1> batch_of_place,
          int num_batches, int num_groups, std::int64_t budget, std::int64_t iterations, int heat_shift, std::uint64_t seed,
          std::optional<In<std::int64_t, 2>> travel, In<std::int32_t, 1> node_of_place, std::int32_t limit, int power,
          bool slowest_group, int ranks, int most) {
    const std::size_t sequences = row.shape(0), places = batch_of_place.shape(0);
    check(bins > 0 && bin_load.shape(1) % bins == 0, "bin_load must be [U, bins * L]");
    check_ranks(row.data(), sequences, bin_load.shape(0));
    check(tokens.shape(0) == sequences && work.shape(1) == sequences && place.shape(0) == sequences,
          "every sequence needs tokens, work and a place");
    check_ranks(place.data(), sequences, places);
    check_ranks(batch_of_place.data(), places, static_cast<std::size_t>(num_batches));
    check(num_groups > 0 && num_batches % num_groups == 0, "groups have as many batches each");
    check(heat_shift >= 0 && heat_shift < 63, "heat_shift must lie in 0 .. 62");
    const int nodes = travel ? static_cast<int>(travel->shape(1)) : 0;
    check(node_of_place.shape(0) == places && (!travel || travel->shape(0) == sequences),
          "travel must be [S, nodes], and every place on a node");
    check(!travel || std::all_of(node_of_place.data(), node_of_place.data() + places,
                                 [=](std::int32_t node) { return node >= -1 && node < nodes; }),
          "a node lies outside travel");
    check(ranks >= 0 && (ranks == 0 || places % static_cast<std::size_t>(ranks) == 0), "every rank has as many places");
    check(most >= 0 && (most == 0 || ranks > 0), "only ranks have a number of sequences");
    check_power(power);
    const PackProblem problem{.sequences = static_cast<int>(sequences), .layers = static_cast<int>(bin_load.shape(1)) / bins,
                              .bins = bins, .places = static_cast<int>(places), .batches = num_batches, .groups = num_groups,
                              .load = bin_load.data(), .row_of = row.data(), .tokens = tokens.data(), .work = work.data(),
                              .parts = static_cast<int>(work.shape(0)), .batch_of = batch_of_place.data(), .budget = budget,
                              .travel = travel ? travel->data() : nullptr, .node_of = node_of_place.data(), .nodes = nodes,
                              .limit = limit, .ranks = ranks, .most = most, .power = power, .slowest_group = slowest_group};
    std::vector<std::int32_t> place_of(place.data(), place.data() + sequences);
    const std::int64_t cost = unlocked([&] { return pack(problem, iterations, heat_shift, seed, place_of); });
    return std::make_tuple(vector_out(std::move(place_of)), cost);
}

std::optional<nb::object> staircase_places(In<std::int64_t, 1> work, In<std::int64_t, 1> tokens, int ranks, std::int64_t budget,
                                           int count) {
    const std::size_t sequences = work.shape(0);
    check(tokens.shape(0) == sequences && ranks > 0 && count > 0, "every sequence needs work and tokens");
    std::vector<std::int32_t> descending(sequences), place_of(sequences, -1);
    std::iota(descending.begin(), descending.end(), 0);
    std::ranges::stable_sort(descending, std::greater<>(), [&](int sequence) { return work.data()[sequence]; });
    if (!staircase(descending, work.data(), tokens.data(), ranks, budget, count, place_of))
        return std::nullopt;
    return nb::cast(vector_out(std::move(place_of)));
}

auto arrange_order(In<std::int64_t, 1> tokens, In<std::int64_t, 2> travel, In<std::int32_t, 1> place,
                   In<std::int32_t, 1> first_node, In<std::int32_t, 1> num_nodes, In<std::int32_t, 1> order,
                   std::uint64_t seed) {
    const std::size_t sequences = tokens.shape(0), places = first_node.shape(0), nodes = travel.shape(1);
    check(travel.shape(0) == sequences && place.shape(0) == sequences && order.shape(0) == sequences,
          "every sequence needs travel, a place and an order");
    check(num_nodes.shape(0) == places, "every place needs its nodes");
    check_ranks(place.data(), sequences, places);
    for (std::size_t at = 0; at < places; ++at)
        check(first_node(at) >= 0 && num_nodes(at) >= 1 &&
                  static_cast<std::size_t>(first_node(at)) + static_cast<std::size_t>(num_nodes(at)) <= nodes,
              "a place lies on a node outside travel");
    check(std::all_of(tokens.data(), tokens.data() + sequences, [](std::int64_t count) { return count >= 0; }),
          "a sequence has a negative length");
    std::vector<std::int32_t> result(order.data(), order.data() + sequences);
    const ArrangeProblem problem{static_cast<int>(sequences), static_cast<int>(places), static_cast<int>(nodes),
                                 tokens.data(), travel.data(), place.data(), first_node.data(), num_nodes.data()};
    unlocked([&] { arrange(problem, seed, result); });
    return vector_out(std::move(result));
}

// sent [n, nodes] = nodes that each token goes to from those whose fields, `width` bits each, stand in a word: places [E]
// say where for every expert. Rows, where tokens are not deduplicated.
MOE_RL_VECTOR_CLONES void count_sent(const std::uint16_t *routes, std::size_t drawn, std::size_t top_k,
                                     const std::uint64_t *places, int fields, int width, bool deduplicated,
                                     std::int32_t *sent, int nodes) {
    const std::uint64_t field = width == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << width) - 1;
    for (std::size_t at = 0; at < drawn; ++at, routes += top_k, sent += nodes) {
        std::uint64_t visited = 0;
        for (std::size_t k = 0; k < top_k; ++k)
            visited = deduplicated ? visited | places[routes[k]] : visited + places[routes[k]];
        for (int node = 0; node < fields; ++node) {
            const std::uint64_t there = visited >> (node * width) & field;
            sent[node] = static_cast<std::int32_t>(deduplicated ? std::popcount(there) : there);
        }
    }
}

// [S, nodes] copies that the drawn tokens of every sequence send to other nodes, over all layers, when the sequence
// stands on a node that holds the experts `present` [L, nodes, E], its own homes among them.
auto sequence_travel(In<std::uint16_t, 3> routes, In<std::int64_t, 1> sequence, In<std::int32_t, 2> node_of,
                     In<std::uint8_t, 3> present, int num_sequences, bool deduplicated, int num_threads) {
    const std::size_t layers = routes.shape(0), drawn = routes.shape(1), top_k = routes.shape(2);
    const auto nodes = static_cast<int>(present.shape(1));
    check(nodes > 0 && nodes <= 64 && num_sequences >= 0, "there must be 1 to 64 nodes");
    check(present.shape(0) == layers && present.shape(2) == node_of.shape(1), "present must be [L, nodes, E]");
    check(node_of.shape(0) == layers && sequence.shape(0) == drawn, "node_of must be [L, E], sequence [n]");
    check_ranks(node_of.data(), node_of.size(), static_cast<std::size_t>(nodes));
    check(std::all_of(sequence.data(), sequence.data() + drawn,
                      [=](std::int64_t at) { return at >= 0 && at < num_sequences; }),
          "a token is of no sequence");
    const std::size_t experts = node_of.shape(1);
    check_experts(routes, experts);
    check(top_k < 256, "a token has at most 255 experts");
    const int width = std::max(8, static_cast<int>(std::bit_ceil(static_cast<unsigned>(nodes)))), per_word = 64 / width;
    std::vector<std::int64_t> travel(static_cast<std::size_t>(num_sequences) * nodes, 0);
    std::mutex adding;
    const auto add_layer = [&](std::int64_t layer) {
        std::vector<std::int32_t> sent(drawn * nodes);
        std::vector<std::uint64_t> places(experts);
        for (int first = 0; first < nodes; first += per_word) {
            const int fields = std::min(per_word, nodes - first);
            // Where tokens of a node have to go for each expert; nowhere for one that is there.
            for (std::size_t expert = 0; expert < experts; ++expert) {
                const int home = node_of.data()[layer * experts + expert];
                places[expert] = 0;
                for (int node = 0; node < fields; ++node)
                    if (!present.data()[(layer * nodes + first + node) * experts + expert])
                        places[expert] |= std::uint64_t{1} << (node * width + (deduplicated ? home : 0));
            }
            count_sent(routes.data() + layer * drawn * top_k, drawn, top_k, places.data(), fields, width,
                       deduplicated, sent.data() + first, nodes);
        }
        const std::lock_guard guard(adding);
        for (std::size_t at = 0; at < drawn; ++at)
            for (int node = 0; node < nodes; ++node)
                travel[sequence.data()[at] * nodes + node] += sent[at * nodes + node];
    };
    unlocked([&] { parallel_for(static_cast<std::int64_t>(layers), num_threads, add_layer); });
    return array_out(std::move(travel), num_sequences, nodes);
}

nb::typed<nb::list, nb::str> names_of_travel_passes() {
    nb::typed<nb::list, nb::str> names;
    for (const TravelPasses &passes : travel_passes())
        names.append(nb::str(passes.name.data(), passes.name.size()));
    return names;
}

} // namespace

void bind_planner(nb::module_ &module) {
    using namespace nb::literals;
    nb::class_<Load>(module, "Load")
        .def(nb::init<In<std::int32_t, 5>, In<std::int64_t, 3>, Routes, int>(), "pairs"_a, "tokens"_a,
             "routes"_a.none(), "ranks_per_domain"_a,
             "Hold the loads of a step: pairs [G, M, L, P, E], tokens [G, M, P], and None or routes [L, n, K], token [n], "
             "source [n], cell_start [G * M + 1].");
    module.def("replicate", &replicate_arrays, "load"_a, "home"_a, "residents"_a, "cost"_a.none(), "replica_slots"_a,
               "cross_node_slots"_a, "spare_slots"_a, "search_nodes"_a, "tolerance_ppm"_a, "cross_gain_ppm"_a,
               "num_threads"_a, "thorough"_a, "every"_a = 1,
               "Return the instances of every cell by name: offsets [cells + 1]; expert, physical_id and kind (0: replica "
               "inside a node, 1: across nodes, 2: resident) [N]; source_quota [N, P]; and of every cell highest_load, that "
               "no rank exceeds, and seconds. cost is a core.cost.LayerCostParams, or None: copies are free.");
    module.def("count_visits", &count_visits_arrays, "load"_a, "home"_a, "offsets"_a, "expert"_a, "rank"_a, "quota"_a,
               "num_threads"_a,
               "Return [cells * L, P] tokens that visit each rank and [cells * L, N * N] copies from each node to each "
               "other one, counted in the load's routes; without routes rows over each rank's link, rows from node to "
               "node, and rows into and out of each rank's NIC, counted in its pairs.");
    module.def("choose_residents", &resident_arrays, "load"_a, "home"_a, "cost"_a, "bits"_a, "slots"_a, "current"_a,
               "move_cost"_a, "row_share"_a, "iterations"_a, "seed"_a, "num_threads"_a,
               "Return home ranks [L, E], as they are where `move_cost` is negative, and [L, P * slots] experts that "
               "each rank is to hold for the whole step, or -1.");
    module.def("reorder", &reorder_arrays, "load"_a, "row_cost"_a, "move_cost"_a, "move_inside_cost"_a, "start"_a,
               "current"_a, "nodes"_a, "ranks_per_node"_a, "by_rank"_a, "moving_is_free"_a, "peak"_a, "power"_a, "iterations"_a, "iterations_inside"_a, "seed"_a,
               "num_threads"_a, "tokens"_a,
               "Return home ranks [L, E] that lower the sum over cells of the busiest node (or rank) of each layer, or with "
               "`peak` the fullest one of all cells.");
    module.def("travel_passes", &names_of_travel_passes,
               "Return the kinds of vectors in which this machine can count copies of tokens between nodes, the fastest "
               "first, which is taken.");
    module.def("use_travel_passes", [](const char *name) { use_travel_passes(name); }, "name"_a,
               "Count in vectors of that kind from now on, for tests: all count the same.");
    module.def("bin_loads", &bin_loads, "sequence_load"_a, "bin_of"_a, "bins"_a, "num_threads"_a,
               "Return [S, bins * L] rows of every sequence in each bin of each layer.");
    module.def("pack", &pack_arrays, "bin_load"_a, "row"_a, "bins"_a, "tokens"_a, "work"_a, "place"_a, "batch_of_place"_a,
               "num_batches"_a, "num_groups"_a, "budget"_a, "iterations"_a, "heat_shift"_a, "seed"_a, "travel"_a.none(),
               "node_of_place"_a, "limit"_a = NO_LIMIT, "power"_a = 1, "slowest_group"_a = true, "ranks"_a = 0, "most"_a = 0,
               "Return the place of every sequence, and the cost: the sum over batches and layers of the busiest bin. "
               "Sequence s has the rows row[s] of bin_load [U, bins * L].");
    module.def("staircase", &staircase_places, "work"_a, "tokens"_a, "ranks"_a, "budget"_a, "count"_a,
               "Return [S] places micro_batch * ranks + rank, long sequences together; None where one has no room.");
    module.def("arrange", &arrange_order, "tokens"_a, "travel"_a, "place"_a, "first_node"_a, "num_nodes"_a, "order"_a,
               "seed"_a,
               "Return [S] the order of the sequences in their places that lowers the cost of their tokens' travel.");
    module.def("sequence_travel", &sequence_travel, "routes"_a, "sequence"_a, "node_of"_a, "present"_a,
               "num_sequences"_a, "deduplicated"_a, "num_threads"_a,
               "Return [S, nodes] copies that leave each node if the sequence stands there, over all layers.");
}
