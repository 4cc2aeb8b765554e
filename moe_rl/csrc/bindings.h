// What each file of the core adds to the Python module `moe_rl._native`.
#pragma once

#include <nanobind/nanobind.h>

void bind_reduce(nanobind::module_ &module);
void bind_planner(nanobind::module_ &module);
void bind_draw_routes(nanobind::module_ &module);
void bind_exact_split(nanobind::module_ &module);
void bind_routes_codec(nanobind::module_ &module);
