#include "visits.h"

#include <algorithm>

#include "parallel.h"

namespace moe_rl {

namespace {

constexpr int WORD = 64;

// times [bits] = how many of the words have each bit.
MOE_RL_VECTOR_CLONES void count_bits(const std::uint64_t *words, std::int64_t count, int bits, std::int64_t *times) {
    for (int bit = 0; bit < bits; ++bit) {
        std::uint64_t sum = 0;
        for (std::int64_t i = 0; i < count; ++i)
            sum += words[i] >> bit & 1;
        times[bit] = static_cast<std::int64_t>(sum);
    }
}

// Adds the copies of tokens from each node to each one, [N, N], its own included.
MOE_RL_VECTOR_CLONES void count_ways(const std::uint64_t *visited, const std::int32_t *source,
                                     const std::int32_t *node_of, std::int64_t count, int nodes, int stride,
                                     std::int64_t *between) {
    for (std::int64_t i = 0; i < count; ++i) {
        std::int64_t *to = between + static_cast<std::int64_t>(node_of[source[i]]) * stride;
        const std::uint64_t bits = visited[i];
        for (int node = 0; node < nodes; ++node)
            to[node] += static_cast<std::int64_t>(bits >> node & 1);
    }
}

// visited [count] = the places [E] of each token's experts.
template <int TOP_K>
void join_places(const TokenRoutes &tokens, const std::uint64_t *places, std::uint64_t *visited) {
    const int top_k = TOP_K ? TOP_K : tokens.top_k;
    for (std::int64_t i = 0; i < tokens.count; ++i) {
        const std::uint16_t *routes = tokens.routes + tokens.token[i] * top_k;
        std::uint64_t bits = 0;
        for (int k = 0; k < top_k; ++k)
            bits |= places[routes[k]];
        visited[i] = bits;
    }
}

} // namespace

// A token goes to a rank (and between nodes over the network) once, however many of its experts are there: what it
// visits is a set of bits. Which instance serves a pair follows core.plan.slot_map: the pairs of a source rank and an
// expert are dealt in the order of their tokens, each instance taking its quota, the home the rest. Drawn tokens stand
// for all, so quotas are shares: the third of five drawn pairs, of 100 that there are, is the one at 50 of them.
void VisitCounter::count(const Cell &cell, const std::vector<Served> &instances, bool of_ranks) {
    const TokenRoutes &tokens = cell.drawn;
    const int ranks = cell.ranks, nodes = cell.domains(), places = nodes + (of_ranks ? ranks : 0);
    words_ = static_cast<std::size_t>((places + WORD - 1) / WORD);
    place_.assign(static_cast<std::size_t>(ranks) * words_, 0);
    const auto mark = [&](int rank, int place) {
        place_[static_cast<std::size_t>(rank) * words_ + place / WORD] |= std::uint64_t{1} << (place % WORD);
    };
    node_.resize(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
        node_[rank] = cell.node(rank);
        mark(rank, node_[rank]);
        if (of_ranks)
            mark(rank, nodes + rank);
    }
    has_instances_.assign(cell.experts, 0);
    for (const Served &instance : instances)
        has_instances_[instance.expert] = 1;
    visit_homes(cell);
    if (!instances.empty())
        visit_instances(cell, instances);

    visits_.between.assign(static_cast<std::size_t>(nodes) * nodes, 0);
    for (int first = 0; first < nodes; first += WORD)
        count_ways(visited_.data() + first / WORD * tokens.count, tokens.source, node_.data(), tokens.count,
                   std::min(WORD, nodes - first), nodes, visits_.between.data() + first);
    for (int node = 0; node < nodes; ++node)
        visits_.between[static_cast<std::size_t>(node) * nodes + node] = 0;
    visits_.ranks.assign(ranks, 0);
    if (!of_ranks)
        return;
    times_.resize(words_ * WORD);
    for (std::size_t word = 0; word < words_; ++word)
        count_bits(visited_.data() + word * tokens.count, tokens.count,
                   std::min(WORD, places - static_cast<int>(word) * WORD), times_.data() + word * WORD);
    std::copy(times_.begin() + nodes, times_.begin() + places, visits_.ranks.begin());
}

// What tokens visit for experts without instances, and the list of the other pairs.
void VisitCounter::visit_homes(const Cell &cell) {
    const TokenRoutes &tokens = cell.drawn;
    const int experts = cell.experts;
    at_home_.resize(words_ * experts);
    for (int expert = 0; expert < experts; ++expert)
        for (std::size_t word = 0; word < words_; ++word)
            at_home_[word * experts + expert] =
                has_instances_[expert] ? 0 : place_[static_cast<std::size_t>(cell.home[expert]) * words_ + word];
    visited_.resize(words_ * tokens.count);
    for (std::size_t word = 0; word < words_; ++word) {
        const std::uint64_t *places = at_home_.data() + word * experts;
        std::uint64_t *visited = visited_.data() + word * tokens.count;
        tokens.top_k == 8   ? join_places<8>(tokens, places, visited)
        : tokens.top_k == 4 ? join_places<4>(tokens, places, visited)
                            : join_places<0>(tokens, places, visited);
    }
}

void VisitCounter::visit_instances(const Cell &cell, const std::vector<Served> &instances) {
    const TokenRoutes &tokens = cell.drawn;
    const int ranks = cell.ranks, experts = cell.experts;
    const std::int32_t *pairs = cell.pairs, *home = cell.home;
    // Whether a pair has instances is as good as random: written always, kept or not, it costs no wrong guess.
    shared_.resize(tokens.count * tokens.top_k + 1);
    Shared *last = shared_.data();
    const std::uint8_t *has_instances = has_instances_.data();
    for (std::int64_t i = 0; i < tokens.count; ++i) {
        const std::uint16_t *routes = tokens.experts(i);
        const int source = tokens.source[i];
        for (int k = 0; k < tokens.top_k; ++k) {
            const int expert = routes[k];
            *last = {static_cast<std::int32_t>(i), expert, source};
            last += has_instances[expert];
        }
    }
    first_.assign(experts, -1);
    next_.resize(instances.size());
    slot_.resize(experts);
    std::size_t replicated = 0;
    for (std::size_t i = instances.size(); i-- > 0;) {
        std::int32_t &first = first_[instances[i].expert];
        if (first < 0)
            slot_[instances[i].expert] = static_cast<std::int32_t>(replicated++);
        next_[i] = first;
        first = static_cast<std::int32_t>(i);
    }
    held_.assign(replicated * ranks, 0);
    dealt_.assign(held_.size(), 0);
    const std::int32_t *first = first_.data(), *following = next_.data(), *slot = slot_.data();
    const auto place_of = [=](const Shared &pair) {
        return static_cast<std::ptrdiff_t>(slot[pair.expert]) * ranks + pair.source;
    };
    std::int32_t *held = held_.data(), *dealt = dealt_.data();
    for (const Shared *pair = shared_.data(); pair != last; ++pair)
        ++held[place_of(*pair)];
    for (const Shared *pair = shared_.data(); pair != last; ++pair) {
        const std::ptrdiff_t at = place_of(*pair);
        const std::int64_t position =
            (2 * std::int64_t{dealt[at]++} + 1) * pairs[static_cast<std::int64_t>(pair->source) * experts + pair->expert];
        const std::int64_t all = 2 * std::int64_t{held[at]};
        std::int64_t quota = 0;
        int rank = home[pair->expert];
        bool open = true;
        for (std::int32_t next = first[pair->expert]; next >= 0; next = following[next]) {
            quota += instances[next].quota[pair->source];
            const bool served = open & (position < quota * all);
            rank = served ? instances[next].rank : rank;
            open &= !served;
        }
        const std::uint64_t *places = place_.data() + static_cast<std::size_t>(rank) * words_;
        for (std::size_t word = 0; word < words_; ++word)
            visited_[word * tokens.count + pair->token] |= places[word];
    }
}

void RowCounter::start(const Cell &cell) {
    at_home_.assign(static_cast<std::size_t>(cell.ranks) * cell.ranks, 0);
    for (int source = 0; source < cell.ranks; ++source)
        for (int expert = 0; expert < cell.experts; ++expert)
            at_home_[static_cast<std::size_t>(source) * cell.ranks + cell.home[expert]] += cell.pairs[cell.at(source, expert)];
}

void RowCounter::count(const Cell &cell, const std::vector<Served> &instances) {
    const int ranks = cell.ranks, nodes = cell.domains();
    sent_ = at_home_;
    for (const Served &instance : instances)
        for (int source = 0; source < ranks; ++source) {
            std::int64_t *to = sent_.data() + static_cast<std::size_t>(source) * ranks;
            to[cell.home[instance.expert]] -= instance.quota[source];
            to[instance.rank] += instance.quota[source];
        }
    visits_.ranks.assign(ranks, 0);
    visits_.between.assign(static_cast<std::size_t>(nodes) * nodes, 0);
    visits_.nics.assign(2 * static_cast<std::size_t>(ranks), 0);
    std::vector<std::int64_t> into(ranks, 0);
    for (int source = 0; source < ranks; ++source)
        for (int rank = 0; rank < ranks; ++rank) {
            const std::int64_t rows = sent_[static_cast<std::size_t>(source) * ranks + rank];
            const int from = cell.node(source), to = cell.node(rank);
            if (from != to) {
                visits_.between[static_cast<std::size_t>(from) * nodes + to] += rows;
                visits_.nics[rank] += rows;
                visits_.nics[ranks + source] += rows;
            } else if (source != rank) {
                visits_.ranks[source] += rows;
                into[rank] += rows;
            }
        }
    for (int rank = 0; rank < ranks; ++rank)
        visits_.ranks[rank] = std::max(visits_.ranks[rank], into[rank]);
}

} // namespace moe_rl
