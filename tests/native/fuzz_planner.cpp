// libFuzzer target: bytes become a replicate, reorder or pack problem; the results must keep what the headers promise.
//   sh tests/native/fuzz.sh 3600
// Sizes are small and values extreme, because the searches branch on comparisons, not on size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pack.h"
#include "step.h"

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
    options.reuse = bytes.byte() % 2;
    options.min_quota = bytes.between(1, 5);
    options.search_nodes = bytes.byte();
    options.tolerance_ppm = bytes.byte() * 400;
    options.cross_gain_ppm = bytes.byte() * 40;
    options.price = bytes.byte() % 2;
    if (options.price) {
        const double values[LayerCostParams::NUM_FIELDS] = {8e14, 2.0 * 1e7, 1e7,  2e12, 2e4, 4e-5, 128, 1.0 * (bytes.byte() % 2),
                                                            4096, 3e11,      4e10, 0.25, 6e-5, 0.4, 0.5, 1, 1, 0.3,
                                                            3e11, 1e-5,      4e10, 1e-4};
        options.cost = LayerCostParams::from_array(values);
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
            require(same_node == !placed.across, "across says what it means");
            ++(placed.across ? across : inside)[rank];
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
    std::vector<std::int32_t> stays(load.size());
    for (auto &share : stays)
        share = bytes.byte();
    std::vector<std::int64_t> visit_cost(cells);
    for (auto &cost : visit_cost)
        cost = bytes.byte();
    const auto start = homes(bytes, layers, experts, ranks), current = homes(bytes, layers, experts, ranks);
    const bool visits = bytes.byte() % 2;
    const ReorderStep step{cells, layers, experts, nodes, per_node, load.data(), visits ? stays.data() : nullptr,
                           visit_cost.data(), 1 + bytes.byte(), bytes.byte(), bytes.byte(), start.data(), current.data(),
                           bytes.byte() % 2 != 0, bytes.byte() % 2 != 0, 200, 100, bytes.byte() % 2 != 0, bytes.byte()};
    Deadline deadline(0);
    const auto home = reorder_step(step, 1, deadline);
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
    std::vector<std::int64_t> tokens(sequences), attention(sequences), held(places);
    std::vector<std::int32_t> place(sequences), batch(places), group(sequences);
    for (int i = 0; i < places; ++i)
        batch[i] = i % batches;
    for (int i = 0; i < sequences; ++i) {
        tokens[i] = 1 + bytes.byte();
        attention[i] = bytes.byte();
        place[i] = i < places ? i : bytes.between(0, places - 1);
        group[i] = i;
        held[place[i]] += tokens[i];
    }
    const std::int64_t budget = *std::max_element(held.begin(), held.end()) + bytes.byte();
    const PackProblem problem{sequences, layers, bins, places, batches, load.data(), tokens.data(), attention.data(),
                              batch.data(), bytes.byte() % 2 ? group.data() : nullptr, budget};
    Deadline deadline(0);
    pack(problem, 300, bytes.between(0, 8), bytes.byte(), deadline, place);
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

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    Bytes bytes(data, size);
    switch (bytes.byte() % 3) {
    case 0:
        replicate_case(bytes);
        break;
    case 1:
        reorder_case(bytes);
        break;
    default:
        pack_case(bytes);
    }
    return 0;
}
