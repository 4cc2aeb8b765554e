// Counts token-expert pairs: rows of expert ids -> pairs[block, layer, source, expert].
//
// Increments go to a narrow table [L, E] that stays in the first-level cache (12 KiB at 48 layers and 128 experts) and is
// added to the output once per piece of rows. Integer sums do not depend on their order, so the
// result does not depend on the number of threads.

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

#include "bindings.h"
#include "parallel.h"

namespace {

using namespace moe_rl;

using Count = std::uint16_t;

constexpr std::int64_t PIECE_ROWS = 2048;    // work that a thread takes at a time
constexpr std::int64_t CHECKED_BYTES = 8192; // ids whose range is checked just before they are counted, while in cache
constexpr std::size_t NUM_LOCKS = 64;

// Rows first .. last - 1, all held by source rank `block % P` of (EP group, micro-batch) `block / P`.
struct Piece {
    std::int64_t first, last, block;
};

struct Shape {
    std::int64_t layers, sources, experts, top_k;
};

std::vector<Piece> cut_into_pieces(const std::int64_t *segment_start, const std::int64_t *segment_block,
                                   std::size_t num_segments, std::int64_t top_k) {
    // A malformed row may name one expert K times; no count of a piece may exceed what a table entry holds.
    const std::int64_t rows = std::max<std::int64_t>(
        1, std::min<std::int64_t>(PIECE_ROWS, std::numeric_limits<Count>::max() / top_k));
    std::vector<Piece> pieces;
    for (std::size_t segment = 0; segment < num_segments; ++segment)
        for (std::int64_t first = segment_start[segment]; first < segment_start[segment + 1]; first += rows)
            pieces.push_back({first, std::min(segment_start[segment + 1], first + rows), segment_block[segment]});
    return pieces;
}

template <class Id> std::int64_t first_id_not_below(const Id *ids, std::int64_t size, std::int64_t limit) {
    Id highest = 0;
    for (std::int64_t i = 0; i < size; ++i) // plain maximum first: it vectorises, a search does not
        highest = std::max(highest, ids[i]);
    if (highest < limit)
        return -1;
    return std::find_if(ids, ids + size, [limit](Id id) { return id >= limit; }) - ids;
}

// TOP_K: K where it is known at compile time, so that the innermost loop is unrolled; 0 where it is not.
template <int TOP_K, class Id>
void count_rows(const Id *ids, std::int64_t num_rows, const Shape &shape, Count *table) {
    const std::int64_t layers = shape.layers, experts = shape.experts, top_k = TOP_K ? TOP_K : shape.top_k;
    for (std::int64_t row = 0; row < num_rows; ++row) {
        Count *layer_table = table;
        for (std::int64_t layer = 0; layer < layers; ++layer, layer_table += experts)
            for (std::int64_t k = 0; k < top_k; ++k)
                ++layer_table[*ids++];
    }
}

template <class Id> void count_rows(const Id *ids, std::int64_t num_rows, const Shape &shape, Count *table) {
    switch (shape.top_k) {
    case 2:
        return count_rows<2>(ids, num_rows, shape, table);
    case 4:
        return count_rows<4>(ids, num_rows, shape, table);
    case 6:
        return count_rows<6>(ids, num_rows, shape, table);
    case 8:
        return count_rows<8>(ids, num_rows, shape, table);
    case 10:
        return count_rows<10>(ids, num_rows, shape, table);
    default:
        return count_rows<0>(ids, num_rows, shape, table);
    }
}

// One call of add_routes, shared by its threads.
template <class Id> struct Job {
    const Id *routes;
    const bool *valid;
    std::int32_t *pairs;
    Shape shape;
    std::array<std::mutex, NUM_LOCKS> locks{};

    // Counts a piece; returns its first row with an id that there is not, or -1.
    std::int64_t count(const Piece &piece) {
        const std::int64_t row_ids = shape.layers * shape.top_k;
        const std::int64_t checked_rows = std::max<std::int64_t>(1, CHECKED_BYTES / (row_ids * std::int64_t{sizeof(Id)}));
        std::vector<Count> table(shape.layers * shape.experts);
        for (std::int64_t row = piece.first; row < piece.last;) {
            if (!valid[row]) {
                ++row;
                continue;
            }
            std::int64_t end = row + 1;
            while (end < piece.last && end - row < checked_rows && valid[end])
                ++end;
            const Id *ids = routes + row * row_ids;
            const std::int64_t bad = first_id_not_below(ids, (end - row) * row_ids, shape.experts);
            if (bad >= 0)
                return row + bad / row_ids;
            count_rows(ids, end - row, shape, table.data());
            row = end;
        }
        add(table.data(), piece.block);
        return -1;
    }

    void add(const Count *counts, std::int64_t block) {
        const std::int64_t layer_stride = shape.sources * shape.experts;
        std::int32_t *out = pairs + (block / shape.sources) * shape.layers * layer_stride +
                            (block % shape.sources) * shape.experts;
        const std::lock_guard guard(locks[static_cast<std::size_t>(block) % NUM_LOCKS]);
        for (std::int64_t layer = 0; layer < shape.layers; ++layer, out += layer_stride, counts += shape.experts)
            for (std::int64_t expert = 0; expert < shape.experts; ++expert)
                out[expert] += counts[expert];
    }
};

template <class Id>
std::int64_t add_routes(Array<std::int32_t, 4> pairs, Array<const Id, 3> routes, Array<const bool, 1> valid,
                        Array<const std::int64_t, 1> segment_start, Array<const std::int64_t, 1> segment_block,
                        int num_threads) {
    const auto num_rows = static_cast<std::int64_t>(routes.shape(0));
    const std::size_t num_segments = segment_block.shape(0);
    const auto num_blocks = static_cast<std::int64_t>(pairs.shape(0) * pairs.shape(2));
    check(routes.shape(1) == pairs.shape(1), "routes and pairs differ in their layers");
    check(routes.shape(2) >= 1, "routes hold no expert per token");
    check(valid.shape(0) == routes.shape(0), "valid must have one entry per row");
    check(segment_start.shape(0) == num_segments + 1, "segment_start must have one entry more than segment_block");
    check(num_threads >= 0, "num_threads must not be negative");
    for (std::size_t segment = 0; segment < num_segments; ++segment)
        check(segment_start(segment) <= segment_start(segment + 1) && segment_block(segment) >= 0 &&
                  segment_block(segment) < num_blocks,
              "segments must ascend and name blocks that pairs has");
    check(segment_start(0) >= 0 && segment_start(num_segments) <= num_rows, "segments must lie inside the rows");

    const auto size = [](std::size_t of) { return static_cast<std::int64_t>(of); };
    Job<Id> job{routes.data(), valid.data(), pairs.data(),
                {size(pairs.shape(1)), size(pairs.shape(2)), size(pairs.shape(3)), size(routes.shape(2))}};
    const std::vector<Piece> pieces = cut_into_pieces(segment_start.data(), segment_block.data(), num_segments, job.shape.top_k);
    std::vector<std::int64_t> bad_rows(pieces.size());
    const nb::gil_scoped_release no_gil;
    parallel_for(std::ssize(pieces), num_threads, [&](std::int64_t piece) { bad_rows[piece] = job.count(pieces[piece]); });
    const auto bad = std::find_if(bad_rows.begin(), bad_rows.end(), [](std::int64_t row) { return row >= 0; });
    return bad == bad_rows.end() ? -1 : *bad;
}

// upto [E] = the pairs of the first `stop` of a sequence's `length` tokens, its counts shared out evenly and rounded.
MOE_RL_VECTOR_CLONES void share_out(const std::int32_t *counts, std::int64_t stop, std::int64_t length,
                                    std::int64_t experts, std::int32_t *upto) {
    constexpr std::int64_t EXACT_LENGTH = 1 << 21; // up to which a quotient of doubles is never rounded to a whole number
    if (stop == length)
        std::copy(counts, counts + experts, upto);
    else if (length <= EXACT_LENGTH)
        for (std::int64_t expert = 0; expert < experts; ++expert)
            upto[expert] = static_cast<std::int32_t>(
                (static_cast<double>(counts[expert]) * static_cast<double>(stop) + static_cast<double>(length / 2)) /
                static_cast<double>(length));
    else
        for (std::int64_t expert = 0; expert < experts; ++expert)
            upto[expert] = static_cast<std::int32_t>((counts[expert] * stop + length / 2) / length);
}

void add_sequences(Array<std::int32_t, 4> pairs, Array<const std::int32_t, 3> sequence_load,
                   Array<const std::int32_t, 1> row, Array<const std::int64_t, 1> lengths, Array<const std::int64_t, 1> sequence,
                   Array<const std::int64_t, 1> block, Array<const std::int64_t, 1> stop) {
    const auto layers = static_cast<std::int64_t>(pairs.shape(1)), sources = static_cast<std::int64_t>(pairs.shape(2));
    const auto experts = static_cast<std::int64_t>(pairs.shape(3)), pieces = static_cast<std::int64_t>(sequence.shape(0));
    const auto sequences = static_cast<std::int64_t>(row.shape(0));
    check(static_cast<std::int64_t>(sequence_load.shape(1)) == layers &&
              static_cast<std::int64_t>(sequence_load.shape(2)) == experts,
          "sequence_load and pairs differ in their layers or experts");
    check(lengths.shape(0) == row.shape(0), "every sequence needs a length");
    for (std::int64_t of = 0; of < sequences; ++of)
        check(row(of) >= 0 && static_cast<std::size_t>(row(of)) < sequence_load.shape(0),
              "a sequence has counts outside sequence_load");
    check(block.shape(0) == sequence.shape(0) && stop.shape(0) == sequence.shape(0),
          "every piece needs a block and an end");
    for (std::int64_t piece = 0; piece < pieces; ++piece)
        check(sequence(piece) >= 0 && sequence(piece) < sequences && stop(piece) > 0 &&
                  stop(piece) <= lengths(sequence(piece)) && block(piece) >= 0 &&
                  block(piece) < static_cast<std::int64_t>(pairs.shape(0)) * sources,
              "a piece lies outside its sequence, or its block outside pairs");
    const nb::gil_scoped_release no_gil;
    parallel_for(layers, 0, [&](std::int64_t layer) {
        std::vector<std::int32_t> upto(experts), given(experts);
        for (std::int64_t piece = 0; piece < pieces; ++piece) {
            const std::int64_t of = sequence(piece), cell = block(piece) / sources, source = block(piece) % sources;
            if (piece == 0 || of != sequence(piece - 1))
                std::fill(given.begin(), given.end(), 0);
            share_out(sequence_load.data() + (row(of) * layers + layer) * experts, stop(piece), lengths(of), experts,
                      upto.data());
            std::int32_t *to = pairs.data() + ((cell * layers + layer) * sources + source) * experts;
            for (std::int64_t expert = 0; expert < experts; ++expert)
                to[expert] += upto[expert] - given[expert];
            given.swap(upto);
        }
    });
}

template <class Id> void bind_add_routes(nb::module_ &module, const char *doc) {
    module.def("add_routes", &add_routes<Id>, nb::arg("pairs").noconvert(), nb::arg("routes").noconvert(),
               nb::arg("valid").noconvert(), nb::arg("segment_start").noconvert(), nb::arg("segment_block").noconvert(),
               nb::arg("num_threads"), doc);
}

} // namespace

void bind_reduce(nb::module_ &module) {
    constexpr const char *DOC =
        "Add the token-expert pairs of the valid rows of routes [n, L, K] to pairs [G * M, L, P, E].\n\n"
        "Rows segment_start[i] .. segment_start[i + 1] - 1 belong to block segment_block[i] = (g * M + m) * P + p. "
        "num_threads 0 means all cores. Returns the first row with an id outside 0 .. E - 1, or -1; after such a row "
        "the counts are not to be used.";
    bind_add_routes<std::uint8_t>(module, DOC);
    bind_add_routes<std::uint16_t>(module, DOC);
    module.def("add_sequences", &add_sequences, nb::arg("pairs").noconvert(), nb::arg("sequence_load").noconvert(),
               nb::arg("row").noconvert(), nb::arg("lengths").noconvert(), nb::arg("sequence").noconvert(),
               nb::arg("block").noconvert(), nb::arg("stop").noconvert(),
               "Add sequences to pairs [G * M, L, P, E]; sequence s has the counts row[s] of sequence_load [U, L, E].\n\n"
               "Piece i ends at token stop[i] of sequence[i], where its next piece starts, and belongs to block[i] = "
               "(g * M + m) * P + p. A piece takes its share of every count, rounded so that a sequence keeps its own.");
}
