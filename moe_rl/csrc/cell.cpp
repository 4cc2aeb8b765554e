#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "cell.h"

namespace moe_rl {

namespace {

// Excess of the highest node over the mean that a set of cross-node copies may leave, in millionths. Instead of asking
// for every number of copies what it can reach, the search asks for a dozen targets how many copies they need: a target
// a little above the mean can do with far fewer copies than the mean itself.
constexpr std::int64_t NODE_SLACK_PPM[] = {0,     2500,  5000,  7500,  10000, 15000, 20000,
                                            30000, 40000, 60000, 80000, 120000};
// Excess of the highest rank over the node-limited floor that is tried when copies have a price.
constexpr std::int64_t RANK_SLACK_PPM[] = {0, 10000, 20000, 50000};

std::int64_t divide_up(std::int64_t rows, std::int64_t by) { return (rows + by - 1) / by; }

std::int64_t loosened(std::int64_t rows, std::int64_t ppm) { return rows + rows * ppm / 1000000; }

} // namespace

void CellPlanner::prepare(const Cell &cell) {
    rank_load_.assign(cell.ranks, 0);
    node_load_.assign(cell.domains(), 0);
    total_ = 0;
    for (int expert = 0; expert < cell.experts; ++expert) {
        rank_load_[cell.home[expert]] += cell.rows[expert];
        node_load_[cell.node(cell.home[expert])] += cell.rows[expert];
        total_ += cell.rows[expert];
    }
    if (!options_.price)
        return;
    stays_.resize(cell.experts);
    for (int expert = 0; expert < cell.experts; ++expert)
        stays_[expert] = cell.tokens > 0 ? stays_away(static_cast<double>(cell.rows[expert]) / cell.tokens) : 0.0;
}

// Loads and slots while cross-node copies are chosen one after the other.
struct CellPlanner::Exchange {
    const Cell &cell;
    std::int64_t target; // of a node
    std::vector<std::int64_t> node_load, rank_load, left;
    std::vector<int> received, sent;
    std::vector<Copy> copies;

    // The least loaded rank with a free slot on the node with most room, or -1; `room` is that node's. The rank matters
    // because rows that come from afar cannot be moved on by a replica inside the node.
    int receiver(int cross_slots, std::int64_t &room) const {
        int found = -1;
        room = 0;
        for (int node = 0; node < cell.domains(); ++node) {
            if (target - node_load[node] <= room)
                continue;
            int lowest = -1;
            for (int rank = node * cell.ranks_per_domain; rank < (node + 1) * cell.ranks_per_domain; ++rank)
                if (received[rank] < cross_slots && (lowest < 0 || rank_load[rank] < rank_load[lowest]))
                    lowest = rank;
            if (lowest >= 0) {
                found = lowest;
                room = target - node_load[node];
            }
        }
        return found;
    }

    // The expert of the donor node to copy: one that suffices alone, from the NIC that sends least, then the largest.
    int exported(int donor, int receiver, std::int64_t wanted) const {
        int chosen = -1;
        std::tuple<bool, int, std::int64_t> best;
        for (int expert = 0; expert < cell.experts; ++expert) {
            const int home = cell.home[expert];
            if (cell.node(home) != donor || left[expert] <= 0)
                continue;
            if (std::any_of(copies.begin(), copies.end(),
                            [&](const Copy &copy) { return copy.expert == expert && copy.rank == receiver; }))
                continue;
            const std::tuple rating(left[expert] >= wanted, -sent[home], left[expert]);
            if (chosen < 0 || rating > best) {
                chosen = expert;
                best = rating;
            }
        }
        return chosen;
    }

    void add(int expert, int receiver, std::int64_t quota) {
        const int home = cell.home[expert];
        copies.push_back({expert, receiver, quota});
        left[expert] -= quota;
        node_load[cell.node(home)] -= quota;
        rank_load[home] -= quota;
        node_load[cell.node(receiver)] += quota;
        rank_load[receiver] += quota;
        ++received[receiver];
        ++sent[home];
    }
};

// Moves load between nodes until none is above `target`; few copies, each NIC sending as few as can be.
bool CellPlanner::cross_node_copies(const Cell &cell, std::int64_t target, std::vector<Copy> &copies) {
    const std::int64_t rank_target = divide_up(total_, cell.ranks);
    const std::vector<int> none(cell.ranks, 0);
    Exchange exchange{cell, target, node_load_, rank_load_, {cell.rows, cell.rows + cell.experts}, none, none, {}};
    std::vector<int> order(cell.domains());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return node_load_[a] > node_load_[b]; });
    for (const int donor : order)
        while (exchange.node_load[donor] > target) {
            std::int64_t room = 0;
            const int receiver = exchange.receiver(options_.cross_slots, room);
            if (receiver < 0)
                return false;
            const std::int64_t wanted = std::min({exchange.node_load[donor] - target, room, rank_target});
            const int expert = exchange.exported(donor, receiver, wanted);
            if (expert < 0)
                return false;
            const std::int64_t quota = std::min(wanted, exchange.left[expert]);
            if (quota < options_.min_quota)
                return false;
            exchange.add(expert, receiver, quota);
        }
    copies.swap(exchange.copies);
    return true;
}

void CellPlanner::cross_node_choices(const Cell &cell) {
    choices_.assign(1, {});
    if (options_.cross_slots == 0 || cell.domains() == 1 || total_ == 0)
        return;
    const std::int64_t mean = divide_up(total_, cell.domains());
    const std::int64_t highest = *std::max_element(node_load_.begin(), node_load_.end());
    std::int64_t best_worth = highest * 1000000;
    std::vector<Copy> copies;
    for (const std::int64_t slack : NODE_SLACK_PPM) {
        const std::int64_t target = loosened(mean, slack);
        if (target >= highest)
            break;
        if (!cross_node_copies(cell, target, copies))
            continue;
        if (options_.price) { // tighter targets first: the first plan with so many copies is the best of them
            if (choices_.size() == 1 || copies.size() < choices_.back().size())
                choices_.push_back(copies);
            continue;
        }
        // The rows that the highest node is left with, plus what each copy has to save (cross_gain_ppm of the mean). At
        // a mean of 1000, a highest node of 1100 and 9000 ppm: two copies that reach 1000 are worth 1000 + 2 * 9 =
        // 1018, one that reaches 1025 is worth 1034, none 1100.
        const std::int64_t worth = target * 1000000 + mean * options_.cross_gain_ppm * std::ssize(copies);
        if (worth < best_worth) {
            best_worth = worth;
            choices_[0] = copies;
        }
    }
    if (options_.price)
        std::reverse(choices_.begin() + 1, choices_.end());
}

void CellPlanner::build_domains(const Cell &cell, const std::vector<Copy> &across) {
    domains_.resize(cell.domains());
    for (Domain &domain : domains_)
        domain.reset(cell.ranks_per_domain);
    left_.assign(cell.rows, cell.rows + cell.experts);
    for (const Copy &copy : across) {
        left_[copy.expert] -= copy.quota;
        domains_[cell.node(copy.rank)].add_fixed(copy.rank % cell.ranks_per_domain, copy.quota);
    }
    for (int expert = 0; expert < cell.experts; ++expert)
        domains_[cell.node(cell.home[expert])].add(expert, cell.home[expert] % cell.ranks_per_domain, left_[expert]);
    for (Domain &domain : domains_)
        domain.finish();
}

// Balances every node down to one target for all: the lowest that the worst node can reach, times 1 + slack. One
// target, because the layer waits for the busiest rank of all nodes: a node that could get lower saves nothing by it,
// and with the common target it needs fewer copies. The fullest node goes first, since it will mostly decide.
void CellPlanner::inside_nodes(const Cell &cell, std::int64_t slack_ppm, const CellPlan *previous, CellPlan &plan) {
    std::int64_t target = divide_up(total_, cell.ranks);
    for (const Domain &domain : domains_)
        target = std::max(target, divide_up(domain.total(), cell.ranks_per_domain));
    target = loosened(target, slack_ppm);
    Limits limits{.slots = options_.slots,
                  .min_quota = std::max<std::int64_t>(1, options_.min_quota),
                  .search_nodes = options_.search_nodes,
                  .tolerance = std::max<std::int64_t>(1, target * options_.tolerance_ppm / 1000000)};
    std::vector<int> order(domains_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return domains_[a].total() > domains_[b].total(); });
    std::vector<std::vector<Copy>> copies(domains_.size());
    for (const int node : order)
        target = std::max(target, domains_[node].lowest_target(target, limits, copies[node]));
    plan.highest_load = target;
    plan.inside.clear();
    for (int node = 0; node < cell.domains(); ++node) {
        const int first = node * cell.ranks_per_domain;
        if (domains_[node].highest_load() <= target) {
            copies[node].clear();
        } else {
            domains_[node].fewest_copies(target, limits, copies[node]);
            if (previous != nullptr) {
                std::vector<Copy> before;
                for (const Copy &copy : previous->inside)
                    if (cell.node(copy.rank) == node && cell.node(cell.home[copy.expert]) == node)
                        before.push_back({copy.expert, copy.rank - first, 0});
                std::vector<Copy> again;
                if (!before.empty() && domains_[node].refill(target, before, again))
                    copies[node] = again;
            }
        }
        for (const Copy &copy : copies[node])
            plan.inside.push_back({copy.expert, copy.rank + first, copy.quota});
    }
}

// What layer_time wants to know of a plan. Visits: a token goes to a rank (or node) once, however many of its experts
// are there. Loads do not say which experts meet in a token, so experts count as chosen independently: a token stays
// away from a rank with experts of shares 0.25 and 0.5 with probability 0.75 * 0.5 = 0.375. Sums of logarithms instead
// of products, so that an expert's part can be added for each rank that holds an instance of it.
const LayerRows &CellPlanner::layer_rows(const Cell &cell, const CellPlan &plan) {
    const std::size_t ranks = cell.ranks, nodes = cell.domains();
    rows_.rows.assign(ranks, 0);
    rows_.padded_rows.assign(ranks, 0);
    rows_.active_experts.assign(ranks, 0);
    rank_stays_.assign(ranks, 0);
    node_stays_.assign(nodes, 0);
    left_.assign(cell.rows, cell.rows + cell.experts);
    const auto add = [&](int rank, std::int64_t quota) {
        if (quota == 0)
            return;
        const auto rows = static_cast<double>(quota);
        rows_.rows[rank] += rows;
        rows_.padded_rows[rank] += std::ceil(rows / options_.cost.gemm_tile_rows) * options_.cost.gemm_tile_rows;
        rows_.active_experts[rank] += 1;
        rank_stays_[rank] += stays_away(rows / cell.tokens);
    };
    count_.assign(2 * ranks, 0);
    rows_.replicas = rows_.cross_node_replicas = 0;
    for (const Copy &copy : plan.inside) {
        left_[copy.expert] -= copy.quota;
        add(copy.rank, copy.quota);
        rows_.replicas = std::max<double>(rows_.replicas, ++count_[copy.rank]);
    }
    count_.assign(2 * ranks, 0);
    for (const Copy &copy : plan.across) { // tokens of a node leave their own NIC at the home and enter at the replica
        left_[copy.expert] -= copy.quota;
        add(copy.rank, copy.quota);
        const int most = std::max(++count_[copy.rank], ++count_[ranks + cell.home[copy.expert]]);
        rows_.cross_node_replicas = std::max<double>(rows_.cross_node_replicas, most);
    }
    shared_.assign(cell.experts, 0);
    for (std::size_t at = 0; at < plan.across.size(); ++at) { // copies of one expert on one node count once
        const Copy &copy = plan.across[at];
        const auto same = [&](const Copy &other) {
            return other.expert == copy.expert && cell.node(other.rank) == cell.node(copy.rank);
        };
        shared_[copy.expert] += static_cast<double>(copy.quota);
        if (std::any_of(plan.across.begin(), plan.across.begin() + static_cast<std::ptrdiff_t>(at), same))
            continue;
        std::int64_t quota = 0;
        for (const Copy &other : plan.across)
            quota += same(other) ? other.quota : 0;
        node_stays_[cell.node(copy.rank)] += stays_away(static_cast<double>(quota) / cell.tokens);
    }
    for (int expert = 0; expert < cell.experts; ++expert) {
        const std::int64_t total = cell.rows[expert];
        if (total == 0)
            continue;
        const int home = cell.home[expert];
        if (left_[expert] == total) {
            const auto rows = static_cast<double>(total);
            rows_.rows[home] += rows;
            rows_.padded_rows[home] += std::ceil(rows / options_.cost.gemm_tile_rows) * options_.cost.gemm_tile_rows;
            rows_.active_experts[home] += 1;
            rank_stays_[home] += stays_[expert];
        } else {
            add(home, left_[expert]);
        }
        const double kept = static_cast<double>(total) - shared_[expert];
        node_stays_[cell.node(home)] +=
            kept == static_cast<double>(total) ? stays_[expert] : stays_away(kept / cell.tokens);
    }
    set_visits(rows_, rank_stays_, node_stays_, cell.tokens / static_cast<double>(ranks));
    return rows_;
}

void CellPlanner::consider(const Cell &cell, CellPlan &plan, CellPlan &best) {
    plan.time_s = layer_time(options_.cost, layer_rows(cell, plan)).total_s();
    if (plan.time_s >= best.time_s)
        return;
    plan.time_without_copies_s = best.time_without_copies_s;
    best = plan;
}

// By rows: the best exchange across nodes, levelled inside, against levelling alone. By time: every exchange that came
// out with fewer copies than the tighter ones, each with the slacks of RANK_SLACK_PPM, priced one by one, because a
// copy that no longer shortens the slowest rank by its own cost is worse than none. Doing nothing is the first
// candidate, so that a plan is never predicted slower than that.
void CellPlanner::plan(const Cell &cell, const CellPlan *previous, CellPlan &best) {
    prepare(cell);
    best = {};
    best.highest_load = *std::max_element(rank_load_.begin(), rank_load_.end());
    const CellPlan *before = options_.reuse ? previous : nullptr;
    if (!options_.price) {
        cross_node_choices(cell);
        CellPlan across{.inside = {}, .across = choices_[0]};
        build_domains(cell, across.across);
        inside_nodes(cell, 0, before, across);
        if (across.highest_load < best.highest_load)
            best = across;
        const std::int64_t floor =
            divide_up(*std::max_element(node_load_.begin(), node_load_.end()), cell.ranks_per_domain);
        if (!across.across.empty() && across.highest_load > floor) { // the copies from afar were in the way
            CellPlan inside{};
            build_domains(cell, {});
            inside_nodes(cell, 0, before, inside);
            if (inside.highest_load <= best.highest_load)
                best = inside;
        }
        return;
    }
    best.time_s = best.time_without_copies_s = layer_time(options_.cost, layer_rows(cell, best)).total_s();
    if (total_ == 0)
        return;
    cross_node_choices(cell);
    CellPlan tried;
    for (const std::vector<Copy> &across : choices_) {
        tried.across = across;
        build_domains(cell, across);
        if (!across.empty()) {
            tried.inside.clear();
            tried.highest_load = 0;
            for (const Domain &domain : domains_)
                tried.highest_load = std::max(tried.highest_load, domain.highest_load());
            consider(cell, tried, best);
        }
        for (const std::int64_t slack : RANK_SLACK_PPM) {
            inside_nodes(cell, slack, before, tried);
            if (!tried.inside.empty())
                consider(cell, tried, best);
        }
    }
}

} // namespace moe_rl
