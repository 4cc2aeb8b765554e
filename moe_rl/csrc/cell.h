// Replicas of one cell, that is of one (EP group, micro-batch, layer): first across nodes, then inside every node.
//
// In that order, because replicas inside a node cannot take a row out of it: with two nodes of two ranks that hold 100
// and 60 rows no plan inside nodes gets the busiest rank below 50, though the mean is 40. A copy that sends 20 rows to
// the other node brings both to 80, and the nodes then level their ranks to 40. A copy across nodes takes the NIC, on
// H100 seven times slower than NVLink (43 against 300 GB/s), so few are used and each has to earn its place.
#pragma once

#include <cstdint>
#include <vector>

#include "cost.h"
#include "domain.h"

namespace moe_rl {

struct ReplicateOptions {
    int slots = 1;             // R, foreign experts per rank from its own node
    int cross_slots = 0;       // C, the same from other nodes
    int spare_slots = 1;       // slots of a rank beside its home slots: at least R + C
    bool price = false;        // true: choose by layer_time; false: by the highest rank load
    bool reuse = false;        // keep the previous micro-batch's replicas where they still reach the target
    std::int64_t min_quota = 1;
    int search_nodes = 0;
    std::int64_t tolerance_ppm = 500;
    std::int64_t cross_gain_ppm = 3000; // node load that each cross-node copy must take off the highest, of the mean
    LayerCostParams cost{};
};

struct Cell {
    int ranks, ranks_per_domain, experts;
    const std::int64_t *rows; // [E]
    const std::int32_t *home; // [E] rank
    double tokens;            // on all source ranks together

    int domains() const { return ranks / ranks_per_domain; }
    int node(int rank) const { return rank / ranks_per_domain; }
};

struct CellPlan {
    std::vector<Copy> inside, across; // copies on ranks of the home's node, and of other nodes
    std::int64_t highest_load = 0;
    double time_s = 0, time_without_copies_s = 0; // by layer_time; only when priced
};

class CellPlanner {
  public:
    explicit CellPlanner(const ReplicateOptions &options) : options_(options) {}

    // `previous` is the plan of the micro-batch before, or nullptr.
    void plan(const Cell &cell, const CellPlan *previous, CellPlan &best);

    // Rows, visits and copies under a plan, as moe_rl/planner/predict.py counts them.
    const LayerRows &layer_rows(const Cell &cell, const CellPlan &plan);

  private:
    struct Exchange;

    void prepare(const Cell &cell);
    void cross_node_choices(const Cell &cell);
    bool cross_node_copies(const Cell &cell, std::int64_t target, std::vector<Copy> &copies);
    void build_domains(const Cell &cell, const std::vector<Copy> &across);
    void inside_nodes(const Cell &cell, std::int64_t slack_ppm, const CellPlan *previous, CellPlan &plan);
    void consider(const Cell &cell, CellPlan &plan, CellPlan &best);

    ReplicateOptions options_;
    std::vector<Domain> domains_;
    std::vector<std::int64_t> rank_load_, node_load_;
    std::int64_t total_ = 0;
    std::vector<std::vector<Copy>> choices_; // cross-node copies to try, fewest first
    std::vector<double> stays_;              // [E] stays_away of each expert's share of all tokens
    std::vector<std::int64_t> left_;
    std::vector<double> rank_stays_, node_stays_, shared_;
    std::vector<int> count_;
    LayerRows rows_;
};

} // namespace moe_rl
