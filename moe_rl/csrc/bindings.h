// What each file of the core adds to the Python module `moe_rl._native`, and what they share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace moe_rl {

namespace nb = nanobind;

// A numpy buffer that the core reads or writes in place; `Array<const Value, N>` is copied where its type or its strides
// are others, unless the argument says noconvert().
template <class Value, int Dimensions>
using Array = nb::ndarray<Value, nb::numpy, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

inline void check(bool condition, const char *message) {
    if (!condition)
        throw nb::value_error(message);
}

} // namespace moe_rl

void bind_reduce(nanobind::module_ &module);
void bind_planner(nanobind::module_ &module);
void bind_draw_routes(nanobind::module_ &module);
void bind_exact_split(nanobind::module_ &module);
void bind_routes_codec(nanobind::module_ &module);
void bind_sync_schedule(nanobind::module_ &module);
