#include "step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "parallel.h"
#include "residents.h"
#include "rng.h"

namespace moe_rl {

namespace {

// Threads change the time, never the plan: a thread takes whole layers, each of which writes to its own results and draws
// from its own random stream.

// Gives every copy a slot: residents have theirs, the others take the lowest free one of their kind.
std::vector<PlacedCopy> place_copies(const Cell &cell, const ReplicateOptions &options, const std::vector<Copy> &copies) {
    const int homes = cell.experts / cell.ranks, before_spare = homes + cell.resident_slots;
    const int per_rank = before_spare + options.spare_slots;
    std::vector<std::uint8_t> taken(static_cast<std::size_t>(cell.ranks) * per_rank, 0);
    std::vector<PlacedCopy> placed;
    for (const Copy &copy : copies) {
        int id = copy.rank * per_rank + before_spare + (copy.kind == Copy::ACROSS ? options.slots : 0);
        if (copy.kind == Copy::RESIDENT) {
            const std::int32_t *held = cell.residents + static_cast<std::int64_t>(copy.rank) * cell.resident_slots;
            const auto slot = std::find(held, held + cell.resident_slots, copy.expert) - held;
            id = copy.rank * per_rank + homes + static_cast<int>(slot);
        }
        while (taken[id])
            ++id;
        taken[id] = 1;
        placed.push_back({copy.expert, id, copy.kind});
    }
    return placed;
}

// rows [E] = what all sources send to each expert. Returns the bits of all counts: below 0 where one of them is.
MOE_RL_VECTOR_CLONES std::int32_t add_rows(const std::int32_t *pairs, int sources, int experts, std::int64_t *rows) {
    std::int32_t bits = 0;
    std::fill(rows, rows + experts, 0);
    for (int source = 0; source < sources; ++source, pairs += experts)
        for (int expert = 0; expert < experts; ++expert) {
            rows[expert] += pairs[expert];
            bits |= pairs[expert];
        }
    return bits;
}

constexpr double RESIDENT_SPREAD = 1.5; // busiest over mean of the copies that ranks feed and hold

// Drawn tokens of a cell that its search looks at, and so many times more for the plan that is kept. With 256 D0 is .27 %
// slower, E .41, with 1024 E .21 % faster; with 1 in place of 4 D0 is .63 % slower, D1 .17, E 1.3, in two thirds of the time.
constexpr std::int64_t SEARCHED_TOKENS = 512;
constexpr std::int64_t THOROUGH = 4;

class ChainWorker {
  public:
    ChainWorker(const Step &step, const ReplicateOptions &options)
        : step_(step), options_(options), planner_(options) {}

    // Plans the micro-batches of one EP group and layer, or one of `every` so many of them.
    void run(int group, int layer, std::vector<CellResult> &results) {
        CellPlan plan;
        for (int micro_batch = options_.every / 2; micro_batch < step_.micro_batches; micro_batch += options_.every) {
            const std::int64_t batch = std::int64_t{group} * step_.micro_batches + micro_batch;
            Cell cell = step_.cell(batch, layer);
            rows_.resize(step_.experts);
            if (add_rows(cell.pairs, step_.ranks, step_.experts, rows_.data()) < 0)
                throw std::invalid_argument("pairs hold a negative count");
            cell.rows = rows_.data();
            const TokenRoutes all = cell.drawn;
            cell.drawn = thinned(all);
            planner_.plan(cell, plan);
            CellResult &result = results[cell.index];
            give_slots(cell, plan, result);
            cell.drawn = all;
            if (options_.price && (options_.cost.flat() || all.count > 0))
                count_all(cell, plan, result);
            result.highest_load = plan.highest_load;
            result.time_s = plan.time_s;
        }
    }

  private:
    // Every so many-th of the tokens: the search asks for gains again and again, and a few hundred tokens tell them.
    TokenRoutes thinned(const TokenRoutes &all) {
        const std::int64_t most = SEARCHED_TOKENS * (options_.thorough ? THOROUGH : 1);
        const std::int64_t every = (all.count + most - 1) / most;
        if (every <= 1)
            return all;
        token_.clear();
        source_.clear();
        for (std::int64_t i = every / 2; i < all.count; i += every) {
            token_.push_back(all.token[i]);
            source_.push_back(all.source[i]);
        }
        return {all.routes, token_.data(), source_.data(), static_cast<std::int64_t>(token_.size()), all.top_k};
    }

    // The plan's copies, their slots, and what they take from every source.
    void give_slots(const Cell &cell, const CellPlan &plan, CellResult &result) {
        copies_ = planner_.served(plan.across, plan.inside);
        result.copies = place_copies(cell, options_, copies_);
        split_sources(cell, copies_, result.source_quota, options_.price && options_.cost.flat());
    }

    // Prices the chosen plan once more with every visit counted, and keeps it only where it still pays.
    void count_all(const Cell &cell, CellPlan &plan, CellResult &result) {
        plan.time_s = planner_.counted_time(cell, plan, copies_, result.source_quota);
        if (plan.inside.empty() && plan.across.empty())
            return;
        CellResult bare;
        CellPlan none{.inside = {}, .across = {}, .highest_load = planner_.highest_home_load()};
        give_slots(cell, none, bare);
        none.time_s = planner_.counted_time(cell, none, copies_, bare.source_quota);
        if (plan.time_s <= none.time_s)
            return;
        plan = none;
        result = bare;
    }

    const Step &step_;
    const ReplicateOptions &options_;
    CellPlanner planner_;
    std::vector<std::int64_t> rows_, token_;
    std::vector<std::int32_t> source_;
    std::vector<Copy> copies_;
};

// The bits of one layer; `chosen` [E, words] keeps them.
TokenBits layer_bits(const StepBits &tokens, std::int64_t layer, int experts, std::vector<std::uint64_t> &chosen) {
    TokenBits bits = tokens.layout;
    const int words = bits.words();
    chosen.assign(static_cast<std::size_t>(experts) * words, 0);
    const std::uint16_t *routes = tokens.routes + layer * tokens.drawn * bits.top_k;
    for (const std::int32_t token : tokens.placed)
        for (int k = 0; k < bits.top_k; ++k)
            chosen[static_cast<std::size_t>(routes[std::int64_t{token} * bits.top_k + k]) * words +
                   tokens.bit[token] / 64] |= std::uint64_t{1} << (tokens.bit[token] % 64);
    bits.chosen = chosen.data();
    return bits;
}

// Drawn tokens that choose each expert: [E, nodes, pools].
std::vector<std::int32_t> rows_of_bits(const TokenBits &bits, int experts) {
    const std::size_t places = static_cast<std::size_t>(experts) * bits.nodes;
    std::vector<std::int32_t> rows(places * bits.pools, 0);
    const std::uint64_t *word = bits.chosen;
    for (std::size_t place = 0; place < places; ++place)
        for (const std::int32_t pools : bits.pools_of_row)
            for (int pool = 0; pool < pools; ++pool)
                rows[place * bits.pools + pool] += std::popcount(*word++);
    return rows;
}

// Puts the experts of every node on its ranks: who stays keeps its rank, who comes takes the lowest free place.
// Which rank it is hardly matters where replicas level the node afterwards, and an expert that stays is not sent.
std::vector<std::int32_t> spread(const std::int32_t *start, const std::vector<std::int32_t> &node_of,
                                 int ranks_per_node) {
    std::vector<std::int32_t> home(node_of.size(), -1);
    std::vector<int> room;
    for (std::size_t expert = 0; expert < home.size(); ++expert) {
        const bool stays = start[expert] / ranks_per_node == node_of[expert];
        home[expert] = stays ? start[expert] : -1;
        room.resize(std::max<std::size_t>(room.size(), static_cast<std::size_t>(start[expert]) + 1), 0);
        room[start[expert]] += stays ? 0 : 1;
    }
    for (std::size_t expert = 0; expert < home.size(); ++expert)
        for (int rank = node_of[expert] * ranks_per_node; home[expert] < 0; ++rank)
            if (room[rank] > 0) {
                --room[rank];
                home[expert] = rank;
            }
    return home;
}

class LayerReorder {
  public:
    LayerReorder(const ReorderStep &step, int layer)
        : s_(step), layer_(layer),
          start_(s_.start + std::int64_t{layer} * s_.experts), current_(s_.current + std::int64_t{layer} * s_.experts),
          rows_(static_cast<std::size_t>(s_.experts) * s_.cells) {
        for (int cell = 0; cell < s_.cells; ++cell)
            for (int expert = 0; expert < s_.experts; ++expert)
                rows_[static_cast<std::size_t>(expert) * s_.cells + cell] =
                    s_.load[(std::int64_t{cell} * s_.layers + layer) * s_.experts + expert];
        if (s_.tokens.routes)
            bits_ = layer_bits(s_.tokens, layer_, s_.experts, chosen_);
    }

    std::vector<std::int32_t> run() {
        std::vector<std::int32_t> home = s_.by_rank ? balance(s_.nodes * s_.ranks_per_node) : spread(start_, balance(s_.nodes), s_.ranks_per_node);
        if (s_.iterations_inside > 0 && !s_.by_rank)
            for (int node = 0; node < s_.nodes; ++node)
                balance_inside(node, home);
        return home;
    }

  private:
    RowPrice price(const std::vector<std::int32_t> &rows) const {
        return {s_.power, std::max(1.0, std::accumulate(rows.begin(), rows.end(), 0.0))};
    }

    int bin(int rank, int bins) const { return rank / (s_.nodes * s_.ranks_per_node / bins); }

    // Assigns experts to nodes, or to ranks when there are as many bins as ranks.
    std::vector<std::int32_t> balance(int bins) {
        std::vector<std::int32_t> bin_of(s_.experts), current(s_.experts);
        for (int expert = 0; expert < s_.experts; ++expert) {
            bin_of[expert] = bin(start_[expert], bins);
            current[expert] = bin(current_[expert], bins);
        }
        if (bins == 1)
            return bin_of;
        const MoveCost moves{current.data(), bins / s_.nodes, s_.move_cost, s_.move_inside_cost};
        const ReorderProblem problem{.cells = s_.cells, .experts = s_.experts, .bins = bins, .rows = rows_.data(),
                                     .row_cost = s_.row_cost, .moves = moves,
                                     .tokens = s_.tokens.routes ? &bits_ : nullptr, .peak = s_.peak, .price = price(rows_)};
        Rng seeds = stream(s_.seed, layer_);
        const std::int64_t cost = reorder(problem, s_.iterations, seeds.next(), bin_of);
        if (s_.moving_is_free) {
            std::vector<std::int32_t> other = balanced_start(problem);
            if (reorder(problem, s_.iterations, seeds.next(), other) < cost)
                bin_of.swap(other);
        }
        return bin_of;
    }

    void balance_inside(int node, std::vector<std::int32_t> &home) {
        std::vector<int> mine;
        std::vector<std::int32_t> bin_of, current;
        std::vector<std::int32_t> rows;
        const int first = node * s_.ranks_per_node;
        for (int expert = 0; expert < s_.experts; ++expert) {
            if (bin(home[expert], s_.nodes) != node)
                continue;
            mine.push_back(expert);
            bin_of.push_back(home[expert] - first);
            current.push_back(bin(current_[expert], s_.nodes) == node ? current_[expert] - first : -1);
            const auto from = rows_.begin() + static_cast<std::ptrdiff_t>(expert) * s_.cells;
            rows.insert(rows.end(), from, from + s_.cells);
        }
        const MoveCost moves{current.data(), s_.ranks_per_node, s_.move_cost, s_.move_inside_cost};
        const ReorderProblem problem{.cells = s_.cells, .experts = static_cast<int>(mine.size()), .bins = s_.ranks_per_node,
                                     .rows = rows.data(), .row_cost = s_.row_cost, .moves = moves, .tokens = nullptr,
                                     .peak = s_.peak, .price = price(rows)};
        Rng seeds = stream(s_.seed, (std::uint64_t{1} << 32) + static_cast<std::uint64_t>(layer_) * s_.nodes + node);
        reorder(problem, s_.iterations_inside, seeds.next(), bin_of);
        for (std::size_t i = 0; i < mine.size(); ++i)
            home[mine[i]] = first + bin_of[i];
    }

    const ReorderStep &s_;
    int layer_;
    const std::int32_t *start_, *current_;
    std::vector<std::int32_t> rows_; // [E, cells]
    std::vector<std::uint64_t> chosen_;
    TokenBits bits_{};
};

} // namespace

StepVisits count_visits(const Step &step, const StepInstances &instances, int num_threads) {
    const std::int64_t cells = std::int64_t{step.groups} * step.micro_batches, nodes = step.ranks / step.ranks_per_domain;
    StepVisits result;
    result.ranks.assign(cells * step.layers * step.ranks, 0);
    result.between.assign(cells * step.layers * nodes * nodes, 0);
    if (step.routes.routes == nullptr)
        result.nics.assign(cells * step.layers * 2 * step.ranks, 0);
    parallel_for(cells, num_threads, [&](std::int64_t batch) {
        VisitCounter tokens_of;
        RowCounter rows_of;
        std::vector<Served> served;
        for (int layer = 0; layer < step.layers; ++layer) {
            const Cell cell = step.cell(batch, layer);
            const auto index = static_cast<std::int64_t>(cell.index);
            const bool by_token = step.routes.routes != nullptr;
            if (by_token && cell.drawn.count == 0)
                continue;
            served.clear();
            for (std::int64_t i = instances.offsets[index]; i < instances.offsets[index + 1]; ++i)
                served.push_back({instances.expert[i], instances.rank[i], instances.quota + i * step.ranks});
            if (by_token) {
                tokens_of.count(cell, served);
            } else {
                rows_of.start(cell);
                rows_of.count(cell, served);
            }
            const double each = by_token ? cell.tokens / static_cast<double>(cell.drawn.count) : 1.0;
            const Visits &visits = by_token ? tokens_of.visits() : rows_of.visits();
            for (int rank = 0; rank < step.ranks; ++rank)
                result.ranks[index * step.ranks + rank] = each * static_cast<double>(visits.ranks[rank]);
            for (std::int64_t way = 0; way < nodes * nodes; ++way)
                result.between[index * nodes * nodes + way] = each * static_cast<double>(visits.between[way]);
            std::copy(visits.nics.begin(), visits.nics.end(), result.nics.begin() + index * 2 * step.ranks);
        }
    });
    return result;
}

std::vector<CellResult> replicate_step(const Step &step, const ReplicateOptions &options, int num_threads) {
    std::vector<CellResult> results(static_cast<std::size_t>(step.groups) * step.micro_batches * step.layers);
    parallel_for(std::int64_t{step.groups} * step.layers, num_threads, [&](std::int64_t chain) {
        const int group = static_cast<int>(chain / step.layers), layer = static_cast<int>(chain % step.layers);
        ChainWorker(step, options).run(group, layer, results);
    });
    return results;
}

Residents choose_residents(const Step &step, const StepBits &bits, const ReplicateOptions &options,
                           const ResidentOptions &resident, int num_threads) {
    const std::int64_t cells = std::int64_t{step.groups} * step.micro_batches;
    const std::int64_t width = std::int64_t{step.ranks} * resident.slots;
    const int nodes = step.ranks / step.ranks_per_domain;
    Residents chosen{std::vector<std::int32_t>(step.home, step.home + std::int64_t{step.layers} * step.experts),
                     std::vector<std::int32_t>(step.layers * width, -1)};
    double tokens = 0;
    for (std::int64_t i = 0; i < cells * step.ranks; ++i)
        tokens += static_cast<double>(step.tokens[i]);
    parallel_for(step.layers, num_threads, [&](std::int64_t layer) {
        std::vector<std::int32_t> pairs(static_cast<std::size_t>(step.ranks) * step.experts, 0);
        std::vector<std::int64_t> rows(step.experts, 0), exact(pairs.size(), 0);
        for (std::int64_t cell = 0; cell < cells; ++cell)
            for (std::size_t i = 0; i < pairs.size(); ++i)
                exact[i] += step.pairs_of(cell, static_cast<int>(layer))[i];
        const std::int64_t most = *std::max_element(exact.begin(), exact.end());
        const std::int64_t by = 1 + most / std::numeric_limits<std::int32_t>::max(); // shares are what counts here
        for (std::size_t i = 0; i < pairs.size(); ++i) {
            pairs[i] = static_cast<std::int32_t>(exact[i] / by);
            rows[i % step.experts] += pairs[i];
        }
        std::int32_t *home = chosen.home.data() + layer * step.experts;
        Cell all{step.ranks, step.ranks_per_domain, step.experts, rows.data(), home, tokens, pairs.data(),
                 step.routes.of(0, static_cast<int>(layer))};
        all.drawn.count = step.routes.cell_start[cells];
        std::vector<std::int32_t> held = CellPlanner(options).node_copies(all, resident.slots);
        std::vector<std::uint64_t> words;
        const TokenBits bits_here = layer_bits(bits, layer, step.experts, words);
        std::vector<std::int32_t> node_of(step.experts), current(step.experts);
        for (int expert = 0; expert < step.experts; ++expert) {
            node_of[expert] = home[expert] / step.ranks_per_domain;
            current[expert] = resident.current[layer * step.experts + expert] / step.ranks_per_domain;
        }
        // In picoseconds; a transfer that takes for ever takes ten seconds here, or what the annealing makes of it overflows.
        const std::int64_t held_ps =
            std::llround(std::min(1e13, 1e12 * RESIDENT_SPREAD * resident_time(options.cost) / step.ranks));
        const std::vector<std::int32_t> sent = rows_of_bits(bits_here, step.experts);
        std::vector<std::int64_t> row_cost;
        for (int pool = 0; pool < bits_here.pools; ++pool)
            row_cost.push_back(std::llround(resident.row_share * static_cast<double>(bits_here.copy_cost[pool])));
        const ResidentProblem problem{step.experts, nodes, step.ranks_per_domain * resident.slots, &bits_here, held_ps,
                                      current.data(), resident.move_cost, sent.data(), row_cost.data()};
        Rng seeds = stream(resident.seed, static_cast<std::uint64_t>(layer));
        improve_residents(problem, resident.iterations, seeds.next(), node_of, held);
        const std::vector<std::int32_t> settled = spread(home, node_of, step.ranks_per_domain);
        std::copy(settled.begin(), settled.end(), home);
        const std::vector<std::int32_t> one = seated(all, resident.slots, held);
        std::copy(one.begin(), one.end(), chosen.slots.begin() + layer * width);
    });
    return chosen;
}

std::vector<std::int32_t> reorder_step(const ReorderStep &step, int num_threads) {
    std::vector<std::int32_t> home(static_cast<std::size_t>(step.layers) * step.experts);
    parallel_for(step.layers, num_threads, [&](std::int64_t layer) {
        const std::vector<std::int32_t> one = LayerReorder(step, static_cast<int>(layer)).run();
        std::copy(one.begin(), one.end(), home.begin() + layer * step.experts);
    });
    return home;
}

} // namespace moe_rl
