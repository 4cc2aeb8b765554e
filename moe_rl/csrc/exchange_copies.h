// Which experts nodes copy from each other for one cell, so that none is much busier than the others.
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

} // namespace moe_rl
