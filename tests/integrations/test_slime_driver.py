"""A driver's plan covers what slime's own schedule runs: every sample of every optimizer step, once."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_rl.balancing import BalancerConfig, cluster_topology
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan_file import load_plan
from moe_rl.integrations import slime
from moe_rl.integrations.routes import of_moe_layers, with_missing_last_rows

SCHEDULES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "fixtures" / "slime_schedules.json").read_text())
CONFIG = BalancerConfig(objective="imbalance")
MODEL = MoeModelSpec(
    name="m",
    num_layers=3,
    moe_layer_ids=(1, 2),
    num_experts=8,
    top_k=2,
    hidden_size=32,
    moe_ffn_hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=1,
)
by_name = pytest.mark.parametrize("recorded", SCHEDULES, ids=[each["name"] for each in SCHEDULES])


def steps_of(recorded: dict[str, Any]) -> list[Any]:
    return slime.schedules_of_steps(
        recorded["partitions"], recorded["micro_batch_indices"], recorded["num_microbatches"]
    )


@by_name
def test_every_sample_that_slime_runs_is_named_once(recorded: dict[str, Any]) -> None:
    steps = steps_of(recorded)
    named = sorted(sample for step in steps for rank in step for batch in rank for sample in batch)
    assert named == sorted(sample for partition in recorded["partitions"] for sample in partition)
    assert len(named) == len(set(named))
    assert [len(rank) for step in steps for rank in step] == [
        count for count in recorded["num_microbatches"] for _ in recorded["partitions"]
    ]
    for step, size in zip(steps, recorded["global_batch_sizes"], strict=True):
        rollouts = {recorded["rollout_indices"][sample] for rank in step for batch in rank for sample in batch}
        assert len(rollouts) == size


@by_name
def test_plans_of_all_steps_count_every_routed_token(
    recorded: dict[str, Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    lengths = recorded["total_lengths"]
    skew = rng.dirichlet(np.full(8, 0.4))
    order = np.log(skew + 1e-9) + rng.gumbel(size=(sum(lengths) - len(lengths), 3, 8))
    ids = np.argsort(-order, axis=2)[:, :, :2].astype(np.int32)
    ends = np.cumsum([0, *(length - 1 for length in lengths)])
    routes = [ids[a:b] for a, b in pairwise(ends)]
    steps, dp_size = steps_of(recorded), recorded["parallel"]["dp_size"]
    plans = slime.plans_of_rollout(
        routes, lengths, steps, config=CONFIG, model=MODEL, topology=cluster_topology(CONFIG, ep_size=dp_size)
    )
    for plan, step, count in zip(plans, steps, recorded["num_microbatches"], strict=True):
        assert plan.replicas.num_micro_batches == count
        samples = [sample for rank in step for batch in rank for sample in batch]
        assert len(plan.layout.micro_batch) == len(samples)
        assert len(plan.replicas.expert) > 0
    paths = slime.write_plans(plans, tmp_path, rollout_id=7)
    assert [load_plan(path).hash for path in paths] == [plan.hash for plan in plans]
    assert paths[1] == slime.plan_path(tmp_path, 7, 1)


def test_a_schedule_that_does_not_fit_its_steps_is_refused() -> None:
    recorded = SCHEDULES[0]
    with pytest.raises(InvalidInputError, match="rank 0 has 6 micro-batches, its optimizer steps run 5"):
        slime.schedules_of_steps(recorded["partitions"], recorded["micro_batch_indices"], [2, 2, 1])


def test_routes_of_all_layers_are_cut_to_moe_layers_and_others_refused() -> None:
    routes = np.arange(5 * 3 * 2).reshape(5, 3, 2)
    assert np.array_equal(of_moe_layers(routes, MODEL), routes[:, 1:])
    assert np.array_equal(of_moe_layers(routes[:, 1:], MODEL), routes[:, 1:])
    with pytest.raises(InvalidInputError, match="of another model: 4 layers of 2 choices"):
        of_moe_layers(np.zeros((5, 4, 2), int), MODEL)
    assert of_moe_layers(np.zeros((0, 3, 2), int), MODEL).shape == (0, 2, 2)


def test_a_missing_last_row_is_unknown() -> None:
    routes = np.array([[[0, 0]], [[0, 1]], [[3, 0]]])
    assert with_missing_last_rows(routes, 4)[3].tolist() == [[-1, -1]]
    with pytest.raises(InvalidInputError, match="3 rows of routes for 2 tokens"):
        with_missing_last_rows(routes, 2)
