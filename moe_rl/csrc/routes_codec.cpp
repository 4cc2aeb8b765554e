// Puts the decoder of routes (routes_codec.h) into the Python module.

#include "routes_codec.h"

#include <nanobind/stl/optional.h>

#include "bindings.h"

namespace {

using namespace moe_rl;

template <class T, int DIMS>
using In = nb::ndarray<const T, nb::ndim<DIMS>, nb::c_contig, nb::device::cpu>;
template <int DIMS> using Out = nb::ndarray<std::uint64_t, nb::ndim<DIMS>, nb::c_contig, nb::device::cpu>;
template <class Id> using Rows = nb::ndarray<Id, nb::ndim<2>, nb::device::cpu>;

template <class Id>
std::int64_t decode(const RouteDecoder &decoder, In<std::uint8_t, 1> data, In<std::int64_t, 1> start,
                    In<std::int64_t, 1> size, In<std::int64_t, 1> rows, std::int64_t first, Rows<Id> out,
                    std::optional<In<std::uint32_t, 2>> table, std::optional<In<std::uint8_t, 2>> sizes,
                    std::optional<In<std::uint8_t, 3>> members) {
    const auto blocks = static_cast<std::int64_t>(start.shape(0)), top_k = std::int64_t{decoder.top_k()};
    check(size.shape(0) == start.shape(0) && rows.shape(0) == start.shape(0), "start, size and rows must be [n]");
    check(static_cast<std::int64_t>(out.shape(1)) == top_k && out.stride(1) == 1 && first >= 0, "out must be [rows, K], whole rows");
    RouteCodes codes;
    if (table) {
        check(sizes && members && static_cast<int>(table->shape(0)) == decoder.groups() &&
                  table->shape(1) == std::size_t{1} << codes.BITS && members->shape(2) == decoder.top_k() * 1U &&
                  sizes->shape(0) == table->shape(0) && members->shape(0) == table->shape(0) &&
                  members->shape(1) == sizes->shape(1),
              "the tables of a codebook must be [G, 2^14], [G, n] and [G, n, K]");
        codes = {table->data(), sizes->data(), members->data(), static_cast<std::int64_t>(sizes->shape(1))};
    }
    for (std::int64_t i = 0; i < blocks; ++i)
        check(start(i) >= 0 && size(i) >= 0 && rows(i) >= 0 && rows(i) < 1 << 16 &&
                  size(i) <= static_cast<std::int64_t>(data.shape(0)) - start(i),
              "a block lies outside the data");
    const nb::gil_scoped_release no_gil;
    std::vector<Id> block;
    const std::int64_t wanted = static_cast<std::int64_t>(out.shape(0)), stride = out.stride(0);
    for (std::int64_t i = 0, done = -first; i < blocks; done += rows(i), ++i) {
        block.resize(rows(i) * top_k);
        if (!decoder.decode(data.data() + start(i), size(i), rows(i), codes, block.data()))
            return i;
        const std::int64_t begin = std::max<std::int64_t>(done, 0), end = std::min(wanted, done + rows(i));
        for (std::int64_t row = begin; row < end; ++row)
            std::memcpy(out.data() + row * stride, &block[(row - done) * top_k], top_k * sizeof(Id));
    }
    return -1;
}

template <class Id>
void rank(const RouteDecoder &decoder, In<Id, 2> ids, int group, Out<1> numbers) {
    check(static_cast<int>(ids.shape(1)) == decoder.top_k() && numbers.shape(0) == ids.shape(0) && group >= 0 &&
              group < decoder.groups(), "ids must be [n, K], numbers [n]");
    decoder.rank(ids.data(), static_cast<std::int64_t>(ids.shape(0)), group, numbers.data());
}

// Returns the lowest widths[i] <= 57 bits of values[i], one after the other.
nb::bytes pack_bits(In<std::uint64_t, 1> values, In<std::uint8_t, 1> widths) {
    check(values.shape(0) == widths.shape(0), "one width per value");
    std::vector<std::uint8_t> out(8);
    std::int64_t at = 0;
    for (std::size_t i = 0; i < values.shape(0); at += widths(i++)) {
        check(widths(i) <= 57, "a width exceeds 57 bits");
        out.resize((at + widths(i)) / 8 + 9);
        std::uint64_t word;
        std::memcpy(&word, &out[at / 8], 8);
        word |= (values(i) & ((std::uint64_t{1} << widths(i)) - 1)) << at % 8;
        std::memcpy(&out[at / 8], &word, 8);
    }
    return nb::bytes(out.data(), static_cast<std::size_t>((at + 7) / 8));
}

template <class Id> void bind(nb::class_<RouteDecoder> &decoder) {
    using namespace nb::literals;
    decoder.def("decode", &decode<Id>, "data"_a.noconvert(), "start"_a.noconvert(), "size"_a.noconvert(),
                "rows"_a.noconvert(), "first"_a, "out"_a.noconvert(), "table"_a.none(), "sizes"_a.none(),
                "members"_a.none(),
                "Write rows `first`, ... of the blocks at `start` [n] of `data` into `out` [rows, K]; return the first "
                "corrupt block, or -1.");
    decoder.def("rank", &rank<Id>, "ids"_a.noconvert(), "group"_a, "numbers"_a.noconvert(),
                "Fill numbers [n] of the parts in `group` of ascending rows ids [n, K], all in 0 .. E - 1.");
}

} // namespace

void bind_routes_codec(nb::module_ &module) {
    using namespace nb::literals;
    nb::class_<RouteDecoder> decoder(module, "RouteDecoder");
    decoder.def("__init__", [](RouteDecoder *self, int experts, int top_k, int low_bits, std::uint64_t radix, int group,
                               int index_bits) {
        check(1 <= top_k && top_k <= std::min(experts, routes::MAX_TOP_K) && experts <= 4096 && radix <= 256 && group >= 1, "no such sets");
        new (self) RouteDecoder(experts, top_k, {low_bits, radix, group}, index_bits);
    });
    bind<std::uint8_t>(decoder);
    bind<std::uint16_t>(decoder);
    module.def("pack_bits", &pack_bits, "values"_a.noconvert(), "widths"_a.noconvert(),
               "Return the lowest widths[i] bits of values[i] as bytes, one after the other, lowest bit first.");
}
