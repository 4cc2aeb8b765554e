"""Which ranks and nodes tokens really visit under a plan, from the recorded routes.

Loads alone say how many tokens pick an expert, not which experts meet in one token: `simulators.rows` takes choices as
independent. With the trace at hand the visits are counted (`core.visits`), and the difference is reported. Where a
token is sent once for each of its experts, loads say all.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core import visits
from moe_rl.core.cost import Floats, LayerRows
from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.plan import Plan
from moe_rl.core.routes import RouteSample
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.simulators.rows import copies_of_alike_sources

Ints = NDArray[np.int64]

MAX_EXACT_PAIRS = 10_000_000
"""Token-expert pairs that are followed one by one; of larger steps a sample of micro-batches is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitDifference:
    """How far independent choices are from the counted ones, over the micro-batches that were counted."""

    micro_batches: int
    """How many were counted."""
    rank_visits: float
    """Sum of the busiest rank's visits with independent choices / the same sum counted, - 1."""
    nic_rows: float
    """The same of the busiest NIC; 0 on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Where the rows of a plan go."""

    rows: LayerRows
    between_nodes: Floats
    """[N, N] copies of tokens from each node to each other one, all cells and layers together."""
    difference: VisitDifference | None = None
    """How far independent choices are from the counted visits; None where none were counted, or rows were."""

    @classmethod
    def of_alike_sources(cls, rows: LayerRows, topology: ClusterTopology) -> "Destinations":
        """Return `rows` with copies that all other nodes of a node send alike."""
        between = copies_of_alike_sources(rows.nic_ingress, topology)
        return cls(rows=rows, between_nodes=between.sum(axis=(0, 1, 2)))


def count_visits(
    rows: LayerRows, plan: Plan, load: StepLoad, trace: RoutingTrace, topology: ClusterTopology
) -> Destinations:
    """Return `rows` with counted visits where they were counted, and how much that changed.

    `trace` holds the plan's sequences in the layout's order. A scaled load scales its visits: what differs from
    recorded sizes is the number of tokens, not which experts meet. Rows without a route are not followed; where they
    are dispatched, the counted visits are scaled to the load's tokens.
    """
    plan.layout.check(trace.sequence_lengths)
    require(
        (trace.num_layers, trace.num_experts) == (load.num_layers, load.num_experts),
        f"the trace has {trace.num_layers} MoE layers of {trace.num_experts} experts, the load {load.num_layers} of "
        f"{load.num_experts}.",
    )
    chosen = _chosen_micro_batches(trace, load)
    drawn = RouteSample.drawn(
        [trace], layout=plan.layout, topology=topology, micro_batches=chosen, max_ids=trace.routed_experts.size + 1
    )
    if drawn is None:
        none = VisitDifference(micro_batches=0, rank_visits=0.0, nic_rows=0.0)
        return replace(Destinations.of_alike_sources(rows, topology), difference=none)
    counts = visits.count_visits(plan, replace(load, routes=drawn), topology)
    counted = counts.put_into(rows)
    alike = copies_of_alike_sources(rows.nic_ingress, topology)
    between = np.where(counts.counted[:, :, None, None, None], counts.between_nodes, alike)
    part = (slice(None), chosen)
    difference = VisitDifference(
        micro_batches=len(chosen),
        rank_visits=_ratio(rows.rank_visits[part], counted.rank_visits[part]),
        nic_rows=max(
            _ratio(rows.nic_ingress[part], counted.nic_ingress[part]),
            _ratio(rows.nic_egress[part], counted.nic_egress[part]),
            key=abs,
        ),
    )
    return Destinations(rows=counted, between_nodes=between.sum(axis=(0, 1, 2)), difference=difference)


def _chosen_micro_batches(trace: RoutingTrace, load: StepLoad) -> Ints:
    """Return all micro-batches, or as many evenly spread ones as the limit allows."""
    pairs = trace.num_tokens * trace.num_layers * trace.top_k
    count = load.num_micro_batches
    if pairs > MAX_EXACT_PAIRS:
        count = max(1, count * MAX_EXACT_PAIRS // pairs)
    spread = np.linspace(0, load.num_micro_batches - 1, count).round().astype(np.int64)
    return np.unique(spread)


def _ratio(independent: Floats, counted: Floats) -> float:
    total = float(counted.max(axis=-1).sum())
    return float(independent.max(axis=-1).sum()) / total - 1.0 if total else 0.0
