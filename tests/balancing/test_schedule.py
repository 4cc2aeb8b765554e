"""Plans from a driver's view: any way of saying the schedule gives the same plan, and no plan moves experts unasked."""

import subprocess
import sys

import numpy as np
import pytest
from strategies import model_spec

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import count_routes
from moe_rl.balancing.schedule import (
    cluster_topology,
    layout_of_schedule,
    plan_from_schedule,
    plan_of_load,
)
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.base import PLACEMENT
from moe_rl.planner.registry import POLICIES
from moe_rl.replay.sequences import count_sequences

MODEL = model_spec(num_experts=8, num_layers=2, top_k=2)
SCHEDULE = [[[0, 2], [4], []], [[5], [1, 3], [6]]]


def config(policy: str) -> BalancerConfig:
    return BalancerConfig(policy=policy, objective="imbalance", ranks_per_node=2)


def samples(rng: np.random.Generator) -> list[np.ndarray]:
    """Seven sequences of 3 to 9 tokens that prefer low experts; the last token of each has no route."""
    made = []
    for _ in range(7):
        ids = np.argsort(rng.random((rng.integers(3, 10), 2, 8)) + np.arange(8) * 0.1, axis=2)[:, :, :2]
        ids[-1] = -1
        made.append(ids)
    return made


@pytest.mark.parametrize("policy", ["ultraep", "moe-rl"])
def test_arrays_traces_counts_and_layouts_say_the_same(policy: str, rng: np.random.Generator) -> None:
    arrays = samples(rng)
    topology = cluster_topology(config(policy), ep_size=2)
    trace = RoutingTrace.from_sequences(arrays, num_experts=8, valid=[(ids >= 0).all(axis=(1, 2)) for ids in arrays])
    layout = layout_of_schedule(SCHEDULE, 7)
    plans = [
        plan_from_schedule(given, schedule, config=config(policy), model=MODEL, topology=topology)
        for given in (arrays, trace, count_sequences(trace))
        for schedule in (SCHEDULE, layout)
    ]
    assert len({plan.hash for plan in plans}) == 1
    assert plans[0].layout.fixed
    assert plans[0].replicas.num_micro_batches == 3
    assert plans[0].replicas.copies > 0


def test_the_plan_is_of_the_cells_that_the_schedule_names(rng: np.random.Generator) -> None:
    arrays = samples(rng)
    topology = cluster_topology(config("static"), ep_size=2)
    plan = plan_from_schedule(arrays, SCHEDULE, config=config("static"), model=MODEL, topology=topology)
    assert plan.layout.rank_tokens(np.ones(7, np.int64)).tolist() == [[2, 1], [1, 2], [0, 1]]
    assert plan.layout.micro_batch.tolist() == [0, 1, 0, 1, 1, 0, 2]
    assert plan.layout.order.tolist() == [0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ([[[0, 1, 2, 3, 4, 5, 6]], [[], []]], "the same number of micro-batches, but the ranks run [1, 2]"),
        ([[[0, 1, 2, 3, 4, 5]], [[5]]], "each of the 7 samples once"),
        ([[[0, 1, 2, 3, 4, 5]], [[]]], "each of the 7 samples once"),
        ([[[0, 1, 2, 3, 4, 5, 6]]], "1 data-parallel ranks, but the topology has 2"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(
    schedule: list[list[list[int]]], sentence: str, rng: np.random.Generator
) -> None:
    topology = cluster_topology(config("static"), ep_size=2)
    with pytest.raises(InvalidInputError) as refused:
        plan_from_schedule(samples(rng), schedule, config=config("static"), model=MODEL, topology=topology)
    assert sentence in str(refused.value)


def test_samples_of_another_model_are_refused(rng: np.random.Generator) -> None:
    topology = cluster_topology(config("static"), ep_size=2)
    for wrong in (np.zeros((3, 1, 2), int), np.zeros((3, 2, 2))):
        with pytest.raises(InvalidInputError, match="sample 0 must be integers"):
            plan_from_schedule([wrong], [[[0]], [[]]], config=config("static"), model=MODEL, topology=topology)


def load(rng: np.random.Generator) -> StepLoad:
    pairs = rng.integers(0, 30, (1, 3, 2, 4, 8)) * np.array([5, 4, 1, 1, 1, 1, 1, 1])
    return StepLoad(pairs=pairs.astype(np.int32), tokens=pairs.sum(axis=(2, 4)) // 4, top_k=2)


@pytest.mark.parametrize("policy", [one.name for one in POLICIES if one.keeps_homes and one.slot_limits])
def test_experts_stay_unless_reorder_says_so(policy: str, rng: np.random.Generator) -> None:
    occurs = load(rng)
    home = np.stack([rng.permutation(np.arange(8) // 2) for _ in range(2)])
    placement = ExpertPlacement.from_home_rank(home, ep_size=4, spare_slots=1)
    topology = cluster_topology(config(policy), ep_size=4)
    plan = plan_of_load(occurs, config=config(policy), model=MODEL, topology=topology, placement=placement)
    assert np.array_equal(plan.placement.home_rank, home)
    free = plan_of_load(
        occurs, config=config(policy), model=MODEL, topology=topology, placement=placement, may=PLACEMENT
    )
    moves = not np.array_equal(free.placement.home_rank, home)
    assert moves == POLICIES[policy].levers.move_homes
    assert rank_load(free, occurs).max(axis=3).sum() <= rank_load(plan, occurs).max(axis=3).sum()


def test_a_policy_that_cannot_leave_experts_is_refused_inside_megatron(rng: np.random.Generator) -> None:
    topology = cluster_topology(config("static"), ep_size=4)
    with pytest.raises(InvalidInputError, match="'eplb-oracle' moves experts to other home ranks in every plan"):
        plan_of_load(load(rng), config=config("eplb-oracle"), model=MODEL, topology=topology)


@pytest.mark.parametrize("num_experts", [8, 255, 256, 300])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("unknown", [0.0, 0.3, 1.0])
def test_routes_are_counted_whatever_their_type(
    rng: np.random.Generator, num_experts: int, dtype: type[np.integer], unknown: float
) -> None:
    """Beside a count of one id at a time; -1 only in types that have it, the first micro-batch without rows."""
    most = min(num_experts, 1 + np.iinfo(dtype).max)
    ids = [rng.integers(0, most, (tokens, 3, 2)).astype(dtype) for tokens in (0, 1, 40)]
    if np.issubdtype(dtype, np.signedinteger):
        for each in ids:
            each[rng.random(each.shape) < unknown] = -1
    for layers in ([0, 1, 2], [1, 2], [2, 0]):
        pairs, rows = count_routes(ids, num_layers=3, num_experts=num_experts, layers=layers)
        for each, counted, known in zip(ids, pairs, rows, strict=True):
            own = each[:, layers].astype(np.int64)
            for index in range(len(layers)):
                expected = np.bincount(own[:, index][own[:, index] >= 0], minlength=num_experts)
                assert counted[index].tolist() == expected.tolist()
            assert known == (own >= 0).any(axis=(1, 2)).sum()


def test_ids_that_no_expert_has_are_refused() -> None:
    for ids in (np.full((2, 1, 1), 8), np.full((2, 1, 1), -2), np.full((2, 1, 1), 2**40), np.full((2, 1, 1), np.nan)):
        with pytest.raises(InvalidInputError, match=r"must be -1 to 7|must be integers"):
            count_routes([ids], num_layers=1, num_experts=8)


@pytest.mark.lengthy
def test_a_driver_plans_without_torch_and_megatron() -> None:
    code = (
        "import sys; from moe_rl.megatron import plan_from_schedule, cluster_topology, BalancerConfig; "
        "print([name for name in ('torch', 'megatron', 'triton') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_layout_of_a_schedule_is_fixed_and_checked() -> None:
    layout = layout_of_schedule([[[1], [0]]], 2)
    assert isinstance(layout, BatchLayout)
    assert layout.fixed
    assert layout.micro_batch.tolist() == [1, 0]
