#include "step.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "rng.h"
#include "split.h"

namespace moe_rl {

namespace {

// Threads change the time, never the plan: a thread takes whole chains (an EP group's layer with all its micro-batches)
// or whole layers, each of which writes to its own results and draws from its own random stream.

// Runs work(i) for i in 0 .. count - 1 on up to `num_threads` threads (0: all cores). An exception ends the loop and is
// thrown again here.
template <class Work> void parallel_for(std::int64_t count, int num_threads, Work work) {
    const std::int64_t wanted = num_threads > 0 ? num_threads : std::max(1U, std::thread::hardware_concurrency());
    std::atomic<std::int64_t> next{0};
    std::exception_ptr failure;
    std::mutex failing;
    const auto run = [&] {
        try {
            for (std::int64_t i = next++; i < count; i = next++)
                work(i);
        } catch (...) {
            const std::lock_guard guard(failing);
            failure = std::current_exception();
            next = count;
        }
    };
    {
        std::vector<std::jthread> helpers; // joined at the end of the scope
        for (std::int64_t thread = 1; thread < std::min(wanted, count); ++thread)
            helpers.emplace_back(run);
        run();
    }
    if (failure)
        std::rethrow_exception(failure);
}

// Gives every copy a slot: the previous micro-batch's where it had one, else the lowest free one of its kind.
void place_copies(const Step &step, const ReplicateOptions &options, const CellPlan &plan, const CellResult *previous,
                  CellResult &result, std::vector<Copy> &copies) {
    const int homes = step.experts / step.ranks, per_rank = homes + options.spare_slots;
    const std::size_t num_inside = plan.inside.size();
    copies = plan.inside;
    copies.insert(copies.end(), plan.across.begin(), plan.across.end());
    std::vector<int> order(copies.size());
    for (std::size_t i = 0; i < order.size(); ++i)
        order[i] = static_cast<int>(i);
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        return copies[a].expert != copies[b].expert ? copies[a].expert < copies[b].expert
                                                    : copies[a].rank < copies[b].rank;
    });
    std::vector<Copy> sorted;
    std::vector<std::uint8_t> taken(static_cast<std::size_t>(step.ranks) * per_rank, 0);
    result.copies.clear();
    result.reused = 0;
    for (const int i : order) {
        sorted.push_back(copies[i]);
        PlacedCopy placed{copies[i].expert, -1, static_cast<std::size_t>(i) >= num_inside};
        for (const PlacedCopy &before : previous ? previous->copies : std::vector<PlacedCopy>{})
            if (before.expert == placed.expert && before.physical_id / per_rank == copies[i].rank &&
                before.across == placed.across)
                placed.physical_id = before.physical_id;
        if (placed.physical_id >= 0) {
            taken[placed.physical_id] = 1;
            ++result.reused;
        }
        result.copies.push_back(placed);
    }
    for (std::size_t i = 0; i < sorted.size(); ++i) {
        PlacedCopy &placed = result.copies[i];
        for (int slot = homes + (placed.across ? options.slots : 0); placed.physical_id < 0; ++slot)
            if (!taken[static_cast<std::size_t>(sorted[i].rank) * per_rank + slot]) {
                placed.physical_id = sorted[i].rank * per_rank + slot;
                taken[placed.physical_id] = 1;
            }
    }
    copies.swap(sorted);
}

void split_sources(const Step &step, const std::int32_t *pairs, const std::int64_t *rows, const std::int32_t *home,
                   const std::vector<Copy> &copies, CellResult &result) {
    result.source_quota.assign(copies.size() * static_cast<std::size_t>(step.ranks), 0);
    std::vector<Instance> instances;
    std::vector<std::int64_t> taken;
    for (std::size_t first = 0; first < copies.size();) {
        const int expert = copies[first].expert;
        std::int64_t at_home = rows[expert];
        instances.clear();
        for (std::size_t i = first; i < copies.size() && copies[i].expert == expert; ++i) {
            instances.push_back({copies[i].rank, copies[i].quota});
            at_home -= copies[i].quota;
        }
        instances.push_back({home[expert], at_home});
        split_over_sources(instances, pairs + expert, step.experts, step.ranks, step.ranks_per_domain, taken);
        for (std::size_t i = 0; i + 1 < instances.size(); ++i, ++first)
            for (int source = 0; source < step.ranks; ++source)
                result.source_quota[first * step.ranks + source] =
                    static_cast<std::int32_t>(taken[i * step.ranks + source]);
    }
}

class ChainWorker {
  public:
    ChainWorker(const Step &step, const ReplicateOptions &options)
        : step_(step), options_(options), planner_(options) {}

    // Plans the micro-batches of one EP group and layer in order, since each may reuse the replicas of the one before.
    void run(int group, int layer, std::vector<CellResult> &results) {
        CellPlan plan, previous;
        const CellResult *before = nullptr;
        for (int micro_batch = 0; micro_batch < step_.micro_batches; ++micro_batch) {
            const std::int64_t batch = std::int64_t{group} * step_.micro_batches + micro_batch;
            const std::int64_t index = batch * step_.layers + layer;
            const std::int32_t *pairs = step_.pairs + index * step_.ranks * step_.experts;
            rows_.assign(step_.experts, 0);
            for (int source = 0; source < step_.ranks; ++source)
                for (int expert = 0; expert < step_.experts; ++expert)
                    rows_[expert] += pairs[static_cast<std::int64_t>(source) * step_.experts + expert];
            double tokens = 0;
            for (int source = 0; source < step_.ranks; ++source)
                tokens += static_cast<double>(step_.tokens[batch * step_.ranks + source]);
            const Cell cell{step_.ranks, step_.ranks_per_domain, step_.experts, rows_.data(),
                            step_.home + static_cast<std::int64_t>(layer) * step_.experts, tokens};
            planner_.plan(cell, micro_batch > 0 ? &previous : nullptr, plan);
            CellResult &result = results[index];
            place_copies(step_, options_, plan, options_.reuse ? before : nullptr, result, copies_);
            split_sources(step_, pairs, rows_.data(), cell.home, copies_, result);
            result.highest_load = plan.highest_load;
            result.time_s = plan.time_s;
            result.time_without_copies_s = plan.time_without_copies_s;
            before = &result;
            previous = plan;
        }
    }

  private:
    const Step &step_;
    const ReplicateOptions &options_;
    CellPlanner planner_;
    std::vector<std::int64_t> rows_;
    std::vector<Copy> copies_;
};

class LayerReorder {
  public:
    LayerReorder(const ReorderStep &step, int layer, Deadline &deadline)
        : s_(step), layer_(layer), deadline_(deadline),
          start_(s_.start + std::int64_t{layer} * s_.experts), current_(s_.current + std::int64_t{layer} * s_.experts),
          rows_(size()), stays_(s_.stays ? size() : 0) {
        for (int cell = 0; cell < s_.cells; ++cell)
            for (int expert = 0; expert < s_.experts; ++expert) {
                const std::int64_t from = (std::int64_t{cell} * s_.layers + layer) * s_.experts + expert;
                rows_[static_cast<std::size_t>(expert) * s_.cells + cell] = s_.load[from];
                if (s_.stays)
                    stays_[static_cast<std::size_t>(expert) * s_.cells + cell] = s_.stays[from];
            }
    }

    std::vector<std::int32_t> run() {
        std::vector<std::int32_t> home = s_.by_rank ? balance(s_.nodes * s_.ranks_per_node) : spread(balance(s_.nodes));
        if (s_.iterations_inside > 0 && !s_.by_rank)
            for (int node = 0; node < s_.nodes; ++node)
                balance_inside(node, home);
        return home;
    }

  private:
    std::size_t size() const { return static_cast<std::size_t>(s_.experts) * s_.cells; }
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
        const ReorderProblem problem{s_.cells, s_.experts, bins, rows_.data(), s_.stays ? stays_.data() : nullptr,
                                     s_.visit_cost, s_.row_cost, current.data(), s_.move_cost};
        Rng seeds = stream(s_.seed, layer_);
        std::int64_t cost = reorder(problem, s_.iterations, !s_.anneal, seeds.next(), deadline_, bin_of);
        if (s_.moving_is_free) {
            std::vector<std::int32_t> other = balanced_start(problem);
            const std::int64_t other_cost =
                reorder(problem, s_.iterations, !s_.anneal, seeds.next(), deadline_, other);
            if (other_cost < cost)
                bin_of.swap(other);
        }
        return bin_of;
    }

    // Puts the experts of every node on its ranks: who stays keeps its rank, who comes takes the lowest free place.
    // Which rank it is hardly matters where replicas level the node afterwards, and an expert that stays is not sent.
    std::vector<std::int32_t> spread(const std::vector<std::int32_t> &node_of) const {
        std::vector<std::int32_t> home(s_.experts, -1);
        std::vector<int> room(static_cast<std::size_t>(s_.nodes) * s_.ranks_per_node, 0);
        for (int expert = 0; expert < s_.experts; ++expert) {
            const bool stays = bin(start_[expert], s_.nodes) == node_of[expert];
            home[expert] = stays ? start_[expert] : -1;
            room[start_[expert]] += stays ? 0 : 1;
        }
        for (int expert = 0; expert < s_.experts; ++expert)
            for (int rank = node_of[expert] * s_.ranks_per_node; home[expert] < 0; ++rank)
                if (room[rank] > 0) {
                    --room[rank];
                    home[expert] = rank;
                }
        return home;
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
        const ReorderProblem problem{s_.cells, static_cast<int>(mine.size()), s_.ranks_per_node, rows.data(), nullptr,
                                     nullptr, s_.row_cost, current.data(), s_.move_inside_cost};
        Rng seeds = stream(s_.seed, (std::uint64_t{1} << 32) + static_cast<std::uint64_t>(layer_) * s_.nodes + node);
        reorder(problem, s_.iterations_inside, !s_.anneal, seeds.next(), deadline_, bin_of);
        for (std::size_t i = 0; i < mine.size(); ++i)
            home[mine[i]] = first + bin_of[i];
    }

    const ReorderStep &s_;
    int layer_;
    Deadline &deadline_;
    const std::int32_t *start_, *current_;
    std::vector<std::int32_t> rows_, stays_;
};

} // namespace

std::vector<CellResult> replicate_step(const Step &step, const ReplicateOptions &options, int num_threads) {
    std::vector<CellResult> results(static_cast<std::size_t>(step.groups) * step.micro_batches * step.layers);
    parallel_for(std::int64_t{step.groups} * step.layers, num_threads, [&](std::int64_t chain) {
        const int group = static_cast<int>(chain / step.layers), layer = static_cast<int>(chain % step.layers);
        ChainWorker(step, options).run(group, layer, results);
    });
    return results;
}

std::vector<std::int32_t> reorder_step(const ReorderStep &step, int num_threads,
                                       Deadline &deadline) {
    std::vector<std::int32_t> home(static_cast<std::size_t>(step.layers) * step.experts);
    parallel_for(step.layers, num_threads, [&](std::int64_t layer) {
        const std::vector<std::int32_t> one = LayerReorder(step, static_cast<int>(layer), deadline).run();
        std::copy(one.begin(), one.end(), home.begin() + layer * step.experts);
    });
    return home;
}

} // namespace moe_rl
