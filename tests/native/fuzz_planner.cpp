// libFuzzer target: bytes become a replicate, reorder, pack or residents problem; the results must keep what the headers promise.
//   sh tests/native/fuzz.sh 3600
// Sizes are small and values extreme, because the searches branch on comparisons, not on size.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "pack.h"
#include "residents.h"
#include "step.h"
#include "travel.h"

using namespace moe_rl;

namespace {

void require(bool condition, const char *what) {
    if (!condition) {
        std::fprintf(stderr, "broken promise: %s\n", what);
        std::abort();
    }
}

// Reads values off the fuzzer's bytes; zeros when they have run out.
class Bytes {
  public:
    Bytes(const std::uint8_t *data, std::size_t size) : data_(data), end_(data + size) {}
    std::uint8_t byte() { return data_ < end_ ? *data_++ : 0; }
    int between(int low, int high) { return low + byte() % (high - low + 1); }
    // 0 .. about 2^24, small values and ties being likely.
    std::int32_t rows() {
        const std::uint8_t code = byte();
        return code < 128 ? code % 8 : static_cast<std::int32_t>(byte()) << (code % 17);
    }

  private:
    const std::uint8_t *data_, *end_;
};

// Homes with the same number of experts on every rank, in an order that the bytes choose.
std::vector<std::int32_t> homes(Bytes &bytes, int layers, int experts, int ranks) {
    std::vector<std::int32_t> home;
    for (int layer = 0; layer < layers; ++layer) {
        std::vector<std::int32_t> row(experts);
        for (int expert = 0; expert < experts; ++expert)
            row[expert] = expert / (experts / ranks);
        for (int expert = experts - 1; expert > 0; --expert)
            std::swap(row[expert], row[bytes.between(0, expert)]);
        home.insert(home.end(), row.begin(), row.end());
    }
    return home;
}

void replicate_case(Bytes &bytes) {
    const int domains = bytes.between(1, 3), per_domain = bytes.between(1, 4), ranks = domains * per_domain;
    const int experts = ranks * bytes.between(1, 4), micro_batches = bytes.between(1, 2), layers = bytes.between(1, 2);
    ReplicateOptions options{.slots = bytes.between(0, 2), .cross_slots = bytes.between(0, 2)};
    options.spare_slots = options.slots + options.cross_slots + bytes.between(0, 1);
    options.search_nodes = bytes.byte();
    options.tolerance_ppm = bytes.byte() * 400;
    options.cross_gain_ppm = bytes.byte() * 40;
    options.price = bytes.byte() % 2;
    if (options.price) {
        const double hierarchical = bytes.byte() % 2; // in the order of MOE_RL_COST_FIELDS
        options.cost = {8e14, 2e7, 1e7, 2e12, 2e4, 4e-5, 128, hierarchical, 4096, 3e11,
                        4e10, 0.25, 6e-5, 1, 1, 0.3, 3e11, 1e-5, 4e10, 1e-4};
    }
    std::vector<std::int32_t> pairs(static_cast<std::size_t>(micro_batches) * layers * ranks * experts);
    for (auto &count : pairs)
        count = bytes.rows();
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(micro_batches) * ranks);
    for (auto &count : tokens)
        count = bytes.rows();
    const auto home = homes(bytes, layers, experts, ranks);
    const Step step{1, micro_batches, layers, ranks, experts, per_domain, pairs.data(), tokens.data(), home.data()};
    const auto results = replicate_step(step, options, 1);
    require(results.size() == static_cast<std::size_t>(micro_batches) * layers, "one result per cell");

    const int slots_per_rank = experts / ranks + options.spare_slots;
    for (std::size_t cell = 0; cell < results.size(); ++cell) {
        const auto &result = results[cell];
        const std::int32_t *cell_pairs = pairs.data() + cell * ranks * experts;
        const std::int32_t *cell_home = home.data() + (cell % layers) * experts;
        std::vector<std::int64_t> load(ranks), inside(ranks), across(ranks);
        std::vector<std::int64_t> left(static_cast<std::size_t>(ranks) * experts);
        std::vector<int> used;
        for (int source = 0; source < ranks; ++source)
            for (int expert = 0; expert < experts; ++expert)
                left[source * experts + expert] = cell_pairs[source * experts + expert];
        for (std::size_t copy = 0; copy < result.copies.size(); ++copy) {
            const auto &placed = result.copies[copy];
            const int rank = placed.physical_id / slots_per_rank, slot = placed.physical_id % slots_per_rank;
            require(placed.expert >= 0 && placed.expert < experts && rank >= 0 && rank < ranks, "a copy exists");
            require(slot >= experts / ranks, "a copy lies in a spare slot");
            require(rank != cell_home[placed.expert], "a copy is not at home");
            const bool same_node = rank / per_domain == cell_home[placed.expert] / per_domain;
            require(same_node == (placed.kind == 0), "the kind says what it means");
            ++(placed.kind == 1 ? across : inside)[rank];
            used.push_back(placed.physical_id);
            for (int source = 0; source < ranks; ++source) {
                const std::int64_t quota = result.source_quota[copy * ranks + source];
                require(quota >= 0, "no negative quota");
                left[source * experts + placed.expert] -= quota;
                load[rank] += quota;
            }
        }
        std::sort(used.begin(), used.end());
        require(std::adjacent_find(used.begin(), used.end()) == used.end(), "no slot is used twice");
        for (int rank = 0; rank < ranks; ++rank)
            require(inside[rank] <= options.slots && across[rank] <= options.cross_slots, "slot limits");
        for (int source = 0; source < ranks; ++source)
            for (int expert = 0; expert < experts; ++expert) {
                require(left[source * experts + expert] >= 0, "no quota beyond the load");
                load[cell_home[expert]] += left[source * experts + expert];
            }
        require(*std::max_element(load.begin(), load.end()) <= result.highest_load, "no rank computes more than said");
    }
}

void reorder_case(Bytes &bytes) {
    const int nodes = bytes.between(1, 3), per_node = bytes.between(1, 3), ranks = nodes * per_node;
    const int experts = ranks * bytes.between(1, 3), cells = bytes.between(1, 4), layers = bytes.between(1, 2);
    std::vector<std::int32_t> load(static_cast<std::size_t>(cells) * layers * experts);
    for (auto &rows : load)
        rows = bytes.rows();
    const auto start = homes(bytes, layers, experts, ranks), current = homes(bytes, layers, experts, ranks);
    const ReorderStep step{cells, layers, experts, nodes, per_node, load.data(), 1 + bytes.byte(), bytes.byte(),
                           bytes.byte(), start.data(), current.data(), bytes.byte() % 2 != 0, bytes.byte() % 2 != 0, 200, 100,
                           bytes.byte()};
    const auto home = reorder_step(step, 1);
    require(home.size() == start.size(), "a home for every expert");
    for (int layer = 0; layer < layers; ++layer) {
        std::vector<int> held(ranks);
        for (int expert = 0; expert < experts; ++expert) {
            const int rank = home[layer * experts + expert];
            require(rank >= 0 && rank < ranks, "homes are ranks");
            ++held[rank];
        }
        require(std::all_of(held.begin(), held.end(), [&](int count) { return count == experts / ranks; }),
                "every rank is home of E / P experts");
    }
}

void pack_case(Bytes &bytes) {
    const int batches = bytes.between(1, 3), places = batches * bytes.between(1, 2);
    const int sequences = places + bytes.between(0, 8), layers = bytes.between(1, 3), bins = bytes.between(1, 3);
    std::vector<std::int32_t> load(static_cast<std::size_t>(sequences) * layers * bins);
    for (auto &rows : load)
        rows = bytes.rows();
    std::vector<std::int64_t> tokens(sequences), work(sequences), held(places);
    std::vector<std::int32_t> place(sequences), batch(places);
    for (int i = 0; i < places; ++i)
        batch[i] = i % batches;
    for (int i = 0; i < sequences; ++i) {
        tokens[i] = 1 + bytes.byte();
        work[i] = bytes.byte();
        place[i] = i < places ? i : bytes.between(0, places - 1);
        held[place[i]] += tokens[i];
    }
    const std::int64_t budget = *std::max_element(held.begin(), held.end()) + bytes.byte();
    const PackProblem problem{sequences, layers, bins, places, batches, 1, load.data(), tokens.data(), work.data(),
                              1, batch.data(), budget, nullptr, nullptr, 0, std::numeric_limits<std::int32_t>::max()};
    pack(problem, 300, bytes.between(0, 8), bytes.byte(), place);
    std::vector<std::int64_t> after(places);
    std::vector<int> count(places);
    for (int i = 0; i < sequences; ++i) {
        require(place[i] >= 0 && place[i] < places, "places exist");
        after[place[i]] += tokens[i];
        ++count[place[i]];
    }
    require(std::all_of(after.begin(), after.end(), [&](std::int64_t held_now) { return held_now <= budget; }), "budgets");
    require(std::all_of(count.begin(), count.end(), [](int sequences_now) { return sequences_now > 0; }), "no empty place");
}

// Copies of tokens into, or out of, the busiest node of every pool, priced, counted without any shortcut.
std::int64_t travel_cost(const TokenBits &tokens, const std::vector<std::int32_t> &node_of,
                         const std::vector<std::int32_t> &held, int slots) {
    const int words = tokens.words();
    std::int64_t cost = 0;
    for (int pool = 0; pool < tokens.pools; ++pool) {
        std::vector<std::int64_t> in(tokens.nodes), out(tokens.nodes);
        for (int source = 0; source < tokens.nodes; ++source)
            for (int there = 0; there < tokens.nodes; ++there) {
                int word = source * words / tokens.nodes + pool;
                for (const int pools : tokens.pools_of_row) {
                    if (pool >= pools || source == there)
                        break;
                    std::uint64_t any = 0;
                    std::int64_t rows = 0;
                    for (std::size_t expert = 0; expert < node_of.size(); ++expert) {
                        const auto first = held.begin() + source * slots, last = first + slots;
                        if (node_of[expert] != there || std::find(first, last, static_cast<int>(expert)) != last)
                            continue;
                        any |= tokens.chosen[expert * words + word];
                        rows += std::popcount(tokens.chosen[expert * words + word]);
                    }
                    const std::int64_t copies = tokens.deduplicated ? std::popcount(any) : rows;
                    in[there] += copies;
                    out[source] += copies;
                    word += pools;
                }
            }
        cost += tokens.copy_cost[pool] *
                std::max(*std::max_element(in.begin(), in.end()), *std::max_element(out.begin(), out.end()));
    }
    return cost;
}

void residents_case(Bytes &bytes) {
    const int nodes = bytes.between(2, 4), experts = nodes * bytes.between(1, 4), pools = bytes.between(1, 2);
    const int slots = bytes.between(1, 3);
    std::vector<std::int32_t> pools_of_row(bytes.between(0, 2), pools);
    if (!pools_of_row.empty())
        pools_of_row.back() = bytes.between(0, pools);
    std::vector<std::int64_t> copy_cost(pools);
    for (auto &cost : copy_cost)
        cost = bytes.byte();
    TokenBits tokens{pools, nodes, experts, bytes.byte() % 2 == 0, pools_of_row, nullptr, copy_cost.data()};
    std::vector<std::uint64_t> chosen(static_cast<std::size_t>(experts) * tokens.words());
    for (auto &word : chosen)
        word = std::uint64_t{bytes.byte()} << bytes.between(0, 56);
    tokens.chosen = chosen.data();
    std::vector<std::int32_t> node_of = homes(bytes, 1, experts, nodes), held(static_cast<std::size_t>(nodes) * slots, -1);
    const std::vector<std::int32_t> current = node_of;
    const std::vector<std::int32_t> rows(static_cast<std::size_t>(experts) * nodes * tokens.pools, 1);
    const std::vector<std::int64_t> row_cost(tokens.pools, 0);
    const ResidentProblem problem{experts, nodes, slots, &tokens, bytes.byte(), current.data(), bytes.between(-1, 20),
                                  rows.data(), row_cost.data()};
    const std::int64_t before = travel_cost(tokens, node_of, held, slots);
    improve_residents(problem, 64 * bytes.between(0, 8), bytes.byte(), node_of, held);
    std::int64_t after = travel_cost(tokens, node_of, held, slots);
    Travel travel(tokens, node_of, nodes);
    std::vector<int> homes_held(nodes);
    for (int expert = 0; expert < experts; ++expert) {
        ++homes_held[node_of[expert]];
        after += node_of[expert] != current[expert] ? std::max<std::int64_t>(0, problem.move_cost) : 0;
        require(problem.move_cost >= 0 || node_of[expert] == current[expert], "homes stay where they must");
    }
    for (std::size_t at = 0; at < held.size(); ++at) {
        const int node = static_cast<int>(at) / slots;
        if (held[at] < 0)
            continue;
        require(node_of[held[at]] != node, "no copy where its home is");
        require(std::count(held.begin() + node * slots, held.begin() + (node + 1) * slots, held[at]) == 1, "one copy");
        const CopyChange copied[] = {{node, -1, held[at]}};
        travel.cost_of_exchange(copied);
        travel.exchange(copied);
        after += problem.held_cost;
    }
    require(std::all_of(homes_held.begin(), homes_held.end(), [&](int count) { return count == experts / nodes; }),
            "every node keeps its number of homes");
    require(travel.cost() == travel_cost(tokens, node_of, held, slots), "travel is counted right");
    require(after <= before, "no worse than before");
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    Bytes bytes(data, size);
    switch (bytes.byte() % 4) {
    case 0:
        replicate_case(bytes);
        break;
    case 1:
        reorder_case(bytes);
        break;
    case 2:
        pack_case(bytes);
        break;
    default:
        residents_case(bytes);
    }
    return 0;
}
