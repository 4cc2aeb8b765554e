// How many of its node's rows each copy across nodes takes.
#pragma once

#include <cstdint>
#include <vector>

#include "cell.h"

namespace moe_rl {

// Copies on other nodes than their home's give rows back, all but one, or take them again, up to what they came
// with, so that the fullest node and the busiest NIC together cost least. `rows` [N, E] are those that nodes send to
// experts, `residents` serve theirs already. `node_load` [N] follows.
void level_copies(const Cell &cell, const LayerCostParams &cost, const std::vector<Copy> &residents,
                  const std::vector<std::int64_t> &rows, std::vector<Copy> &copies,
                  std::vector<std::int64_t> &node_load);

} // namespace moe_rl
