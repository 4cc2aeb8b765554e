"""Metrics of a running step: do the replayed routes fit, and how is the load spread? A few numbers, whatever the model.

n sampled rows, L MoE layers, K experts per token, E experts per layer.
"""

import numpy as np
from numpy.typing import NDArray

from moe_rl.routes.check import CheckedSequence, check_routes
from moe_rl.routes.evidence import agreement
from moe_rl.routes.faults import Fault
from moe_rl.routes.verdict import Verdict

# Rows that a trainer fills itself (last tokens, padding) may be so many of a sample; they are left out.
FILLER_SHARE = 0.1
PERCENTILES = (50, 90, 99)


def replay_metrics(
    routes: NDArray[np.integer],
    own_routes: NDArray[np.integer],
    margin: NDArray[np.floating] | None,
    *,
    num_experts: int,
    combine_weights: NDArray[np.floating] | None = None,
) -> tuple[dict[str, float], Verdict]:
    """Return the metrics `r3/...` of sampled rows, and the verdict on them.

    `routes` [n, L, K] are what ran, `own_routes` what the trainer's routers choose for the same rows, `margin` [n, L]
    of that choice, `combine_weights` [n, L, K], where known, those of `routes`. `r3/agreement`: share of `own_routes`
    in `routes`. `r3/shift`: share of the rows that fit a neighboring token better than their own. `r3/alarm`: 1 where
    the verdict names a fault.
    """

    def judged() -> Verdict:
        sampled = CheckedSequence(
            routes=routes,
            num_tokens=len(routes) + 1,
            reference=own_routes,
            margin=margin,
            combine_weights=combine_weights,
        )
        return check_routes([sampled], num_experts=num_experts)[0]

    verdict = judged()
    # Last tokens and padding have no route: a trainer fills them, and they are no fault.
    for fault in (Fault.EMPTY_ROWS, Fault.PADDING):
        if verdict.fault is fault and verdict.share <= FILLER_SHARE:
            ids = np.sort(routes, axis=2)
            filler = (ids == (np.arange(ids.shape[2]) if fault is Fault.PADDING else ids[..., :1])).all(axis=(1, 2))
            routes, own_routes = routes[~filler], own_routes[~filler]
            margin = None if margin is None else margin[~filler]
            if combine_weights is not None:
                combine_weights = combine_weights[~filler]
            verdict = judged()
    in_place = agreement(routes, own_routes).mean(axis=1)
    margins = np.zeros(len(routes))
    if len(routes) > 1:
        margins[1:] = agreement(routes[1:], own_routes[:-1]).mean(axis=1)
        margins[:-1] = np.maximum(margins[:-1], agreement(routes[:-1], own_routes[1:]).mean(axis=1))
    return {
        "r3/agreement": float(in_place.mean()) if len(routes) else 1.0,
        "r3/shift": float((margins > in_place).mean()) if len(routes) else 0.0,
        "r3/alarm": float(verdict.fault is not None),
    }, verdict


def load_metrics(counts: NDArray[np.integer], previous: NDArray[np.integer] | None = None) -> dict[str, float]:
    """Return the metrics `moe_rl/expert_...` of token-expert pairs `counts` [L, E], of this step and the one before.

    Loads are relative to the mean expert of their layer: percentiles over all experts and layers, the highest, the
    share of experts that no token chose, the layer with the highest maximum, and the drift: the share of the tokens
    that would have to move to make this step's loads the last one's, over layers.
    """
    total = counts.sum(axis=1, keepdims=True)
    load = counts * counts.shape[1] / np.maximum(total, 1)
    values = {f"moe_rl/expert_load_p{percent}": float(np.percentile(load, percent)) for percent in PERCENTILES}
    values |= {
        "moe_rl/expert_load_max": float(load.max(initial=0)),
        "moe_rl/dead_experts": float((counts == 0).mean()) if counts.size else 0.0,
        "moe_rl/hottest_layer": float(load.max(axis=1, initial=0).argmax()) if len(load) else -1.0,
    }
    if previous is not None:
        previous_shares = previous / np.maximum(previous.sum(axis=1, keepdims=True), 1)
        # Half the sum of differences: a token that moves leaves one expert and comes to another.
        drift = np.abs(counts / np.maximum(total, 1) - previous_shares).sum(axis=1) / 2
        values["moe_rl/load_drift"] = float(drift.mean())
    return values


def nodes_per_token(routes: NDArray[np.integer], node: NDArray[np.integer], own_node: int) -> float:
    """Return to how many other nodes a token is sent per layer: `routes` [n, L, K], `node` [E] or [L, E] of experts."""
    node = np.broadcast_to(node, (routes.shape[1], node.shape[-1]))
    visited_nodes = np.sort(np.take_along_axis(node[None], routes.astype(np.int64), axis=2), axis=2)
    # Sorted, the first of equal nodes is the one visit.
    is_new = np.diff(visited_nodes, axis=2, prepend=-1) > 0
    if not len(routes):
        return 0.0
    return float((is_new & (visited_nodes != own_node)).sum(axis=2).mean())
