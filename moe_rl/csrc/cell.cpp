#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
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
// Excess of the highest rank over the node-limited floor that is tried when copies have a price. With the first alone D0 is
// .15 % slower, D1 .19, E .21, the bundled trace .60; with the first two nothing is slower than .02 % (README.md).
constexpr std::int64_t RANK_SLACK_PPM[] = {0, 10000, 20000, 50000};
constexpr std::int64_t ALL_ROWS = std::numeric_limits<std::int64_t>::max();

std::int64_t divide_up(std::int64_t rows, std::int64_t by) { return (rows + by - 1) / by; }

std::int64_t loosened(std::int64_t rows, std::int64_t ppm) { return rows + rows * ppm / 1000000; }

} // namespace

void CellPlanner::prepare(const Cell &cell) {
    rank_load_.assign(cell.ranks, 0);
    node_load_.assign(cell.domains(), 0);
    total_ = 0;
    kept_.assign(cell.rows, cell.rows + cell.experts);
    for (int expert = 0; expert < cell.experts; ++expert) {
        node_load_[cell.node(cell.home[expert])] += cell.rows[expert];
        total_ += cell.rows[expert];
    }
    serve_residents(cell);
    for (int expert = 0; expert < cell.experts; ++expert)
        rank_load_[cell.home[expert]] += kept_[expert];
    for (const Copy &copy : resident_)
        rank_load_[copy.rank] += copy.quota;
    if (!options_.price)
        return;
    if (options_.cost.flat())
        row_counter_.start(cell);
    stays_.resize(cell.experts);
    padded_.resize(cell.experts);
    for (int expert = 0; expert < cell.experts; ++expert) {
        const auto rows = static_cast<double>(kept_[expert]);
        stays_[expert] = cell.tokens > 0 ? stays_away(rows / cell.tokens) : 0.0;
        padded_[expert] = padded(rows);
    }
}

double CellPlanner::padded(double rows) const {
    return std::ceil(rows / options_.cost.gemm_tile_rows) * options_.cost.gemm_tile_rows;
}

// A resident serves the pairs of its node, so that they stay there, up to the mean of a rank; where the nodes then differ
// rows go back to homes. Which ones the tokens say, where they are known: against giving back by rows alone the price of a
// plan with one resident slot, MoE layers and moves, is .1 % (EP16), .2 (EP32) and 2.3 (EP64) lower on the traces of
// docs/planner.md, 1.7 on Qwen3-235B's shapes, and .06 % higher on the bundled trace.
void CellPlanner::serve_residents(const Cell &cell) {
    resident_.clear();
    const std::int64_t rank_target = divide_up(total_, cell.ranks);
    for (int rank = 0; rank < cell.ranks; ++rank) {
        std::int64_t room = rank_target;
        for (int slot = 0; slot < cell.resident_slots; ++slot) {
            const int expert = cell.residents[static_cast<std::int64_t>(rank) * cell.resident_slots + slot];
            if (expert < 0)
                continue;
            std::int64_t rows = cell.rows_of_node(cell.node(rank), expert);
            for (const Copy &other : resident_)
                if (other.expert == expert && cell.node(other.rank) == cell.node(rank))
                    rows -= other.quota;
            const std::int64_t quota = std::min({rows, room, kept_[expert]});
            if (quota <= 0)
                continue;
            resident_.push_back({expert, rank, quota, Copy::RESIDENT});
            room -= quota;
            kept_[expert] -= quota;
            node_load_[cell.node(cell.home[expert])] -= quota;
            node_load_[cell.node(rank)] += quota;
        }
    }
    if (!options_.price || cell.drawn.count == 0) {
        level_nodes(cell, foreign_rows(cell), resident_, node_load_, kept_);
        return;
    }
    std::vector<std::int64_t> rows(cell.at(cell.domains(), 0), 0);
    for (const Copy &copy : resident_) {
        rows[cell.at(cell.node(copy.rank), copy.expert)] = cell.rows_of_node(cell.node(copy.rank), copy.expert);
        kept_[copy.expert] += copy.quota;
    }
    level_copies(cell, options_.cost, {}, rows, resident_, node_load_);
    for (const Copy &copy : resident_)
        kept_[copy.expert] -= copy.quota;
}

// [P] rows that residents bring to each rank: no replica inside the node can take them off it again.
std::vector<std::int64_t> CellPlanner::foreign_rows(const Cell &cell) const {
    std::vector<std::int64_t> rows(cell.ranks, 0);
    for (const Copy &copy : resident_)
        rows[copy.rank] += copy.quota;
    return rows;
}

// Loads and slots while cross-node copies are chosen one after the other, `slots` on each rank.
struct CellPlanner::Exchange {
    const Cell &cell;
    int slots;
    const std::vector<Copy> &residents;
    std::int64_t rank_target;
    std::vector<std::int64_t> node_load, rank_load, left, foreign;
    std::vector<int> received, sent;
    std::vector<Copy> copies{};

    Exchange(const CellPlanner &planner, const Cell &of, int per_rank)
        : cell(of), slots(per_rank), residents(planner.resident_), rank_target(divide_up(planner.total_, of.ranks)),
          node_load(planner.node_load_), rank_load(planner.rank_load_), left(planner.kept_),
          foreign(planner.foreign_rows(of)), received(of.ranks, 0), sent(of.ranks, 0) {}

    // The least loaded rank of the node with a free slot and below `limit` rows from elsewhere, or -1. The rank matters
    // because rows that come from afar cannot be moved on by a replica inside the node.
    int host(int node, std::int64_t limit) const {
        int lowest = -1;
        for (int rank = node * cell.ranks_per_domain; rank < (node + 1) * cell.ranks_per_domain; ++rank)
            if (received[rank] < slots && foreign[rank] < limit && (lowest < 0 || rank_load[rank] < rank_load[lowest]))
                lowest = rank;
        return lowest;
    }

    // The host on the node with most room below `target`, or -1; `room` is that node's.
    int receiver(std::int64_t target, std::int64_t &room) const {
        int found = -1;
        room = 0;
        for (int node = 0; node < cell.domains(); ++node) {
            const int lowest = target - node_load[node] > room ? host(node, ALL_ROWS) : -1;
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
            const auto there = [&](const Copy &copy) { return copy.expert == expert && copy.rank == receiver; };
            if (std::ranges::any_of(copies, there) || std::ranges::any_of(residents, there))
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
        copies.push_back({expert, receiver, quota, Copy::ACROSS});
        left[expert] -= quota;
        node_load[cell.node(home)] -= quota;
        rank_load[home] -= quota;
        node_load[cell.node(receiver)] += quota;
        rank_load[receiver] += quota;
        foreign[receiver] += quota;
        ++received[receiver];
        ++sent[home];
    }

    // The rank takes these rows, as far as they are left and it stays below the mean.
    void take(int expert, int receiver, std::int64_t rows) {
        const std::int64_t quota = std::min({rows, left[expert], rank_target - foreign[receiver]});
        if (quota >= 1)
            add(expert, receiver, quota);
    }

    // [nodes, slots of a node] the copied experts, -1 for none.
    std::vector<std::int32_t> held() const {
        const std::size_t per_node = static_cast<std::size_t>(cell.ranks_per_domain) * slots;
        std::vector<std::int32_t> found(cell.domains() * per_node, -1);
        std::vector<std::size_t> used(cell.domains(), 0);
        for (const Copy &copy : copies) {
            const int node = cell.node(copy.rank);
            found[node * per_node + used[node]++] = copy.expert;
        }
        return found;
    }
};

// Moves load between nodes until none is above `target`; few copies, each NIC sending as few as can be.
bool CellPlanner::cross_node_copies(const Cell &cell, std::int64_t target, std::vector<Copy> &copies) {
    Exchange exchange(*this, cell, options_.cross_slots);
    std::vector<int> order(cell.domains());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater<>(), [&](int node) { return node_load_[node]; });
    for (const int donor : order)
        while (exchange.node_load[donor] > target) {
            std::int64_t room = 0;
            const int receiver = exchange.receiver(target, room);
            if (receiver < 0)
                return false;
            const std::int64_t wanted = std::min({exchange.node_load[donor] - target, room, exchange.rank_target});
            const int expert = exchange.exported(donor, receiver, wanted);
            if (expert < 0)
                return false;
            const std::int64_t quota = std::min(wanted, exchange.left[expert]);
            if (quota < 1)
                return false;
            exchange.add(expert, receiver, quota);
        }
    copies.swap(exchange.copies);
    return true;
}

namespace {

constexpr std::int64_t WHOLE_COPY = 1000; // worth of a copy whose token would otherwise send nothing to that node
// And of all of a token's experts there together, when there are several. With 0 D0 is .46 % slower and E .55, with half
// .14 and .29; with twice as much D0 is .17 % faster, E .04.
constexpr std::int64_t PART_COPY = 350;
// Copies that one home sends at most. With 1 D0 is 1.8 % slower and E 3.4; with 2 .2 and 1.2; with 4 both are the same.
constexpr int MOST_SENT = 3;
// Greedy copies are exchanged where their own time is at most so many times that of no copies. With 1.05 and with any
// figure above it the development trace is at 1.0512 of forced balance (EP32, one slot), with 1.02 at 1.0505, with 1.0 at
// 1.0480; the search takes two thirds of the time then.
constexpr double GREEDY_EXCESS = 1.05;

} // namespace

// What `home_copies` asks of the drawn tokens, whatever the limit: for every node the rows that it sends to each expert,
// its tokens by expert, and what a copy of the expert would save it.
void CellPlanner::follow_tokens(const Cell &cell) {
    const int nodes = cell.domains(), top_k = cell.drawn.top_k;
    const std::size_t width = cell.at(nodes, 0);
    from_node_.assign(width, 0);
    for (int source = 0; source < cell.ranks; ++source)
        for (int expert = 0; expert < cell.experts; ++expert)
            from_node_[cell.at(cell.node(source), expert)] += cell.pairs[cell.at(source, expert)];
    first_choice_.assign(width, -1);
    remote_.assign(cell.drawn.count * nodes, 0);
    next_choice_.resize(cell.drawn.count * top_k);
    std::vector<std::uint8_t> here(width, 0);
    for (int expert = 0; expert < cell.experts; ++expert)
        here[cell.at(cell.node(cell.home[expert]), expert)] = 1;
    for (const Copy &copy : resident_)
        here[cell.at(cell.node(copy.rank), copy.expert)] = 1;
    if (options_.cost.flat()) { // every row that stays is a row less, whatever else its token chose
        first_gain_.resize(width);
        for (std::size_t at = 0; at < width; ++at)
            first_gain_[at] = here[at] ? 0 : WHOLE_COPY * from_node_[at];
        return;
    }
    worth_.assign(top_k + 1, 0);
    for (int met = 1; met <= top_k; ++met)
        worth_[met] = met == 1 ? WHOLE_COPY : PART_COPY / met;
    first_gain_.assign(width, 0);
    for (std::int64_t token = 0; token < cell.drawn.count; ++token) {
        const std::uint16_t *routes = cell.drawn.experts(token);
        const int node = cell.node(cell.drawn.source[token]);
        for (int k = 0; k < top_k; ++k)
            if (!here[cell.at(node, routes[k])])
                ++remote_[token * nodes + cell.node(cell.home[routes[k]])];
        for (int k = 0; k < top_k; ++k) {
            const int there = cell.node(cell.home[routes[k]]);
            const std::size_t at = cell.at(node, routes[k]);
            if (here[at])
                continue;
            first_gain_[at] += worth_[remote_[token * nodes + there]];
            next_choice_[token * top_k + k] = first_choice_[at];
            first_choice_[at] = static_cast<std::int32_t>(token * top_k + k);
        }
    }
}

// Copies that keep tokens on their node: the expert's rows of a whole node move there, and with them go the copies of
// tokens that leave the node for this expert alone. A token with several experts on the other node still goes there when
// one of them is copied, so these count in part. Since a layer waits for the NIC with most replicas
// (`cross_node_replicas`), one more copy on another NIC is free: all slots are filled, best gain first, no home sending
// more than `most_sent`. Then the nodes' loads are levelled by giving rows back.
void CellPlanner::home_copies(const Cell &cell, int most_sent, std::int64_t least_gain, Exchange &exchange) {
    const int nodes = cell.domains(), top_k = cell.drawn.top_k;
    away_ = remote_;
    gain_ = first_gain_;
    std::vector<int> best(nodes, -1), receiver(nodes, -1);
    const auto look = [&](int node) { // for the node's best expert, and the rank to hold it
        best[node] = -1;
        receiver[node] = exchange.host(node, exchange.rank_target);
        const std::int64_t *gain = gain_.data() + cell.at(node, 0);
        for (int expert = 0; receiver[node] >= 0 && expert < cell.experts; ++expert)
            if (gain[expert] > (best[node] < 0 ? least_gain : gain[best[node]]) &&
                exchange.sent[cell.home[expert]] < most_sent)
                best[node] = expert;
    };
    for (int node = 0; node < nodes; ++node)
        look(node);
    const auto gain_of = [&](int node) {
        return best[node] < 0 ? 0 : gain_[cell.at(node, best[node])];
    };
    while (true) {
        int node = 0;
        for (int other = 1; other < nodes; ++other)
            node = gain_of(other) > gain_of(node) ? other : node;
        if (best[node] < 0)
            break;
        const int expert = best[node], home = cell.home[expert], there = cell.node(home);
        const std::size_t at = cell.at(node, expert);
        exchange.take(expert, receiver[node], from_node_[at]);
        // The tokens of the node with this expert: their others on the same home node weigh more now.
        for (std::int32_t next = first_choice_[at]; next >= 0; next = next_choice_[next]) {
            const std::int64_t token = next / top_k;
            const std::uint16_t *routes = cell.drawn.experts(token);
            std::uint8_t &met = away_[token * nodes + there];
            for (int k = 0; k < top_k; ++k)
                if (routes[k] != expert && cell.node(cell.home[routes[k]]) == there) {
                    std::int64_t &gain = gain_[cell.at(node, routes[k])];
                    gain += gain > 0 ? worth_[met - 1] - worth_[met] : 0;
                }
            --met;
        }
        gain_[at] = 0; // never again
        const bool sends_no_more = exchange.sent[home] >= most_sent;
        for (int other = 0; other < nodes; ++other)
            if (other == node || (sends_no_more && best[other] >= 0 && cell.home[best[other]] == home))
                look(other);
    }
}

// Rows go back from the fullest node to the home of one of its copies, or the other way round, up to the mean of a rank.
void CellPlanner::level_nodes(const Cell &cell, std::vector<std::int64_t> foreign, std::vector<Copy> &copies,
                              std::vector<std::int64_t> &node_load, std::vector<std::int64_t> &left) const {
    const int nodes = cell.domains();
    const std::int64_t rank_target = divide_up(total_, cell.ranks);
    for (int round = 0; round < 8 * nodes; ++round) {
        const auto fullest = static_cast<int>(std::ranges::max_element(node_load) - node_load.begin());
        Copy *chosen = nullptr;
        std::int64_t most = 0;
        for (Copy &copy : copies) {
            const int home = cell.node(cell.home[copy.expert]), away = cell.node(copy.rank);
            const bool returns = away == fullest;
            if (!returns && home != fullest)
                continue;
            const std::int64_t half = (node_load[fullest] - node_load[returns ? home : away]) / 2;
            const std::int64_t rows =
                returns ? std::min(half, copy.quota - 1)
                        : std::min({half, left[copy.expert], rank_target - foreign[copy.rank]});
            if (rows > most) {
                most = rows;
                chosen = &copy;
            }
        }
        if (chosen == nullptr || most * 1000 < total_ / nodes)
            break;
        const int home = cell.node(cell.home[chosen->expert]), away = cell.node(chosen->rank);
        const std::int64_t rows = away == fullest ? -most : most;
        chosen->quota += rows;
        foreign[chosen->rank] += rows;
        left[chosen->expert] -= rows;
        node_load[home] -= rows;
        node_load[away] += rows;
    }
}

void CellPlanner::cross_node_choices(const Cell &cell) {
    choices_.assign(1, {});
    if (options_.cross_slots == 0 || cell.domains() == 1 || total_ == 0)
        return;
    const std::int64_t mean = divide_up(total_, cell.domains());
    const std::int64_t highest = std::ranges::max(node_load_);
    std::int64_t best_worth = highest * 1000000;
    std::vector<Copy> copies;
    for (const std::int64_t slack : NODE_SLACK_PPM) {
        const std::int64_t target = loosened(mean, slack);
        if (target >= highest || (options_.price && cell.drawn.count > 0)) // home_copies chooses by what tokens do
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
    if (!options_.price)
        return;
    std::reverse(choices_.begin() + 1, choices_.end());
    if (cell.drawn.count > 0)
        follow_tokens(cell);
    double least_s = std::numeric_limits<double>::infinity();
    build_domains(cell, {});
    const double bare_s = least_time(cell, {}, 0);
    const std::vector<double> ingress = ingress_, egress = egress_;
    for (int most_sent = 1; cell.drawn.count > 0 && most_sent < std::min(cell.domains(), MOST_SENT + 1); ++most_sent) {
        Exchange exchange(*this, cell, options_.cross_slots);
        home_copies(cell, most_sent, 0, exchange);
        level_nodes(cell, exchange.foreign, exchange.copies, exchange.node_load, exchange.left);
        copies = exchange.copies;
        if (copies.empty())
            break;
        if (!options_.thorough) {
            if (copies.size() == choices_.back().size())
                break;
            choices_.push_back(copies);
            continue;
        }
        count_nodes(cell, copies);
        build_domains(cell, copies);
        if (least_time(cell, copies, 0) > bare_s * GREEDY_EXCESS)
            break;
        if (most_sent < MOST_SENT)
            choices_.push_back(copies);
        double cost_s = prefetch_time(options_.cost, most_sent);
        choices_.push_back(spread_copies(cell, most_sent, exchange.held(), cost_s));
        if (cost_s >= least_s) // nor will one more pay
            break;
        least_s = cost_s;
    }
    ingress_ = ingress;
    egress_ = egress;
}

// Copies of greedy choice, `held`, exchanged for those that leave the busiest node least (exchange_copies). Adds to
// `cost_s` what that search makes of them.
std::vector<Copy> CellPlanner::spread_copies(const Cell &cell, int most_sent, std::vector<std::int32_t> held,
                                             double &cost_s) const {
    const int width = cell.ranks_per_domain, slots = width * options_.cross_slots;
    std::vector<std::int64_t> rows = from_node_;
    std::vector<std::int32_t> fixed(cell.domains(), 0);
    for (const Copy &copy : resident_) { // serves its node already
        rows[cell.at(cell.node(copy.rank), copy.expert)] = 0;
        fixed[cell.node(copy.rank)] += static_cast<std::int32_t>(copy.quota);
    }
    cost_s += exchange_copies(cell, options_.cost, rows, fixed, most_sent, held) / width;
    Exchange exchange(*this, cell, options_.cross_slots);
    std::vector<std::pair<std::int64_t, std::size_t>> largest_first;
    for (std::size_t at = 0; at < held.size(); ++at)
        if (held[at] >= 0)
            largest_first.emplace_back(-rows[at / slots * cell.experts + held[at]], at);
    std::sort(largest_first.begin(), largest_first.end());
    for (const auto &[minus, at] : largest_first) {
        const int receiver = exchange.host(static_cast<int>(at) / slots, exchange.rank_target);
        if (receiver >= 0)
            exchange.take(held[at], receiver, -minus);
    }
    level_copies(cell, options_.cost, resident_, rows, exchange.copies, exchange.node_load);
    return exchange.copies;
}

std::vector<std::int32_t> CellPlanner::node_copies(const Cell &all, int slots) {
    const std::vector<std::int32_t> none(static_cast<std::size_t>(all.ranks) * slots, -1);
    const LayerCostParams &p = options_.cost;
    if (slots == 0 || all.drawn.count == 0 || all.domains() == 1)
        return none;
    const double copy_s = copy_time(p) / all.ranks_per_domain * counted_as(all);
    if (copy_s <= 0)
        return none;
    prepare(all);
    follow_tokens(all);
    const auto least = static_cast<std::int64_t>(std::min(1e15, WHOLE_COPY * resident_time(p) / copy_s));
    Exchange exchange(*this, all, slots);
    home_copies(all, all.experts * all.domains(), least, exchange);
    return exchange.held();
}

// The largest copies of a node first, each to its least loaded rank.
std::vector<std::int32_t> seated(const Cell &all, int slots, const std::vector<std::int32_t> &held) {
    std::vector<std::int32_t> seats(held.size(), -1);
    const int width = all.ranks_per_domain, per_node = width * slots;
    const std::int64_t rank_target = divide_up(std::accumulate(all.rows, all.rows + all.experts, std::int64_t{0}), all.ranks);
    std::vector<std::int64_t> load(all.ranks, 0);
    for (int expert = 0; expert < all.experts; ++expert)
        load[all.home[expert]] += all.rows[expert];
    std::vector<Copy> copies;
    for (std::size_t at = 0; at < held.size(); ++at) {
        const int expert = held[at], node = static_cast<int>(at) / per_node;
        if (expert < 0)
            continue;
        const std::int64_t rows = std::min({all.rows_of_node(node, expert), rank_target, load[all.home[expert]]});
        load[all.home[expert]] -= rows;
        copies.push_back({expert, node * width, rows});
    }
    std::ranges::stable_sort(copies, std::greater<>(), &Copy::quota);
    std::vector<int> used(all.ranks, 0);
    for (const Copy &copy : copies) {
        int best = -1;
        for (int rank = copy.rank; rank < copy.rank + width; ++rank)
            if (used[rank] < slots && (best < 0 || load[rank] < load[best]))
                best = rank;
        seats[static_cast<std::size_t>(best) * slots + used[best]++] = copy.expert;
        load[best] += copy.quota;
    }
    return seats;
}

// The visits of nodes, each of which stands for `each` tokens, shared by their NICs; rows take their rank's own NIC.
void CellPlanner::take_visits(const Cell &cell, const Visits &visits, double each) {
    const int nodes = cell.domains();
    if (!visits.nics.empty()) {
        ingress_.assign(visits.nics.begin(), visits.nics.begin() + cell.ranks);
        egress_.assign(visits.nics.begin() + cell.ranks, visits.nics.end());
        return;
    }
    each /= cell.ranks_per_domain;
    ingress_.assign(nodes, 0);
    egress_.assign(nodes, 0);
    for (int from = 0; from < nodes; ++from)
        for (int to = 0; to < nodes; ++to) {
            const double copies = each * static_cast<double>(visits.between[from * nodes + to]);
            egress_[from] += copies;
            ingress_[to] += copies;
        }
}

const Visits &CellPlanner::count(const Cell &cell, const std::vector<Copy> &copies,
                                 const std::vector<std::int32_t> &source_quota, bool of_ranks) {
    std::vector<Served> served;
    for (std::size_t i = 0; i < copies.size(); ++i)
        served.push_back({copies[i].expert, copies[i].rank, source_quota.data() + i * cell.ranks});
    if (options_.cost.flat()) {
        row_counter_.count(cell, served);
        return row_counter_.visits();
    }
    counter_.count(cell, served, of_ranks);
    return counter_.visits();
}

// Copies inside a node change no visit of a node, so it suffices to count once for every set of copies across. They do
// change what a rank's own NIC sends, so where rows are sent, this holds for the copies across alone.
void CellPlanner::count_nodes(const Cell &cell, const std::vector<Copy> &across) {
    if (!counts(cell))
        return;
    const std::vector<Copy> copies = served(across, {});
    split_sources(cell, copies, quota_, options_.cost.flat());
    take_visits(cell, count(cell, copies, quota_, false), counted_as(cell));
}

std::vector<Copy> CellPlanner::served(const std::vector<Copy> &across, const std::vector<Copy> &inside) const {
    std::vector<Copy> copies = across;
    copies.insert(copies.end(), resident_.begin(), resident_.end());
    copies.insert(copies.end(), inside.begin(), inside.end());
    std::ranges::sort(copies, {}, [](const Copy &copy) { return std::pair(copy.expert, copy.rank); });
    return copies;
}

// Where rows are sent, a copy inside the node takes them off its home's own NIC: they are counted for every plan.
double CellPlanner::searched_time(const Cell &cell, const CellPlan &plan) {
    if (!options_.cost.flat())
        return layer_time(options_.cost, layer_rows(cell, plan));
    const std::vector<Copy> copies = served(plan.across, plan.inside);
    split_sources(cell, copies, quota_, true);
    return counted_time(cell, plan, copies, quota_);
}

double CellPlanner::counted_time(const Cell &cell, const CellPlan &plan, const std::vector<Copy> &copies,
                                 const std::vector<std::int32_t> &source_quota) {
    const Visits &visits = count(cell, copies, source_quota, true);
    const double each = counted_as(cell);
    take_visits(cell, visits, each);
    layer_rows(cell, plan, true);
    rows_.rank_visits.resize(cell.ranks);
    for (int rank = 0; rank < cell.ranks; ++rank)
        rows_.rank_visits[rank] = each * static_cast<double>(visits.ranks[rank]);
    return layer_time(options_.cost, rows_);
}

void CellPlanner::build_domains(const Cell &cell, const std::vector<Copy> &across) {
    domains_.resize(cell.domains());
    for (Domain &domain : domains_)
        domain.reset(cell.ranks_per_domain);
    left_ = kept_;
    for (const Copy &copy : resident_)
        domains_[cell.node(copy.rank)].add_fixed(copy.rank % cell.ranks_per_domain, copy.quota);
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
void CellPlanner::inside_nodes(const Cell &cell, std::int64_t slack_ppm, CellPlan &plan) {
    std::int64_t target = divide_up(total_, cell.ranks);
    for (const Domain &domain : domains_)
        target = std::max(target, divide_up(domain.total(), cell.ranks_per_domain));
    target = loosened(target, slack_ppm);
    Limits limits{.slots = options_.slots,
                  .search_nodes = options_.search_nodes,
                  .tolerance = std::max<std::int64_t>(1, target * options_.tolerance_ppm / 1000000)};
    order_.resize(domains_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::ranges::stable_sort(order_, std::greater<>(), [&](int node) { return domains_[node].total(); });
    std::vector<std::vector<Copy>> &copies = of_node_;
    copies.resize(domains_.size());
    for (const int node : order_)
        target = std::max(target, domains_[node].lowest_target(target, limits, copies[node]));
    plan.highest_load = target;
    plan.inside.clear();
    for (int node = 0; node < cell.domains(); ++node) {
        const int first = node * cell.ranks_per_domain;
        if (domains_[node].highest_load() <= target)
            copies[node].clear();
        else
            domains_[node].fewest_copies(target, limits, copies[node]);
        for (const Copy &copy : copies[node])
            plan.inside.push_back({copy.expert, copy.rank + first, copy.quota});
    }
}

// What layer_time wants to know of a plan. Visits: a token goes to a rank (or node) once, however many of its experts
// are there. Loads do not say which experts meet in a token, so experts count as chosen independently: a token stays
// away from a rank with experts of shares 0.25 and 0.5 with probability 0.75 * 0.5 = 0.375. Sums of logarithms instead
// of products, so that an expert's part can be added for each rank that holds an instance of it.
const LayerRows &CellPlanner::layer_rows(const Cell &cell, const CellPlan &plan, bool counted) {
    const std::size_t ranks = cell.ranks, nodes = cell.domains();
    rows_.rows.assign(ranks, 0);
    rows_.padded_rows.assign(ranks, 0);
    rows_.active_experts.assign(ranks, 0);
    rank_stays_.assign(ranks, 0);
    left_ = kept_;
    const auto add = [&](int rank, std::int64_t quota) {
        if (quota == 0)
            return;
        const auto rows = static_cast<double>(quota);
        rows_.rows[rank] += rows;
        rows_.padded_rows[rank] += padded(rows);
        rows_.active_experts[rank] += 1;
        if (!counted)
            rank_stays_[rank] += stays_away(rows / cell.tokens);
    };
    // The link of a home carries every copy that it feeds; tokens of a node leave their own NIC at the home and enter at
    // the replica.
    const auto add_copies = [&](const std::vector<Copy> &copies) {
        int most = 0;
        count_.assign(2 * ranks, 0);
        for (const Copy &copy : copies) {
            left_[copy.expert] -= copy.quota;
            add(copy.rank, copy.quota);
            most = std::max({most, ++count_[copy.rank], ++count_[ranks + cell.home[copy.expert]]});
        }
        return static_cast<double>(most);
    };
    rows_.replicas = add_copies(plan.inside);
    rows_.cross_node_replicas = add_copies(plan.across);
    for (const Copy &copy : resident_)
        add(copy.rank, copy.quota);
    for (int expert = 0; expert < cell.experts; ++expert) {
        const std::int64_t total = kept_[expert];
        if (total == 0)
            continue;
        const int home = cell.home[expert];
        if (left_[expert] == total) {
            rows_.rows[home] += static_cast<double>(total);
            rows_.padded_rows[home] += padded_[expert];
            rows_.active_experts[home] += 1;
            rank_stays_[home] += stays_[expert];
        } else {
            add(home, left_[expert]);
        }
    }
    node_stays_.assign(nodes, 0);
    if (!counts(cell))
        nodes_stay(cell, plan);
    if (!counted)
        set_visits(rows_, rank_stays_, node_stays_, cell.tokens / static_cast<double>(ranks));
    if (counts(cell)) {
        rows_.nic_ingress = ingress_;
        rows_.nic_egress = egress_;
    }
    return rows_;
}

// Sums of `stays_away` per node, where the visits of nodes are not counted.
void CellPlanner::nodes_stay(const Cell &cell, const CellPlan &plan) {
    for (const Copy &copy : resident_)
        node_stays_[cell.node(copy.rank)] += stays_away(static_cast<double>(copy.quota) / cell.tokens);
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
        const auto total = static_cast<double>(kept_[expert]);
        const double kept = total - shared_[expert];
        if (total > 0)
            node_stays_[cell.node(cell.home[expert])] +=
                kept == total ? stays_[expert] : stays_away(kept / cell.tokens);
    }
}

void CellPlanner::consider(const Cell &cell, CellPlan &plan, CellPlan &best) {
    plan.time_s = searched_time(cell, plan);
    if (plan.time_s < best.time_s)
        best = plan;
}

// Seconds that no plan with these copies across goes below: the fullest node's ranks are level, and there are `inside`
// copies. A set of copies that this rules out needs no search inside nodes.
double CellPlanner::least_time(const Cell &cell, const std::vector<Copy> &across, int inside) {
    double rows = static_cast<double>(total_) / cell.ranks;
    for (const Domain &domain : domains_)
        if (!options_.cost.flat()) // a flat all-to-all asks for the mean rank's rows, too
            rows = std::max(rows, static_cast<double>(domain.total()) / cell.ranks_per_domain);
    count_.assign(2 * cell.ranks, 0);
    int most = 0;
    for (const Copy &copy : across)
        most = std::max({most, ++count_[copy.rank], ++count_[cell.ranks + cell.home[copy.expert]]});
    LayerRows at{.rows = {rows}, .padded_rows = {rows}, .active_experts = {0}, .rank_visits = {},
                 .nic_ingress = {}, .nic_egress = {}, .replicas = static_cast<double>(inside),
                 .cross_node_replicas = static_cast<double>(most)};
    if (!options_.cost.flat()) // so many rows are those of so many tokens at least, experts being independent choices
        at.rank_visits = {cell.tokens * -std::expm1(-rows / cell.tokens)};
    if (counts(cell)) {
        at.nic_ingress = ingress_;
        at.nic_egress = egress_;
    }
    return layer_time(options_.cost, at);
}

// By rows: the best exchange across nodes, levelled inside, against levelling alone. By time: every exchange that came
// out with fewer copies than the tighter ones, each with the slacks of RANK_SLACK_PPM, priced one by one, because a
// copy that no longer shortens the slowest rank by its own cost is worse than none. Doing nothing is the first
// candidate, so that a plan is never predicted slower than that.
void CellPlanner::plan(const Cell &cell, CellPlan &best) {
    prepare(cell);
    best = {};
    best.highest_load = highest_home_load();
    if (!options_.price) {
        cross_node_choices(cell);
        CellPlan across{.inside = {}, .across = choices_[0]};
        build_domains(cell, across.across);
        inside_nodes(cell, 0, across);
        if (across.highest_load < best.highest_load)
            best = across;
        const std::int64_t floor = divide_up(std::ranges::max(node_load_), cell.ranks_per_domain);
        if (!across.across.empty() && across.highest_load > floor) { // the copies from afar were in the way
            CellPlan inside{};
            build_domains(cell, {});
            inside_nodes(cell, 0, inside);
            if (inside.highest_load <= best.highest_load)
                best = inside;
        }
        return;
    }
    const bool counted_by_plan = options_.cost.flat(); // by searched_time
    if (!counted_by_plan)
        count_nodes(cell, {});
    best.time_s = searched_time(cell, best);
    if (total_ == 0)
        return;
    cross_node_choices(cell);
    CellPlan tried;
    for (const std::vector<Copy> &across : choices_) {
        tried.across = across;
        build_domains(cell, across);
        if (!across.empty()) {
            if (!counted_by_plan)
                count_nodes(cell, across);
            tried.inside.clear();
            tried.highest_load = 0;
            for (const Domain &domain : domains_)
                tried.highest_load = std::max(tried.highest_load, domain.highest_load());
            consider(cell, tried, best);
        }
        if (least_time(cell, across, 1) >= best.time_s)
            continue;
        for (const std::int64_t slack : RANK_SLACK_PPM) {
            inside_nodes(cell, slack, tried);
            if (!tried.inside.empty())
                consider(cell, tried, best);
        }
    }
}

} // namespace moe_rl
