"""Plans from a driver's view: any way of saying the schedule gives the same plan, and no plan moves experts unasked."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from strategies import model_spec

from moe_rl.balancing import schedule as schedule_module
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import count_routes
from moe_rl.balancing.schedule import (
    cluster_topology,
    home_experts,
    layout_of_schedule,
    pack_schedule,
    plan_from_schedule,
    plan_of_load,
    step_setting,
)
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.step_words import Dispatcher
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.base import COPIES, PLACEMENT, Levers, PlanProblem
from moe_rl.planner.registry import POLICIES
from moe_rl.replay.sequences import count_sequences
from moe_rl.simulators.setting import StepSetting

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


def asked_of_policy(
    monkeypatch: pytest.MonkeyPatch, *, may: Levers, **words: Any
) -> tuple[PlanProblem, Levers, dict[str, Any]]:
    """Return the problem, the levers and the parameters that a policy gets of a run with these settings."""
    occurs = load(np.random.default_rng(0))
    config = BalancerConfig(**({"policy": "moe-rl", "ranks_per_node": 2} | words))
    with monkeypatch.context() as patch:
        patch.setattr(
            schedule_module,
            "make_planner",
            lambda policy, **parameters: SimpleNamespace(plan=lambda problem, may: (problem, may, parameters)),
        )
        asked: Any = plan_of_load(
            occurs, config=config, model=MODEL, topology=cluster_topology(config, ep_size=4), may=may
        )
    return asked


@pytest.mark.parametrize("reorders", [False, True])
@pytest.mark.parametrize("may", [COPIES, PLACEMENT])
def test_a_move_pays_for_the_way_home_and_back_in_every_export(
    reorders: bool, may: Levers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What moves is the whole state; an export brings the weights alone, in BF16, there and back."""
    problem, _, _ = asked_of_policy(monkeypatch, may=may, reorders=reorders)
    state, exported = MODEL.expert_state_bytes, 2 * 2 * MODEL.expert_params if reorders and may.move_homes else 0
    hardware = cluster_topology(config("moe-rl"), ep_size=4).hardware
    for link in ("rdma_gb_per_s", "nvlink_p2p_gb_per_s"):
        rate, as_stated = getattr(problem.topology.hardware, link), getattr(hardware, link)
        assert state / rate == pytest.approx((state + exported) / as_stated)


def test_homes_alone_are_judged_on_all_steps_that_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    served = [
        asked_of_policy(monkeypatch, may=may, steps_served=5, history_steps=2)[0].steps_served
        for may in (COPIES, PLACEMENT)
    ]
    assert served == [1, 5]


def test_buffers_of_one_size_are_said_to_the_policy_that_packs_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = replace(COPIES, pack=True)
    for policy, may, static in (
        ("moe-rl", packing, True),
        ("moe-rl", packing, False),
        ("moe-rl", COPIES, True),
        ("ultraep", packing, True),
    ):
        words = {"policy": policy, "experts": "grouped", "static_rows": static}
        parameters = asked_of_policy(monkeypatch, may=may, **words)[2]
        assert parameters == ({"static_buffers": True} if (policy, may, static) == ("moe-rl", packing, True) else {})


def test_what_an_engine_copies_inside_a_domain_is_priced_and_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"domain_balance": "engine:ultraep", "replica_slots": 0, "cross_node_slots": 1}
    problem, may, _ = asked_of_policy(monkeypatch, may=COPIES, **words)
    assert (problem.replica_slots, may.replicate) == (1, False)
    problem, may, _ = asked_of_policy(monkeypatch, may=COPIES, replica_slots=2)
    assert (problem.replica_slots, may.replicate) == (2, True)


def test_the_configurations_dispatcher_goes_before_the_frameworks() -> None:
    of_framework = StepSetting(dispatcher=Dispatcher("alltoall"))
    for configured, expected in ((None, "alltoall"), ("deepep", "deepep")):
        setting = step_setting(BalancerConfig(dispatcher=configured), of_framework, forward_only=True)
        assert (setting.dispatcher, setting.forward_only) == (Dispatcher(expected), True)
    assert step_setting(BalancerConfig(), forward_only=False) == replace(StepSetting(), forward_only=False)


def test_home_slots_stand_first_in_every_rank() -> None:
    placement = ExpertPlacement.from_home_rank(np.array([[1, 0, 1, 0]]), ep_size=2, spare_slots=1)
    assert home_experts(placement).tolist() == [[1, 3, 0, 2]]
    turned = placement.physical_to_logical_map[:, [2, 0, 1, 3, 4, 5]]
    with pytest.raises(InvalidInputError, match="the first 2 slots of every rank must contain its 2 home experts"):
        home_experts(replace(placement, physical_to_logical_map=turned))


def test_a_micro_batch_may_have_as_many_tokens_as_its_budget(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes of two ranks; of each rank's two micro-batches one has all samples of the first node's experts."""
    low, high = (np.tile([first, first + 1], (10, 2, 1)) for first in (0, 6))
    routes, schedule = [low, low, high, high] * 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    given: dict[str, Any] = {"config": config("moe-rl").with_words(replica_slots=2), "model": MODEL}
    topology = cluster_topology(given["config"], ep_size=4, slices_per_dp_rank=2)
    packed = pack_schedule(routes, schedule, token_budget=20, topology=topology, **given)
    assert packed != schedule
    assert [[sorted(index % 4 // 2 for index in batch) for batch in batches] for batches in packed] == [
        [[0, 1]] * 2
    ] * 2
    assert not caplog.records
    assert pack_schedule(routes, schedule, token_budget=19, topology=topology, **given) == schedule
    assert "20 tokens, more than its budget of 19" in caplog.text
