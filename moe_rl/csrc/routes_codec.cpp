// Puts the codec of routes (routes_codec.h, routes_encoder.h) into the Python module.

#include "routes_encoder.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace {

using namespace moe_rl;

template <class T, int DIMS>
using In = nb::ndarray<const T, nb::ndim<DIMS>, nb::c_contig, nb::device::cpu>;
template <class T, int DIMS> using Out = nb::ndarray<T, nb::ndim<DIMS>, nb::c_contig, nb::device::cpu>;
template <class Id> using Routes = nb::ndarray<Id, nb::ndim<3>, nb::device::cpu>; // [n, l, K], rows may lie apart

// What one call of `read` found wrong.
enum Fault : int { NONE, BAD_CHECKSUM, BAD_BLOCK };

// What Python is given, with types that its stub can name.
using FaultPlace = nb::typed<nb::tuple, int, std::int64_t, std::int64_t>;
using ListOfBytes = nb::typed<nb::list, nb::bytes>;
using Encoded = nb::typed<nb::tuple, ListOfBytes, ListOfBytes, nb::bytes, nb::bytes>;
using FirstFaults = nb::typed<nb::tuple, std::int64_t, std::int64_t>;

// Reads the routed rows `first` .. of some layers of a chunk into `out`; returns (fault, place among `layers`, block).
// Blocks are [L, B]; those in `checked` [L, B] had their checksums right before.
template <class Id>
FaultPlace read(const RouteShape &shape, In<std::uint8_t, 1> body, In<std::int64_t, 2> start, In<std::uint16_t, 2> size,
                In<std::uint32_t, 2> crc, Out<std::uint8_t, 2> checked, const std::vector<std::int64_t> &layers,
                nb::typed<nb::list, nb::object> codes, std::int64_t block_rows, std::int64_t num_routed,
                std::int64_t first, Routes<Id> out) {
    const auto rows = static_cast<std::int64_t>(out.shape(0)), bytes = static_cast<std::int64_t>(body.shape(0));
    const auto num_layers = static_cast<std::int64_t>(start.shape(0)), blocks = static_cast<std::int64_t>(start.shape(1));
    check(block_rows > 0 && block_rows < 1 << 16 && first >= 0 && first + rows <= num_routed &&
              (num_routed + block_rows - 1) / block_rows == blocks, "the rows lie outside the chunk");
    check(size.shape(0) == start.shape(0) && size.shape(1) == start.shape(1) && checked.shape(0) == start.shape(0) &&
              checked.shape(1) == start.shape(1) && crc.shape(0) == start.shape(0) && crc.shape(1) == start.shape(1) + 1,
          "start, size and checked must be [L, B], crc [L, B + 1]");
    check(out.shape(1) == layers.size() && nb::len(codes) == layers.size() && static_cast<int>(out.shape(2)) == shape.top_k &&
              out.stride(2) == 1 && sizeof(Id) == static_cast<std::size_t>(shape.id_bytes()),
          "out must be [rows, layers, K]");
    std::vector<const RouteCodes *> tables;
    for (std::size_t place = 0; place < layers.size(); ++place) {
        check(layers[place] >= 0 && layers[place] < num_layers, "a layer lies outside the chunk");
        tables.push_back(codes[place].is_none() ? nullptr : nb::cast<const RouteCodes *>(codes[place]));
    }
    const std::int64_t row_stride = out.stride(0), layer_stride = out.stride(1);
    Id *const target = out.data();
    Fault fault = NONE;
    std::int64_t bad_place = -1, bad_block = -1;
    {
        const nb::gil_scoped_release no_gil;
        const RouteDecoder decoder(shape);
        std::vector<std::uint8_t> scratch;
        // Block by block, and in it all layers: their rows are neighbors in `out`.
        for (std::int64_t block = first / block_rows; fault == NONE && block * block_rows < first + rows; ++block)
            for (std::size_t place = 0; fault == NONE && place < layers.size(); ++place) {
                const std::int64_t layer = layers[place], begin = start(layer, block), length = size(layer, block);
                const std::int64_t low = std::max(first, block * block_rows);
                const std::int64_t high = std::min(first + rows, (block + 1) * block_rows);
                const bool inside = begin >= 0 && length <= bytes - begin;
                if (inside && !checked(layer, block))
                    checked(layer, block) = Crc32::of(body.data() + begin, length) == crc(layer, block);
                if (!inside || !checked(layer, block))
                    fault = BAD_CHECKSUM;
                else if (!decoder.decode(BlockRows<Id>{body.data() + begin, length,
                                                       std::min(block_rows, num_routed - block * block_rows),
                                                       low - block * block_rows, high - block * block_rows,
                                                       target + (low - first) * row_stride +
                                                           static_cast<std::int64_t>(place) * layer_stride,
                                                       row_stride},
                                         tables[place], scratch))
                    fault = BAD_BLOCK;
                if (fault != NONE)
                    bad_place = static_cast<std::int64_t>(place), bad_block = block;
            }
    }
    return nb::make_tuple(static_cast<int>(fault), bad_place, bad_block);
}

// Returns by layer (codebook, blocks one after another), then sizes [L, B] and checksums [L, B + 1] as bytes.
template <class Id> Encoded encode(const RouteShape &shape, In<Id, 3> ids, std::int64_t block_rows) {
    const auto rows = static_cast<std::int64_t>(ids.shape(0)), layers = static_cast<std::int64_t>(ids.shape(1));
    check(static_cast<int>(ids.shape(2)) == shape.top_k && block_rows > 0, "ids must be [N, L, K]");
    for (std::size_t i = 0; i < ids.size(); ++i)
        check(ids.data()[i] < shape.experts, "an id lies outside 0 .. E - 1");
    std::vector<CodedLayer> coded;
    {
        const nb::gil_scoped_release no_gil;
        RouteEncoder encoder(shape);
        std::vector<Id> rows_of_layer(rows * shape.top_k);
        for (std::int64_t layer = 0; layer < layers; ++layer) {
            const Id *from = ids.data() + layer * shape.top_k;
            for (Id *to = rows_of_layer.data(); to < rows_of_layer.data() + rows_of_layer.size(); from += layers * shape.top_k)
                for (int k = 0; k < shape.top_k; ++k)
                    *to++ = from[k];
            coded.push_back(encoder.encode(LayerRows<Id>{rows_of_layer.data(), rows, shape.top_k}, block_rows));
        }
    }
    nb::list books, blocks;
    std::vector<std::uint16_t> sizes;
    std::vector<std::uint32_t> crcs;
    for (const CodedLayer &layer : coded) {
        books.append(nb::bytes(layer.book.data(), layer.book.size()));
        blocks.append(nb::bytes(layer.blocks.data(), layer.blocks.size()));
        sizes.insert(sizes.end(), layer.sizes.begin(), layer.sizes.end());
        crcs.insert(crcs.end(), layer.crcs.begin(), layer.crcs.end());
    }
    return nb::make_tuple(books, blocks, nb::bytes(sizes.data(), 2 * sizes.size()), nb::bytes(crcs.data(), 4 * crcs.size()));
}

// Writes rows of `ids` [T, L, K] in ascending order; returns the flat [T, L] places of the first id outside and of the
// first expert that is named twice, -1: none.
template <class Given, class Id>
FirstFaults sorted(const RouteShape &shape, In<Given, 3> ids, In<bool, 1> known, Out<Id, 3> out) {
    check(ids.shape(0) == out.shape(0) && ids.shape(1) == out.shape(1) && ids.shape(2) == out.shape(2) &&
              known.shape(0) == ids.shape(0) && static_cast<int>(ids.shape(2)) == shape.top_k &&
              sizeof(Id) == static_cast<std::size_t>(shape.id_bytes()), "ids and out must be [T, L, K], known [T]");
    RouteFaults faults;
    {
        const nb::gil_scoped_release no_gil;
        faults = sort_sets(ids.data(), known.data(), static_cast<std::int64_t>(ids.shape(0)),
                           static_cast<std::int64_t>(ids.shape(1)), shape.top_k, shape.experts, out.data());
    }
    return nb::make_tuple(faults.outside, faults.twice);
}

template <class Id> void bind(nb::class_<RouteShape> &shape) {
    using namespace nb::literals;
    shape.def("read", &read<Id>, "body"_a.noconvert(), "start"_a.noconvert(), "size"_a.noconvert(), "crc"_a.noconvert(),
              "checked"_a.noconvert(), "layers"_a, "codes"_a, "block_rows"_a, "num_routed"_a, "first"_a,
              "out"_a.noconvert(),
              "Read the routed rows from `first` on of some layers of a chunk into `out` [n, l, K]; return (fault, place "
              "among the layers, block): 0 none, 1 a wrong checksum, 2 a corrupt block.");
    shape.def("encode", &encode<Id>, "ids"_a.noconvert(), "block_rows"_a,
              "Return (codebooks, blocks, sizes, checksums) of the layers of ids [N, L, K], every row ascending.");
    shape.def("sorted", &sorted<std::uint8_t, Id>, "ids"_a.noconvert(), "known"_a.noconvert(), "out"_a.noconvert(),
              "Write rows of ids [T, L, K] in ascending order into `out`, zeros where not `known` [T]; return the flat "
              "[T, L] places of the first id outside 0 .. E - 1 and of the first expert named twice, -1: none.");
    shape.def("sorted", &sorted<std::uint16_t, Id>, "ids"_a.noconvert(), "known"_a.noconvert(), "out"_a.noconvert());
    shape.def("sorted", &sorted<std::int16_t, Id>, "ids"_a.noconvert(), "known"_a.noconvert(), "out"_a.noconvert());
    shape.def("sorted", &sorted<std::int32_t, Id>, "ids"_a.noconvert(), "known"_a.noconvert(), "out"_a.noconvert());
    shape.def("sorted", &sorted<std::int64_t, Id>, "ids"_a.noconvert(), "known"_a.noconvert(), "out"_a.noconvert());
}

} // namespace

void bind_routes_codec(nb::module_ &module) {
    using namespace nb::literals;
    nb::class_<RouteShape> shape(module, "RouteShape");
    shape.def("__init__", [](RouteShape *self, int experts, int top_k, int low_bits, std::uint64_t radix, int group,
                             int index_bits) {
        check(1 <= top_k && top_k <= std::min(experts, routes::MAX_TOP_K) && experts <= 4096 && radix <= 256 && group >= 1, "no such sets");
        new (self) RouteShape(experts, top_k, {low_bits, radix, group}, index_bits);
    });
    bind<std::uint8_t>(shape);
    bind<std::uint16_t>(shape);
    nb::class_<RouteCodes>(module, "RouteCodes")
        .def("__init__", [](RouteCodes *self, const RouteShape &of, nb::bytes book) {
            new (self) RouteCodes(of, reinterpret_cast<const std::uint8_t *>(book.c_str()), static_cast<std::int64_t>(book.size()));
        })
        .def_prop_ro("is_sound", &RouteCodes::is_sound)
        .def_prop_ro("num_bytes", &RouteCodes::num_bytes);
    module.def("crc32", [](In<std::uint8_t, 1> data) { return Crc32::of(data.data(), static_cast<std::int64_t>(data.shape(0))); },
               "data"_a.noconvert(), "Return zlib's CRC-32.");
}
