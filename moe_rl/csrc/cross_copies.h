// Copies across nodes for one cell: which ones nodes hold of each other, and how many of its node's rows each takes.
#pragma once

#include <cstdint>
#include <vector>

#include "cell.h"

namespace moe_rl {

// Exchanges copies, held [nodes, slots] with -1 for none, by what the busiest node has to send or receive and to compute.
// `rows` [N, E] are those that a copy would keep on its node, `fixed` [N] what nodes compute besides; no home sends more
// than `most_sent` copies. Returns seconds of the busiest node, were it a single rank.
double exchange_copies(const Cell &cell, const LayerCostParams &cost, const std::vector<std::int64_t> &rows,
                     const std::vector<std::int32_t> &fixed, int most_sent, std::vector<std::int32_t> &held);

// Copies on other nodes than their home's give rows back, all but one, or take them again, up to what they came
// with, so that the fullest node and the busiest NIC together cost least. `rows` [N, E] are those that nodes send to
// experts, `residents` serve theirs already. `node_load` [N] follows.
void level_copies(const Cell &cell, const LayerCostParams &cost, const std::vector<Copy> &residents,
                  const std::vector<std::int64_t> &rows, std::vector<Copy> &copies,
                  std::vector<std::int64_t> &node_load);

} // namespace moe_rl
