"""The most rows that a rank can get: those planned if all is known, and else a certificate for a stated risk."""

import numpy as np
import pytest
from strategies import HARDWARE, problem_of

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.load_exchange import TokensOfRanks
from moe_rl.balancing.pass_planner import row_bound
from moe_rl.balancing.pass_request import PassRequest
from moe_rl.core.certificate import certify
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.registry import make_planner

KNOWN = np.array([[500, 300], [400, 0]])
"""[M, P] tokens of which every choice is known."""


def bound(
    all_tokens: np.ndarray,
    complete_tokens: np.ndarray = KNOWN,
    *,
    risk: float | None = 0.01,
    groups: int = 1,
    num_cells: int = 4,
) -> np.ndarray | None:
    """Return the bound of two micro-batches, two layers and four experts on two ranks, each with top-1 tokens."""
    shares = np.array([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    pairs = np.rint(complete_tokens[None, :, None, :, None] * shares[:, None]).astype(np.int32)
    load = StepLoad(
        pairs=np.repeat(pairs, groups, axis=0), tokens=np.repeat(complete_tokens[None], groups, axis=0), top_k=1
    )
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, num_ep_groups=groups, ranks_per_node=2)
    plan = make_planner("static").plan(problem_of(load, topology))
    config = BalancerConfig(experts="grouped", static_rows=True, capacity_risk=risk)
    rows = rank_load(plan, load)
    tokens = TokensOfRanks(all_MP=all_tokens, complete_MP=complete_tokens)
    request = PassRequest(config=config, placement=plan.placement)
    found = row_bound(request, plan, load, rows[0], tokens, num_cells=num_cells)
    if found is not None and (all_tokens != complete_tokens).any():
        # The (micro-batch, layer) here are 4, each of which takes an equal part of the step's risk.
        np.testing.assert_array_equal(
            found, certify(plan, load, all_tokens[None], risk=(risk or 0) * 4 / num_cells).rows[0]
        )
    elif found is not None:
        np.testing.assert_array_equal(found, rows[0])
    return found


@pytest.mark.parametrize(("risk", "groups"), [(None, 1), (0.01, 1), (None, 2)])
def test_where_all_is_known_it_is_what_is_planned(risk: float | None, groups: int) -> None:
    found = bound(KNOWN, risk=risk, groups=groups)
    assert found is not None
    assert found.sum(axis=2).tolist() == [[800] * 2, [400] * 2]


def test_unknown_tokens_need_a_stated_risk_and_a_smaller_share_of_it_more_room() -> None:
    more = KNOWN + 100
    assert bound(more, risk=None) is None
    assert bound(more, groups=2) is None, "other groups' tokens are not known"
    assert bound(more, np.zeros_like(KNOWN)) is None, "nothing says how tokens choose"
    alone, of_many = bound(more), bound(more, num_cells=4000)
    assert alone is not None
    assert of_many is not None
    assert (of_many >= alone).all()
    assert (of_many > alone).any()
