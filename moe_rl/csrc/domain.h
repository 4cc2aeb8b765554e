// Replication inside one domain (a node): which experts get an instance on which rank, and how many rows it takes.
//
// The problem: ranks with home experts and rows on them; every rank may take R foreign experts; no rank may compute
// more than a target of rows. Each *method* below is a greedy test of one target; the first that meets it counts.
// Home experts never move, and a foreign instance is never exported again, so a plan has at most ranks * R copies.
//
// A method fills one hole after another from the busiest rank, also beyond that rank's excess: three ranks of 70, 70 and
// 40 rows, one slot each, mean 60. If the first gave only its excess of 10 to the third, whose one slot is then gone, the
// second would find nobody with room and a slot. So the third takes 20 at once from the first, which falls to 50 and is
// now itself a receiver; the second gives it 10. All have 60.
//
// Two methods, because the second saves 4 % of the copies (11.2 against 11.7 per layer, development trace, EP16). Where
// both fail a search goes back and forth: without it the worst of 100 small cases is 1.5 % above the optimum, with it
// 0.03 %. Three more methods (each rank gives its excess to the widest or the tightest hole; holes are filled up to the
// excess alone) changed nothing of that, and no step by more than 0.04 %.
//
// planner/reference.py is the same idea with one method, to read first.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_rl {

struct Copy {
    int expert;         // as the caller numbers experts
    int rank;           // as the caller numbers ranks
    std::int64_t quota; // rows taken
    enum Kind { INSIDE, ACROSS, RESIDENT } kind = INSIDE; // of a node; from another node, for one cell or the step
    bool operator==(const Copy &) const = default;
};

enum class Method {
    USEFUL, // most useful relief first
    EXACT,  // exact fills first, largest hole first
};
inline constexpr int NUM_METHODS = 2;

struct Limits {
    int slots = 1;                // R
    int search_nodes = 0;         // steps of the backtracking search after all methods failed; 0 switches it off
    std::int64_t tolerance = 1;   // rows of target between which the search does not tell apart
};

class Domain {
  public:
    // Starts a domain of `ranks` ranks; then `add` its experts in any order, then `finish`.
    void reset(int ranks);
    void add(int expert, int local_rank, std::int64_t rows) { added_.push_back({expert, local_rank, rows}); }
    void add_fixed(int local_rank, std::int64_t rows) { home_load_[local_rank] += rows; }
    void finish();

    std::int64_t total() const { return total_; }
    std::int64_t highest_load() const { return highest_; }
    // A target below which no plan with these limits can go.
    std::int64_t lower_bound(const Limits &limits) const;

    // Tests one target with every method in turn; on success `copies` (local ranks) holds the plan.
    bool first_feasible(std::int64_t target, const Limits &limits, std::vector<Copy> &copies);
    // The fewest copies that the methods find for a target that is known to be feasible; `copies` holds such a plan.
    void fewest_copies(std::int64_t target, const Limits &limits, std::vector<Copy> &copies);
    // The lowest target >= `floor` that the portfolio finds; `copies` holds its plan.
    std::int64_t lowest_target(std::int64_t floor, const Limits &limits, std::vector<Copy> &copies);

  private:
    struct Item {
        int expert, rank;
        std::int64_t rows;
    };
    struct Pair {
        std::int64_t score, quota;
        int item, rank;
    };

    void start(int slots);
    void move(int item, int rank, std::int64_t quota);
    void undo_move();
    bool attempt(Method method, std::int64_t target, const Limits &limits, std::size_t fewer_than);
    void take(std::vector<Copy> &copies) const;
    void update_receiver(int rank, std::int64_t target);
    bool backtrack(std::int64_t target, int &nodes_left);
    int item_for(int donor, int receiver, std::int64_t hole) const;
    // Whether a rank with a free slot has a copy of the expert: never where it had one slot to begin with.
    bool holds(int item, int rank) const {
        return !holds_.empty() && holds_[static_cast<std::size_t>(item) * ranks_ + rank] != 0;
    }

    int ranks_ = 0;
    std::int64_t total_ = 0, highest_ = 0, largest_item_ = 0;
    std::vector<Item> added_;               // experts by (rank, rows descending, index)
    std::vector<int> first_;                // [ranks + 1] where each rank's experts start in added_
    std::vector<std::int64_t> home_load_;   // [ranks]
    std::vector<int> donors_;               // ranks by load descending

    // State of the attempt in progress.
    std::vector<std::int64_t> load_, left_; // rows on each rank; rows of each expert still at home
    std::vector<int> slots_;
    std::vector<std::uint8_t> holds_;       // [experts, ranks]; empty where ranks have one slot at most
    std::vector<int> receivers_, above_;    // ranks with room and a slot; those above the target, the busiest first
    std::vector<Copy> moves_;               // expert = index into added_
    std::vector<Item> sorted_;
    std::vector<int> next_;
    std::vector<std::int64_t> holes_;       // of `receivers_`

    // The target that first_feasible met last, and the method that did; the ones before it fail there.
    std::int64_t met_target_ = -1;
    int met_by_ = -1;
};

} // namespace moe_rl
