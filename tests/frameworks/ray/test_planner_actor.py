"""The planner as a real Ray actor on this machine: the plans of a driver, also when its process is killed."""

import os
import signal
from typing import Any

import numpy as np
import pytest
from strategies import model_spec

from moe_rl.balancing import BalancerConfig, cluster_topology, plan_from_schedule
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.planner_actor import PlannerActor, start_planner

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]  # Ray leaves its own files open

CONFIG = BalancerConfig(objective="imbalance")
TOPOLOGY = cluster_topology(CONFIG, ep_size=2)
MODEL = model_spec(num_experts=8, num_layers=3, top_k=2, moe_layer_ids=(1, 2))
LENGTHS = (9, 14, 7, 12)
SCHEDULE = [[[0], [2]], [[3], [1]]]


def routes(rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """One row less than tokens, all layers."""
    weights = np.log([0.4, 0.25, 0.15, 0.1, 0.04, 0.03, 0.02, 0.01])
    return [np.argsort(-(weights + rng.gumbel(size=(n - 1, 3, 8))), axis=2)[:, :, :2].astype(np.int32) for n in LENGTHS]


def test_plans_come_by_reference_and_are_the_drivers(ray_cluster: Any, rng: np.random.Generator) -> None:
    given = routes(rng)
    planner = start_planner(CONFIG, model=MODEL, topology=TOPOLOGY, num_cpus=1)
    taken = [planner.take.remote(ids, length) for ids, length in zip(given, LENGTHS, strict=True)]
    reference = planner.plan.remote(taken, SCHEDULE)
    assert isinstance(reference, ray_cluster.ObjectRef)
    here = PlannerActor(CONFIG, MODEL, TOPOLOGY)
    samples = [here.take(ids, length) for ids, length in zip(given, LENGTHS, strict=True)]
    expected = plan_from_schedule(samples, SCHEDULE, config=CONFIG, model=MODEL, topology=TOPOLOGY)
    assert ray_cluster.get(reference).hash == expected.hash
    assert len(expected.replicas.expert) > 0
    ray_cluster.kill(planner)


def test_a_killed_planner_comes_back_with_the_same_plan(ray_cluster: Any, rng: np.random.Generator) -> None:
    planner = start_planner(CONFIG, model=MODEL, topology=TOPOLOGY, num_cpus=1)
    taken = [planner.take.remote(ids, length) for ids, length in zip(routes(rng), LENGTHS, strict=True)]
    before = ray_cluster.get(planner.plan.remote(taken, SCHEDULE))
    number = ray_cluster.get(planner.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(number, signal.SIGKILL)
    after = ray_cluster.get(planner.plan.remote(taken, SCHEDULE))
    assert ray_cluster.get(planner.__ray_call__.remote(lambda _: os.getpid())) != number
    assert after.hash == before.hash
    ray_cluster.kill(planner)


def test_what_is_wrong_reaches_the_driver(ray_cluster: Any) -> None:
    planner = start_planner(CONFIG, model=MODEL, topology=TOPOLOGY, num_cpus=1)
    with pytest.raises(InvalidInputError, match="from another model: they have 5 layers and top-2"):
        ray_cluster.get(planner.take.remote(np.zeros((4, 5, 2), int)))
    with pytest.raises(InvalidInputError, match="expert ids outside"):
        ray_cluster.get(planner.take.remote(np.full((4, 3, 2), 8)))
    ray_cluster.kill(planner)
