"""A plan without replicas says why, with figures that agree with the policy's own choice."""

import re

import numpy as np
import pytest
from strategies import model_spec

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement

MODEL = model_spec(num_experts=8, num_layers=2, top_k=2)
CONFIG = BalancerConfig(policy="moe-rl", ranks_per_node=4)
FIGURES = re.compile(
    r"a replica costs (\d+) us of transfer, .* would save at most (\d+) us\. To ignore the cost, set objective="
)


def load_of(hot: int, *, tokens_per_rank: int = 64, micro_batches: int = 2) -> StepLoad:
    """Four ranks of two experts, alike but for one expert with `hot` times the pairs of the others."""
    share = np.ones(8)
    share[3] = hot
    pairs = np.broadcast_to(np.rint(share / share.sum() * tokens_per_rank * 2), (1, micro_batches, 2, 4, 8))
    return StepLoad(pairs=pairs.astype(np.int32), tokens=np.full((1, micro_batches, 4), tokens_per_rank), top_k=2)


def why(config: BalancerConfig, load: StepLoad, **given: object) -> str:
    topology = cluster_topology(config, ep_size=4)
    plan = plan_of_load(load, config=config, model=MODEL, topology=topology, **given)
    assert not (plan.replicas.copies and plan.notes)
    return "".join(plan.notes)


def test_small_passes_say_what_copies_cost_and_save() -> None:
    said = why(CONFIG, load_of(5))
    found = FIGURES.search(said)
    assert found, said
    cost, saved = map(int, found.groups())
    assert cost > saved >= 0
    assert said.startswith("no replicas: the rank loads have an imbalance of 1.97, but ")


def test_where_copies_pay_the_policy_makes_them_and_nothing_is_said() -> None:
    assert why(CONFIG, load_of(5, tokens_per_rank=65536)) == ""
    assert why(CONFIG.with_words(objective="imbalance"), load_of(5)) == ""


def test_equal_ranks_need_no_word() -> None:
    assert why(CONFIG, load_of(1)) == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"replica_slots": 0}, "replica_slots and cross_node_slots are both 0"),
        ({"ranks_per_node": 1}, "no rank may hold a replica (ranks_per_node is 1 and cross_node_slots is 0"),
    ],
)
def test_settings_that_leave_no_replica_are_named(change: dict[str, object], sentence: str) -> None:
    assert sentence in why(CONFIG.with_words(**change), load_of(5))


def test_moved_homes_and_no_tokens_are_no_obstacle() -> None:
    home = np.tile(np.arange(8) % 4, (2, 1))
    placement = ExpertPlacement.from_home_rank(home, ep_size=4, spare_slots=1)
    assert FIGURES.search(why(CONFIG, load_of(5), placement=placement))
    assert why(CONFIG, load_of(5, tokens_per_rank=0)) == ""


def test_a_policy_without_the_lever_is_not_asked_why() -> None:
    assert why(CONFIG.with_words(policy="static"), load_of(5)) == ""
