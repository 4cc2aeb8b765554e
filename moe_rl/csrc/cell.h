// Replicas of one cell, that is of one (EP group, micro-batch, layer): first across nodes, then inside every node.
//
// In that order, because replicas inside a node cannot take a row out of it: with two nodes of two ranks that hold 100
// and 60 rows no plan inside nodes gets the busiest rank below 50, though the mean is 40. A copy that sends 20 rows to
// the other node brings both to 80, and the nodes then level their ranks to 40. A copy across nodes takes the NIC, on
// H100 seven times slower than NVLink (43 against 300 GB/s), so few are used and each has to earn its place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cost.h"
#include "domain.h"
#include "visits.h"

namespace moe_rl {

struct ReplicateOptions {
    int slots = 1;             // R, foreign experts per rank from its own node
    int cross_slots = 0;       // C, the same from other nodes
    int spare_slots = 1;       // slots of a rank beside its home slots: at least R + C
    bool price = false;        // true: choose by layer_time; false: by the highest rank load
    int search_nodes = 0;
    std::int64_t tolerance_ppm = 500;
    std::int64_t cross_gain_ppm = 3000; // node load that each cross-node copy must take off the highest, of the mean
    LayerCostParams cost{};
    int every = 1;         // plan one of so many micro-batches; the others get no copies and no time
    bool thorough = false; // for the plan that is kept: more drawn tokens, and copies across nodes are exchanged
};

struct CellPlan {
    std::vector<Copy> inside, across; // copies on ranks of the home's node, and of other nodes
    std::int64_t highest_load = 0;
    double time_s = 0; // by layer_time; only when priced
};

class CellPlanner {
  public:
    explicit CellPlanner(const ReplicateOptions &options) : options_(options) {}

    void plan(const Cell &cell, CellPlan &best);

    // Rows, visits and copies under a plan, as moe_rl/planner/predict.py counts them. Of the drawn tokens the visits of
    // nodes are those last counted (count_nodes); the visits of ranks, which cost little, are independent choices' unless
    // they are `counted` too, as rows always are.
    const LayerRows &layer_rows(const Cell &cell, const CellPlan &plan, bool counted = false);

    // Copies that stay for the step, in one layer: [nodes, ranks of a node * S] experts, -1 for none, best gain first.
    // `all` is the step as one cell; a copy has to save more than its one transfer costs.
    std::vector<std::int32_t> node_copies(const Cell &all, int slots);

    // All copies that serve the cell last planned, by (expert, rank): of residents those of their own node's pairs that do
    // not overload it.
    std::vector<Copy> served(const std::vector<Copy> &across, const std::vector<Copy> &inside) const;

    // Rows of the busiest rank of the cell last planned, without replicas.
    std::int64_t highest_home_load() const { return std::ranges::max(rank_load_); }

    // The time of a plan whose copies take source_quota [copies, P], every visit or row counted.
    double counted_time(const Cell &cell, const CellPlan &plan, const std::vector<Copy> &copies,
                        const std::vector<std::int32_t> &source_quota);

  private:
    struct Exchange;

    void prepare(const Cell &cell);
    void cross_node_choices(const Cell &cell);
    void count_nodes(const Cell &cell, const std::vector<Copy> &across);
    void take_visits(const Cell &cell, const Visits &visits, double each);
    double searched_time(const Cell &cell, const CellPlan &plan);
    const Visits &count(const Cell &cell, const std::vector<Copy> &copies, const std::vector<std::int32_t> &source_quota,
                        bool of_ranks);
    bool counts(const Cell &cell) const { return options_.cost.flat() || cell.drawn.count > 0; }
    // What one of those counted stands for, in tokens or rows of the cell.
    double counted_as(const Cell &cell) const {
        return options_.cost.flat() ? 1.0 : cell.tokens / static_cast<double>(cell.drawn.count);
    }
    void follow_tokens(const Cell &cell);
    void serve_residents(const Cell &cell);
    std::vector<Copy> spread_copies(const Cell &cell, int most_sent, std::vector<std::int32_t> held, double &cost_s) const;
    void home_copies(const Cell &cell, int most_sent, std::int64_t least_gain, Exchange &exchange);
    std::vector<std::int64_t> foreign_rows(const Cell &cell) const;
    void level_nodes(const Cell &cell, std::vector<std::int64_t> foreign, std::vector<Copy> &copies,
                     std::vector<std::int64_t> &node_load, std::vector<std::int64_t> &left) const;
    bool cross_node_copies(const Cell &cell, std::int64_t target, std::vector<Copy> &copies);
    void build_domains(const Cell &cell, const std::vector<Copy> &across);
    void inside_nodes(const Cell &cell, std::int64_t slack_ppm, CellPlan &plan);
    double padded(double rows) const;
    void nodes_stay(const Cell &cell, const CellPlan &plan);
    double least_time(const Cell &cell, const std::vector<Copy> &across, int inside);
    void consider(const Cell &cell, CellPlan &plan, CellPlan &best);

    ReplicateOptions options_;
    std::vector<Domain> domains_;
    std::vector<std::int64_t> rank_load_, node_load_;
    std::vector<Copy> resident_;
    std::vector<std::int64_t> kept_; // [E] rows that residents leave to the home
    std::int64_t total_ = 0;
    std::vector<std::vector<Copy>> choices_; // cross-node copies to try, fewest first
    std::vector<double> stays_;              // [E] stays_away of each expert's share of all tokens
    std::vector<double> padded_;             // [E] rows that residents leave, padded
    std::vector<int> order_;                 // nodes, the fullest first
    std::vector<std::vector<Copy>> of_node_; // copies inside each
    std::vector<std::int64_t> left_;
    std::vector<double> rank_stays_, node_stays_, shared_;
    std::vector<int> count_;
    LayerRows rows_;
    VisitCounter counter_;
    RowCounter row_counter_;
    std::vector<std::int32_t> quota_;
    std::vector<double> ingress_, egress_; // of nodes, or of ranks that send rows, counted
    // Of follow_tokens: [N, E] rows and gains, [drawn, N] experts of a token on a node, tokens by (node, expert).
    std::vector<std::int64_t> from_node_, first_gain_, gain_, worth_;
    std::vector<std::uint8_t> remote_, away_;
    std::vector<std::int32_t> first_choice_, next_choice_;
};

// Returns [P, S]: what each rank of a node holds of its node's copies `held` (CellPlanner::node_copies).
std::vector<std::int32_t> seated(const Cell &all, int slots, const std::vector<std::int32_t> &held);

// Deals the rows of every copied expert to its copies and its home: quota [copies, P]. Copies of an expert stand together.
// Rows stay on their rank where they can, then on their node, then go in ascending order of source. With `share_remote` the
// instances of a node share its rows by their quotas, so that rows from other nodes come to each in proportion: where every
// rank has its own NIC, none waits for all of them.
void split_sources(const Cell &cell, const std::vector<Copy> &copies, std::vector<std::int32_t> &source_quota,
                   bool share_remote = false);

// Exchanges copies, held [nodes, slots] with -1 for none, by what the busiest node has to send or receive and to compute.
// `rows` [N, E] are those that a copy would keep on its node, `fixed` [N] what nodes compute besides; no home sends more
// than `most_sent` copies. Returns seconds of the busiest node, were it a single rank.
double exchange_copies(const Cell &cell, const LayerCostParams &cost, const std::vector<std::int64_t> &rows,
                     const std::vector<std::int32_t> &fixed, int most_sent, std::vector<std::int32_t> &held);

// Copies on other nodes than their home's give rows back, all but one, or take them again, up to what they came
// with, so that the fullest node and the busiest NIC together cost least. `rows` [N, E] are those that nodes send to
// experts, `residents` serve theirs already. `node_load` [N] follows.
void level_copies(const Cell &cell, const LayerCostParams &cost, const std::vector<Copy> &residents,
                  const std::vector<std::int64_t> &rows, std::vector<Copy> &copies,
                  std::vector<std::int64_t> &node_load);

} // namespace moe_rl
