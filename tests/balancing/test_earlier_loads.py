"""What is counted of routes, and what reorders remember of the loads before them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from strategies import model_spec

from benchmarks.in_memory_exchange import InMemory, on_all_ranks
from moe_rl.balancing import pass_planner
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import EarlierLoads, RankRows, count_routes
from moe_rl.balancing.pass_request import PassRequest
from moe_rl.balancing.pass_source import CountedRows
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.config import load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.base import COPIES, PLACEMENT

EP_SIZE, LAYERS, EXPERTS = 8, 2, 32
RUNS = 12
"""Of six steps: in a single one whether a late move pays is luck."""


def load_of_a_task(rng: np.random.Generator, *, micro_batches: int = 6) -> StepLoad:
    """Loads of one task: every micro-batch draws from shares that never change, and scatters around them."""
    shares = np.random.default_rng(7).dirichlet(np.full(EXPERTS, 0.5), LAYERS)
    pairs = np.zeros((1, micro_batches, LAYERS, EP_SIZE, EXPERTS), np.int32)
    for index in np.ndindex(pairs.shape[:4]):
        pairs[index] = rng.multinomial(4 * 4096, rng.dirichlet(20 * EXPERTS * shares[index[2]]))
    return StepLoad(pairs=pairs, tokens=np.full((1, micro_batches, EP_SIZE), 4096), top_k=4)


def test_so_many_loads_are_kept(rng: np.random.Generator) -> None:
    loads = [load_of_a_task(rng, micro_batches=count) for count in (1, 2, 3)]
    earlier = EarlierLoads(2)
    assert earlier.then(loads[0]) is None
    for load, before in ((loads[1], loads[:1]), (loads[2], loads[:2]), (loads[0], loads[1:])):
        found = earlier.then(load)
        assert found is not None
        np.testing.assert_array_equal(found.pairs, StepLoad.joined(before).pairs)


@pytest.mark.lengthy
@pytest.mark.parametrize("served", [1, 8])
def test_homes_that_serve_several_steps_settle(rng: np.random.Generator, served: int) -> None:
    """What is judged on earlier loads follows the task; what is chosen for one batch alone follows its luck."""
    model = load_model("qwen3-30b-a3b").spec
    model = replace(model, num_layers=LAYERS, moe_layer_ids=tuple(range(LAYERS)), num_experts=EXPERTS, top_k=4)
    config = BalancerConfig(
        policy="moe-rl", ranks_per_node=EP_SIZE, steps_served=served, history_steps=4 if served > 1 else 1
    )
    topology = cluster_topology(config, ep_size=EP_SIZE)

    def moves(loads: list[StepLoad], *, learns: bool) -> list[int]:
        earlier, placement, moved = EarlierLoads(config.homes.history_steps), None, []
        for load in loads:
            plan = plan_of_load(
                load,
                config=config,
                model=model,
                topology=topology,
                placement=placement,
                may=PLACEMENT,
                history=earlier.then(load) if learns else None,
            )
            placement = plan.placement
            moved.append(len(plan.migration.expert))
        return moved

    runs = [[load_of_a_task(rng) for _ in range(6)] for _ in range(RUNS if served > 1 else 1)]
    learned, blind = ([moves(loads, learns=learns) for loads in runs] for learns in (True, False))
    if served == 1:
        assert learned == blind  # a move has to pay in the step itself: earlier ones say nothing of that
    else:
        assert [moved[0] for moved in learned] == [moved[0] for moved in blind]
        assert np.array(learned)[:, 0].any()
        assert np.array(learned)[:, 1:].sum() < np.array(blind)[:, 1:].sum()


@pytest.mark.parametrize("served", [1, 2])
def test_a_planner_remembers_the_loads_of_its_reorders(served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer and two ranks the first plans it: its policy is told the loads of the two reorders before."""
    histories: list[StepLoad | None] = []
    plan_of_load = pass_planner.plan_of_load

    def noted(load: StepLoad, **words: Any) -> Plan:
        histories.append(words["history"])
        return plan_of_load(load, **words)

    monkeypatch.setattr(pass_planner, "plan_of_load", noted)
    config = BalancerConfig(
        policy="moe-rl", objective="imbalance", steps_served=served, history_steps=2 if served > 1 else 1
    )
    placement = ExpertPlacement.contiguous(num_layers=1, num_experts=4, ep_size=2, spare_slots=config.slots.spare)
    model = model_spec(num_experts=4, num_layers=1, top_k=1)

    def reorders(exchange: InMemory) -> None:
        planner = pass_planner.PassPlanner(exchange, layers=[0], model=model)
        for number, may in enumerate([PLACEMENT, COPIES, PLACEMENT, PLACEMENT, PLACEMENT]):
            rows = RankRows(pairs=np.full((1, 1, 4), number + 1, np.int32), rows=np.array([4 * (number + 1)]))
            planner.plan_pass(PassRequest(config=config, placement=placement, may=may), CountedRows(rows))

    on_all_ranks(2, reorders)
    pairs = [[] if history is None else history.pairs[0, :, 0, 0, 0].tolist() for history in histories]
    assert pairs == ([[], [], [1], [1, 3], [3, 4]] if served > 1 else [[]] * 5)


@pytest.mark.parametrize("name", ["steps_served", "history_steps"])
def test_at_least_one_step(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} must be at least 1, got 0"):
        BalancerConfig(**{name: 0})


def test_history_that_nothing_learns_from_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="history_steps=3 has no effect"):
        BalancerConfig(history_steps=3)


@pytest.mark.parametrize("expert", [-2, 4])
def test_ids_next_to_those_of_the_experts_are_refused(expert: int) -> None:
    pairs, rows = count_routes([np.array([[[-1, 3]]])], num_layers=1, num_experts=4)
    assert pairs.tolist() == [[[0, 0, 0, 1]]]
    assert rows.tolist() == [1]
    with pytest.raises(InvalidInputError, match=r"micro-batch 0 must be -1 to 3, but they range"):
        count_routes([np.array([[[0, expert]]])], num_layers=1, num_experts=4)
