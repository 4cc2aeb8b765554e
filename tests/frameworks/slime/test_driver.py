"""A driver's plan covers what a schedule of slime's kind runs: every sample of every optimizer step, once."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_schedules import Made, made_schedule
from strategies import model_spec

from moe_rl.balancing import BalancerConfig, cluster_topology, driver_packing
from moe_rl.balancing.driver_packing import DriverPacking
from moe_rl.balancing.schedule import pack_schedule
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import imbalance, node_load, rank_load
from moe_rl.core.native import native_core
from moe_rl.core.plan_file import load_plan
from moe_rl.core.reduce import reduce_load
from moe_rl.core.trace import RoutingTrace
from moe_rl.frameworks.routes import of_moe_layers, signed, with_missing_last_rows
from moe_rl.frameworks.slime import driver as slime
from moe_rl.simulators.setting import StepSetting

CONFIG = BalancerConfig(objective="imbalance")
MODEL = model_spec(num_experts=8, num_layers=3, top_k=2, moe_layer_ids=(1, 2))
schedules = {
    "seed": st.integers(0, 50),
    "ranks": st.sampled_from([1, 2, 4]),
    "steps": st.integers(1, 3),
    "align": st.sampled_from([1, 2]),
}


def steps_of(made: Made) -> list[Any]:
    return slime.schedules_of_steps(made.partitions, made.micro_batch_indices, made.num_microbatches)


def routes_of(made: Made, rng: np.random.Generator) -> list[np.ndarray]:
    """[tokens - 1, layers, K] per sample, each with a taste of its own, as answers to one prompt have."""
    found = []
    for length in made.lengths:
        taste = 2.0 * rng.gumbel(size=8) + rng.gumbel(size=(length - 1, 3, 8))
        found.append(np.argsort(-taste, axis=2)[:, :, :2].astype(np.int32))
    return found


@given(**schedules)
def test_every_sample_that_is_run_is_named_once(seed: int, ranks: int, steps: int, align: int) -> None:
    made = made_schedule(np.random.default_rng(seed), ranks=ranks, steps=steps, rollouts=8, align=align)
    found = steps_of(made)
    named = sorted(sample for step in found for rank in step for batch in rank for sample in batch)
    assert named == sorted(sample for partition in made.partitions for sample in partition)
    assert len(named) == len(set(named))
    assert [len(rank) for step in found for rank in step] == np.repeat(made.num_microbatches, ranks).tolist()
    for number, step in enumerate(found):
        rollouts = {made.rollout_of[sample] for rank in step for batch in rank for sample in batch}
        assert rollouts == set(range(8 * number, 8 * (number + 1)))
    again = slime.schedule_from_steps(found)
    assert again == (made.partitions, made.micro_batch_indices, made.num_microbatches)


@pytest.mark.parametrize("align", [1, 2])
def test_plans_of_all_steps_count_every_routed_token(align: int, rng: np.random.Generator, tmp_path: Path) -> None:
    made = made_schedule(rng, ranks=2, steps=2, rollouts=6, align=align)
    routes, steps = routes_of(made, rng), steps_of(made)
    plans = slime.plans_of_rollout(
        routes, made.lengths, steps, config=CONFIG, model=MODEL, topology=cluster_topology(CONFIG, ep_size=2)
    )
    for plan, step, count in zip(plans, steps, made.num_microbatches, strict=True):
        assert plan.replicas.num_micro_batches == count
        samples = [sample for rank in step for batch in rank for sample in batch]
        assert len(plan.layout.micro_batch) == len(samples)
        assert len(plan.replicas.expert) > 0
    paths = slime.write_plans(plans, tmp_path, rollout_id=7)
    assert [load_plan(path).hash for path in paths] == [plan.hash for plan in plans]
    assert paths[1] == slime.plan_path(tmp_path, 7, 1)


@pytest.mark.parametrize("slots", [0, 1])
def test_packing_keeps_samples_budgets_and_counts_and_evens_nodes_out(slots: int, rng: np.random.Generator) -> None:
    made = made_schedule(rng, ranks=4, steps=2, rollouts=24)
    config = BalancerConfig(policy="moe-rl", objective="imbalance", ranks_per_node=2, replica_slots=slots)
    topology = cluster_topology(config, ep_size=4)
    routes, steps = routes_of(made, rng), steps_of(made)
    packed = slime.packed_steps(
        routes, made.lengths, steps, token_budget=made.budget, config=config, model=MODEL, topology=topology
    )
    assert packed != steps
    for before, after in zip(steps, packed, strict=True):
        cells = [batch for rank in after for batch in rank]
        assert sorted(sample for batch in cells for sample in batch) == sorted(
            sample for rank in before for batch in rank for sample in batch
        )
        assert [len(rank) for rank in after] == [len(rank) for rank in before]
        assert all(0 < sum(made.lengths[sample] for sample in batch) <= made.budget for batch in cells)
    balanced = BalancerConfig(objective="imbalance", ranks_per_node=2, replica_slots=0)
    uneven = []
    for of in (steps, packed):
        plans = slime.plans_of_rollout(routes, made.lengths, of, config=balanced, model=MODEL, topology=topology)
        loads = [
            rank_load(plan, reduce_load([trace_of(routes, made, step)], layout=plan.layout, topology=topology))
            for plan, step in zip(plans, of, strict=True)
        ]
        uneven.append(np.mean([imbalance(node_load(each, 2) if slots else each) for each in loads]))
    assert uneven[1] < uneven[0]


@pytest.mark.skipif(native_core() is None, reason="packing needs the C++ core")
def test_lengths_alone_pack_over_all_ranks(rng: np.random.Generator) -> None:
    made = made_schedule(rng, ranks=4, steps=2, rollouts=24)
    steps = steps_of(made)
    topology = cluster_topology(CONFIG, ep_size=4)
    packing = DriverPacking(
        framework="slime", model=MODEL, topology=topology, setting=StepSetting(), token_budget=made.budget
    )
    packed = slime.packed_by_lengths(made.lengths, steps, packing)
    assert packed != steps
    for before, after in zip(steps, packed, strict=True):
        cells = [batch for rank in after for batch in rank]
        samples = [sorted(sample for rank in each for batch in rank for sample in batch) for each in (before, after)]
        assert samples[0] == samples[1]
        assert len({len(rank) for rank in after}) == 1
        assert all(0 < sum(made.lengths[sample] for sample in batch) <= made.budget for batch in cells)
    tight = replace(packing, token_budget=max(made.lengths) - 1)
    assert slime.packed_by_lengths(made.lengths, steps[:1], tight) in (steps[:1], packed[:1])


@pytest.mark.skipif(native_core() is None, reason="packing needs the C++ core")
def test_experts_cost_what_a_micro_batch_has_for_each_rank() -> None:
    """12 sequences of 10 tokens, two ranks, at most 30 tokens each: two micro-batches, 120 / 2 / 2 tokens a rank."""
    topology = cluster_topology(CONFIG, ep_size=2)
    packing = DriverPacking(framework="slime", model=MODEL, topology=topology, setting=StepSetting(), token_budget=30)
    with patch.object(driver_packing, "cost_of_lengths", wraps=driver_packing.cost_of_lengths) as cost:
        packing.layout(np.full(12, 10))
    assert cost.call_args.kwargs["tokens_per_rank"] == 30


@pytest.mark.skipif(native_core() is None, reason="packing needs the C++ core")
@pytest.mark.parametrize(("num_virtual_stages", "num_micro_batches"), [(1, 3), (2, 4)])
def test_virtual_stages_run_micro_batches_in_groups_of_the_pipelines_size(
    num_virtual_stages: int, num_micro_batches: int
) -> None:
    """18 sequences of 10 tokens, two ranks, at most 30 tokens each: three micro-batches, four where PP2 is virtual."""
    packing = DriverPacking(
        framework="slime",
        model=MODEL,
        topology=cluster_topology(CONFIG, ep_size=2),
        setting=StepSetting(pipeline_model_parallel_size=2, num_virtual_stages=num_virtual_stages),
        token_budget=30,
    )
    layout = packing.layout(np.full(18, 10))
    assert layout is not None
    assert layout.num_micro_batches == num_micro_batches


def test_ranks_of_a_stage_fill_ep_groups() -> None:
    def packing(num_dp_ranks: int, ep_size: int) -> DriverPacking:
        return DriverPacking.of_run(
            "slime",
            CONFIG,
            model=MODEL,
            shape=StepSetting(),
            num_dp_ranks=num_dp_ranks,
            ep_size=ep_size,
            tokens_per_gpu=30,
        )

    assert packing(8, 4).topology.num_ranks == 8
    with pytest.raises(InvalidInputError, match="4 ranks of a pipeline stage cannot be divided into EP groups of 8"):
        packing(4, 8)


def trace_of(routes: list[np.ndarray], made: Made, step: Any) -> RoutingTrace:
    ids = sorted(sample for rank in step for batch in rank for sample in batch)
    rows = [with_missing_last_rows(routes[sample][:, 1:], made.lengths[sample]) for sample in ids]
    return RoutingTrace.from_sequences(
        rows, num_experts=8, moe_layer_ids=(1, 2), valid=[(r >= 0).all((1, 2)) for r in rows]
    )


def test_a_micro_batch_over_the_budget_is_left_as_it_is(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    routes = [rng.permuted(np.tile(np.arange(8), (20, 2, 1)), axis=2)[:, :, :2] for _ in range(4)]
    schedule = [[[0], [1]], [[2], [3]]]
    given: Any = {"token_budget": 19, "model": MODEL, "topology": cluster_topology(CONFIG, ep_size=2)}
    with caplog.at_level("WARNING"):
        same = pack_schedule(routes, schedule, config=CONFIG.with_words(policy="moe-rl"), **given)
    with pytest.raises(InvalidInputError, match="policy 'ultraep' does not pack sequences"):
        pack_schedule(routes, schedule, config=CONFIG.with_words(policy="ultraep"), **given)
    assert same == schedule
    assert "a micro-batch has 20 tokens, more than its budget of 19" in caplog.text


def test_a_schedule_that_does_not_fit_its_steps_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="rank 0 has 3 micro-batches, but its optimizer steps need 5"):
        slime.schedules_of_steps([[0, 1, 2]], [[[0], [1], [2]]], [2, 2, 1])
    assert slime.schedule_from_steps([]) == ([], [], [])
    with pytest.raises(InvalidInputError, match="there are routes for 1 samples, but lengths for 2 samples"):
        slime.plans_of_rollout(
            [np.zeros((1, 2, 2), int)],
            [2, 2],
            [[[[0]]]],
            config=CONFIG,
            model=MODEL,
            topology=cluster_topology(CONFIG, ep_size=1),
        )


def test_routes_of_all_layers_are_cut_to_moe_layers_and_others_refused() -> None:
    routes = np.arange(5 * 3 * 2).reshape(5, 3, 2)
    assert np.array_equal(of_moe_layers(routes, MODEL), routes[:, 1:])
    assert np.array_equal(of_moe_layers(routes[:, 1:], MODEL), routes[:, 1:])
    with pytest.raises(InvalidInputError, match="from another model: they have 4 layers and top-2"):
        of_moe_layers(np.zeros((5, 4, 2), int), MODEL)
    assert of_moe_layers(np.zeros((0, 3, 2), int), MODEL).shape == (0, 2, 2)
    assert np.array_equal(of_moe_layers(routes[4], MODEL), routes[4, 1:]), "of one token"
    with pytest.raises(InvalidInputError, match=r"must have shape \[..., layers, top-k\], got \[3\]"):
        of_moe_layers(np.zeros(3, int), MODEL)


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2"])
def test_ids_lie_as_they_are_where_their_type_holds_minus_one(kind: str) -> None:
    highest = 2 ** (8 * int(kind[1]) - (kind[0] == "i")) - 1
    ids = np.array([0, highest], kind)
    held = signed(ids)
    assert (held is ids) == (kind[0] == "i")
    assert (held.dtype.kind, held.tolist()) == ("i", [0, highest])


def test_a_missing_last_row_is_unknown() -> None:
    routes = np.array([[[0, 0]], [[0, 1]], [[3, 0]]])
    assert with_missing_last_rows(routes, 4)[3].tolist() == [[-1, -1]]
    assert with_missing_last_rows(routes, 3).tolist() == routes.tolist(), "none is missing"
    with pytest.raises(InvalidInputError, match="routes for 3 tokens, but the batch has only 2"):
        with_missing_last_rows(routes, 2)
