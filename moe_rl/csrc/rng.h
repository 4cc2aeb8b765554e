// The one random generator of the planner: SplitMix64 (Steele, Lea, Flood 2014), the same bits on every machine.
#pragma once

#include <cstdint>

namespace moe_rl {

class Rng {
  public:
    explicit Rng(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        return z ^ (z >> 31);
    }

    // 0 .. bound - 1; the bias of 2^-32 per value is of no consequence in a search.
    std::int64_t below(std::int64_t bound) {
        return static_cast<std::int64_t>(((next() >> 32) * static_cast<std::uint64_t>(bound)) >> 32);
    }

  private:
    std::uint64_t state_;
};

// A generator for one of many independent searches: stream i of seed s does not depend on the order they run in.
inline Rng stream(std::uint64_t seed, std::uint64_t index) {
    return Rng(Rng(seed * 0x9e3779b97f4a7c15ULL + index).next());
}

} // namespace moe_rl
