"""Balancing over a dispatcher's own engine: what a run is told, and what its plans leave to the engine."""

import numpy as np
import pytest
from strategies import load_of, model_spec, random_pairs

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.native import native_core
from moe_rl.core.placement import ExpertPlacement
from moe_rl.planner.base import COPIES, PLACEMENT


def test_settings_that_contradict_an_engine_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"replica_slots=0 \(now policy='moe-rl' and replica_slots=1\)"):
        BalancerConfig(domain_balance="engine:moonep")
    with pytest.raises(InvalidInputError, match="engine:moonep"):
        BalancerConfig(domain_balance="engine:moon", replica_slots=0)
    with pytest.raises(InvalidInputError, match="static_rows needs experts='grouped'"):
        BalancerConfig(static_rows=True)


@pytest.mark.skipif(native_core() is None, reason="moe-rl with an engine needs the C++ core")
@pytest.mark.parametrize("engine", ["engine:moonep", "engine:hybridep", "engine:ultraep"])
def test_plans_of_a_run_hold_homes_and_copies_across_nodes_alone(engine: str) -> None:
    config = BalancerConfig(domain_balance=engine, replica_slots=0, cross_node_slots=1, ranks_per_node=4)
    model = model_spec(num_experts=16, num_layers=2, top_k=2)
    topology = cluster_topology(config, ep_size=8, num_ep_groups=1)
    load = load_of(random_pairs(np.random.default_rng(3), (1, 3, 2, 8, 16), most=4000), 2)
    moved = plan_of_load(load, config=config, model=model, topology=topology, may=PLACEMENT)
    assert moved.placement.spare_slots == config.slots.spare
    here: ExpertPlacement = moved.placement.with_slots(resident_slots=0, spare_slots=1)
    plan = plan_of_load(load, config=config, model=model, topology=topology, placement=here, may=COPIES)
    assert (plan.placement.home_rank == here.home_rank).all()
    layer = plan.replicas.index_of_replica() % 2
    home = here.home_rank[layer, plan.replicas.expert]
    assert (plan.replicas.physical_id // plan.placement.slots_per_rank // 4 != home // 4).all()
