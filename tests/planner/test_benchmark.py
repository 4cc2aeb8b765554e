"""The figures of the planner benchmark agree with what they are named after."""

import numpy as np
import pytest
from strategies import HARDWARE, load_of, problem_of, random_pairs

from benchmarks.planner_rows import forced_balance_cost, measure_policies, policy_table
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.registry import POLICIES


@pytest.mark.lengthy
def test_every_policy_gets_a_row_whose_figures_are_consistent(rng: np.random.Generator) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = load_of(random_pairs(rng, (1, 4, 3, 4, 16), most=2000), 2)
    problem = problem_of(load, topology, objective="imbalance", cross_node_slots=1)
    rows = list(measure_policies({"case": problem}))
    assert [row.policy for row in rows] == list(POLICIES.names)
    table = policy_table(rows)
    for row in rows:
        assert 1.0 <= row.bound <= row.imbalance + 1e-9
        assert row.most_nic_in <= 1 or not POLICIES[row.policy].slot_limits
        assert (row.cross_node_replicas_per_plan > 0) == (row.most_nic_in > 0) == (row.most_nic_out > 0)
        assert row.copied_bytes == round(row.replicas_per_plan * 12) * problem.model.expert_bytes
        assert f"{row.imbalance:.4f}" in table
        assert set(row.as_json()) >= {"policy", "imbalance", "plan_time_s"}
    found = {row.policy: row.imbalance for row in rows if POLICIES[row.policy].slot_limits}
    assert found["moe-rl"] == min(found.values())  # alone or with its own variant: this load leaves little to pack
    assert any(row.most_nic_in for row in rows)


def test_forced_balance_is_what_uniform_loads_cost_statically() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    problem = problem_of(load_of(np.full((1, 2, 3, 4, 8), 64, np.int32), 2), topology, objective="time")
    rows = {row.policy: row for row in measure_policies({"case": problem}, ("static", "moe-rl"))}
    for row in rows.values():
        assert row.predicted_s == pytest.approx(forced_balance_cost(problem), rel=1e-12)
        assert row.fraction_of_forced_balance == pytest.approx(1.0)
