// How the core uses all cores, and the width of their vectors.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

// Inner loops that are worth wider forms beside the portable one; chosen once, when the module is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MOE_RL_HAS_VECTOR_CLONES
#define MOE_RL_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MOE_RL_VECTOR_CLONES
#endif

namespace moe_rl {

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

} // namespace moe_rl
