// Which bin (node, or rank of a node) is home of which expert, for one layer and all micro-batches at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

// Inner loops that are worth an AVX2 form beside the portable one; chosen once, when the module is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MOE_RL_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define MOE_RL_VECTOR_CLONES
#endif

namespace moe_rl {

inline constexpr int STAGES = 64; // temperatures of a search

inline constexpr std::int64_t CHECKED_EVERY = 1024; // proposals between two looks at the clock

// A wall-clock limit; one that cut a search says so.
class Deadline {
  public:
    // seconds <= 0: no limit.
    explicit Deadline(double seconds)
        : limited_(seconds > 0),
          end_(std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                      std::chrono::duration<double>(limited_ ? seconds : 0))) {}

    bool reached() {
        if (limited_ && std::chrono::steady_clock::now() >= end_)
            cut_ = true;
        return cut_;
    }
    bool cut() const { return cut_; }

  private:
    bool limited_;
    std::chrono::steady_clock::time_point end_;
    std::atomic<bool> cut_{false};
};

// -ln of a uniform draw, in 1/65536: with it an integer threshold accepts as simulated annealing does.
struct AnnealingTables {
    const std::int32_t *neg_log; // [1024]
    const std::int64_t *visit; // [num_visit] probability, in 2^-20, to visit a bin that is avoided by exp(-i / 1024)
    std::int64_t num_visit;
};

struct ReorderProblem {
    int cells, experts, bins;
    const std::int32_t *rows;        // [E, cells]
    const std::int32_t *stays;       // [E, cells] -1024 ln(1 - share), or nullptr: visits cost nothing
    const std::int64_t *visit_cost;  // [cells] cost of a token visiting the busiest bin with probability 2^-20, scaled
    std::int64_t row_cost;           // cost of a row in the busiest bin
    const std::int32_t *current;     // [E] bin whose leaving costs `move_cost`; -1: free
    std::int64_t move_cost;
};

// Minimizes, over assignments with as many experts per bin as `bin_of` has, the sum over cells of the cost of the
// busiest bin, plus what moving costs. Starts from `bin_of` and leaves the best assignment there. Returns its cost.
std::int64_t reorder(const ReorderProblem &problem, const AnnealingTables &tables, std::int64_t iterations,
                     bool descend_only, std::uint64_t seed, Deadline &deadline, std::vector<std::int32_t> &bin_of);

// Longest processing time first with equal counts per bin: the start of the search when moving is free.
std::vector<std::int32_t> balanced_start(const ReorderProblem &problem);

} // namespace moe_rl
