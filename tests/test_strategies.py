"""The shared strategies draw what their users rely on: empty experts, and sizes that fit each other."""

import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st
from strategies import loads, placements, problems, topologies, traces

from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.base import PlanProblem


@pytest.mark.lengthy
@given(trace=traces())
def test_every_trace_has_an_expert_that_no_token_chooses(trace: RoutingTrace) -> None:
    trace.check_routes()
    assert (trace.routed_experts < trace.num_experts - 1).all()


@pytest.mark.lengthy
def test_some_loads_have_empty_experts_layers_and_micro_batches() -> None:
    for axes in ((3,), (3, 4), (2, 3, 4)):
        find(loads(), lambda load, axes=axes: bool((load.pairs.sum(axis=axes) == 0).any() and load.pairs.any()))


@given(data=st.data(), topology=topologies())
def test_loads_fit_their_topology(data: st.DataObject, topology: ClusterTopology) -> None:
    load: StepLoad = data.draw(loads(topology))
    assert (load.num_ep_groups, load.ep_size) == (topology.num_ep_groups, topology.ep_size)
    assert (load.tokens[:, :, None] * load.top_k >= load.pairs.sum(axis=4)).all()


@given(placement=placements(num_layers=2, num_experts=6, ep_size=3, spare_slots=1))
def test_placements_have_even_homes(placement: ExpertPlacement) -> None:
    assert all((np.bincount(row) == 2).all() for row in placement.home_rank)


@pytest.mark.lengthy
def test_problems_of_every_kind_occur() -> None:
    kinds = {
        "no slots": lambda p: p.replica_slots == 0,
        "two EP groups": lambda p: p.topology.num_ep_groups == 2,
        "several nodes": lambda p: p.topology.num_nodes > 1,
        "one rank": lambda p: p.load.ep_size == 1,
        "another placement": lambda p: p.current_placement is not None,
        "cross-node slots": lambda p: p.cross_node_slots == 1,
    }
    for holds in kinds.values():
        problem: PlanProblem = find(problems(), holds)
        assert holds(problem)
