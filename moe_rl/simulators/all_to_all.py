"""Which ranks and nodes tokens really visit under a plan, from the routes of drawn tokens.

Loads alone say how many tokens pick an expert, not which experts meet in one token: `core.plan_rows` takes choices as
independent. With routes at hand the visits are counted (`core.visits`), and the difference is reported. Where a
token is sent once for each of its experts, loads say all.
"""

from dataclasses import dataclass, replace

import numpy as np

from moe_rl.core import visits
from moe_rl.core.cost import Floats, LayerRows
from moe_rl.core.load import StepLoad
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.rows import copies_of_alike_sources

# Drawn tokens of a micro-batch that tell as much of its visits as its loads and the step's ratio do.
#
# A layer waits for its busiest NIC, and the busiest of noisy counts looks busier than any is: with 0.15 M of 7.1 M
# pairs the counts alone price the development trace (EP32, one cross-node and one resident slot) at 1.074 of forced
# balance, ratios alone at 1.133, both at 1.131; all pairs counted it is 1.123.
TELLING_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitDifference:
    """How many tokens were followed, and the error of taking their experts as independent."""

    tokens: int
    """How many were followed in every layer."""
    share: float
    """Of the step's tokens with a route."""
    rank_visits: float
    """Sum of the busiest rank's visits with independent choices / the same sum counted, - 1."""
    nic_rows: float
    """The same of the busiest NIC; 0 on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Where the rows of a plan go."""

    rows: LayerRows
    between_nodes: Floats | None = None
    """[N, N] copies of tokens from each node to each other one, all cells and layers together; None where nodes are
    not told apart."""
    difference: VisitDifference | None = None
    """How far independent choices are from the counted visits; None where none were counted, or rows were."""

    @classmethod
    def of_alike_sources(cls, rows: LayerRows, topology: ClusterTopology) -> "Destinations":
        """Return `rows` with copies that all other nodes of a node send alike."""
        rows_between_nodes = copies_of_alike_sources(rows.nic_ingress, topology)
        return cls(rows=rows, between_nodes=rows_between_nodes.sum(axis=(0, 1, 2)))


def count_visits(rows: LayerRows, plan: Plan, load: StepLoad, topology: ClusterTopology) -> Destinations:
    """Return `rows` with the visits that the load's drawn tokens show, and how much that changed.

    Where not every token was drawn, a micro-batch's visits are estimated from its own drawn tokens and, the fewer of
    them there are, from independent choices times the ratio counted / independent of their layer and place over all
    micro-batches. A scaled load scales its visits: it has another number of tokens, whose experts meet as recorded.
    """
    assert load.routes is not None
    counts, num_drawn = visits.count_visits(plan, load, topology), np.diff(load.routes.cell_start)
    # 256 drawn of 512 tokens weigh 256 / (256 + 128) = 0.67; where every token was drawn the weight is 1.
    drawn_weight = num_drawn / np.maximum(num_drawn + TELLING_TOKENS * (1 - load.routes.share), 1)
    weight = drawn_weight.reshape(load.tokens.shape[:2])[:, :, None, None]
    independent_copies = copies_of_alike_sources(rows.nic_ingress, topology)
    counts = replace(
        counts,
        rank_visits=_estimated(counts.rank_visits, rows.rank_visits, weight),
        between_nodes=_estimated(counts.between_nodes, independent_copies, weight[..., None]),
        counted=np.ones_like(counts.counted),  # what was not counted is estimated now
    )
    counted_rows = counts.put_into(rows)
    ingress = _ratio(rows.nic_ingress, counted_rows.nic_ingress)
    egress = _ratio(rows.nic_egress, counted_rows.nic_egress)
    difference = VisitDifference(
        tokens=len(load.routes.token),
        share=load.routes.share,
        rank_visits=_ratio(rows.rank_visits, counted_rows.rank_visits),
        nic_rows=max(ingress, egress, key=abs),
    )
    return Destinations(
        rows=counted_rows, between_nodes=counts.between_nodes.sum(axis=(0, 1, 2)), difference=difference
    )


def _estimated(counted: Floats, independent: Floats, weight: Floats) -> Floats:
    """Return [G, M, L, ...] visits: `counted` by `weight` [G, M, 1, ...], the rest by the ratio over micro-batches.

    Where nothing was counted in any micro-batch the ratio is 1.
    """
    is_drawn = weight > 0
    counted_sum, independent_sum = (
        np.where(is_drawn, part, 0.0).sum(axis=1, keepdims=True) for part in (counted, independent)
    )
    ratio = np.divide(counted_sum, independent_sum, out=np.ones_like(counted_sum), where=independent_sum > 0)
    estimated: Floats = weight * counted + (1 - weight) * ratio * independent
    return estimated


def _ratio(independent: Floats, counted: Floats) -> float:
    total = float(counted.max(axis=-1).sum())
    if not total:
        return 0.0
    return float(independent.max(axis=-1).sum()) / total - 1.0
