// The inner loops of Travel (travel.h): over words of tokens and over pools, once for every width of vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace moe_rl {

// The words of one node's tokens, when one expert leaves another node and one comes to it.
struct CountPass {
    const std::uint64_t *any, *once;     // of the node that they may visit
    const std::uint64_t *leaves, *comes; // of the experts that leave it and come to it
    std::span<const std::int32_t> pools_of_row;
    int pools, words;
    bool deduplicated;
};

// The words first .. last - 1 of the tokens that may visit a node, which loses an expert and gets one.
struct RecountPass {
    const std::uint64_t *leaves, *comes; // tokens of the two experts
    std::uint64_t *held;                 // [planes, words] experts there of each token, in binary
    int planes;
    std::size_t words, first, last;
    std::uint64_t *any, *once; // [words] tokens with an expert there, with exactly one
};

// What a node of a proposal is sent by every node, [nodes, stride].
struct VisitorChange {
    int node; // -1: no such node
    const std::int32_t *after, *before;
};

// Pools are read in whole vectors: those from `pools` to `stride` have no tokens and cost nothing.
struct BusiestPass {
    const std::int64_t *copy_cost;  // [stride]
    const std::int32_t *into, *out; // [nodes, stride] copies into and out of every node
    int nodes, pools, stride;
    VisitorChange a, b;
};

struct TravelPasses {
    std::string_view name;
    // visitors [pools] = those from one node. A token stays a visitor when another expert of it remains: `once` has the
    // tokens with exactly one. Without deduplication a token is a visitor for every expert, and visitors change.
    void (*count)(const CountPass &pass, std::int32_t *visitors);
    // Adds `comes` to the counts of `held`, takes `leaves` off, and sets `any` and `once` by them.
    void (*recount)(const RecountPass &pass);
    // Returns the cost of copies into, or out of, the busiest node of every pool once the visitors of two nodes changed.
    std::int64_t (*busiest)(const BusiestPass &pass);
};

// Those that this machine can run, the fastest first. All return the same.
const std::vector<TravelPasses> &travel_passes();
// The one in use: the fastest, unless a test chose another one.
const TravelPasses &travel_passes_in_use();
// Throws `std::invalid_argument` if the machine has none of that name.
void use_travel_passes(std::string_view name);

inline constexpr int WIDEST_POOLS = 16; // pools in the widest vector: the stride of pools is a multiple of it

} // namespace moe_rl
