// Vectors that start on a cache line: wide loads of rows of whole lines then touch one line each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace moe_rl {

template <class Value> struct CacheLines {
    using value_type = Value;
    static constexpr std::align_val_t LINE{64};

    CacheLines() = default;
    template <class Other> CacheLines(const CacheLines<Other> &) {}

    Value *allocate(std::size_t count) { return static_cast<Value *>(::operator new(count * sizeof(Value), LINE)); }
    void deallocate(Value *values, std::size_t) { ::operator delete(values, LINE); }
    bool operator==(const CacheLines &) const = default;
};

template <class Value> using Aligned = std::vector<Value, CacheLines<Value>>;

} // namespace moe_rl
