"""`--resident-slots auto`, `--cross-node-slots auto`: as many as pay and fit, and the reason in the output."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_runner import moe_rl as command_line
from cli_runner import write_npz

import moe_rl
from moe_rl.config import cluster_yaml, load_cluster
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.native import native_core
from moe_rl.report.units import GIB
from moe_rl.study.resident_slots import LEAST_GAIN, SPARE_MEMORY

WIDTHS = {
    "hidden_size": 2048,
    "moe_ffn_hidden_size": 768,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "kv_channels": 64,
    "vocab_size": 1000,
}
SMALL: dict[str, Any] = {
    "num_experts": 8,
    "expert_model_parallel_size": 4,
    "ranks_per_node": 2,
    "ep_group_tokens": 200,
    "tokens_per_rank": 8192,
    "policy": ["static", "moe-rl"],
    "software": ["tuned"],  # so small layers would wait for typical software's host, whatever is copied
    "policy_option": ["moe-rl.reorder_iterations=200", "moe-rl.pack_iterations=200", "moe-rl.rounds=1"],
    **WIDTHS,
}
pytestmark = pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of 3 MoE layers of 8 experts, top-2: on 4 ranks 6 of them are foreign."""
    return write_npz(tmp_path / "good.npz")


def cluster_with(gib: float, path: Path) -> str:
    path.write_text(cluster_yaml(replace(load_cluster("h100"), hbm_gib=gib)))
    return str(path)


def moe_rl_of(path: Path, **options: Any) -> Any:
    return moe_rl.simulate(path, **SMALL | options).policies[1]


@pytest.mark.lengthy
@pytest.mark.parametrize("name", ["resident_slots", "cross_node_slots"])
def test_the_last_slot_that_pays_is_the_last_one_taken(path: Path, name: str) -> None:
    report = moe_rl.simulate(path, **{name: "auto"}, **SMALL)
    taken = report.setting[name]
    steps = [moe_rl_of(path, **{name: slots}).step_time_s for slots in range(taken + 2)]
    gains = [1 - after / before for before, after in pairwise(steps)]
    assert taken > 0
    assert min(gains[:taken]) >= LEAST_GAIN > gains[taken]
    assert report.policies[1].step_time_s == steps[taken]
    assert (report.policies[1].resident_bytes > 0) == (name == "resident_slots")
    (said,) = (note for note in report.cautions if "chosen for the policy moe-rl" in note)
    assert said.startswith(f"{taken} {name[:-1].replace('_', ' ').replace('cross n', 'cross-n')}")
    assert f"with {taken + 1}, the step is " in said


@pytest.mark.lengthy
@pytest.mark.parametrize("room", [0, 1])
def test_memory_ends_it(path: Path, tmp_path: Path, room: int) -> None:
    """A GPU with room for exactly `room` slots."""
    peak = moe_rl_of(path, resident_slots=room).peak_memory_bytes
    cluster = cluster_with(1.0001 * peak / GIB / (1 - SPARE_MEMORY), tmp_path / "small.yaml")
    report = moe_rl.simulate(path, resident_slots="auto", **SMALL | {"cluster": cluster})
    assert report.setting["resident_slots"] == room
    assert any(
        re.search(rf"with {room + 1}, the predicted peak is [\d.]+ of [\d.]+ GiB", note) for note in report.cautions
    )


def test_where_not_even_the_step_without_copies_fits_none_is_taken(path: Path, tmp_path: Path) -> None:
    cluster = cluster_with(0.01, tmp_path / "tiny.yaml")
    report = moe_rl.simulate(path, resident_slots="auto", **SMALL | {"cluster": cluster})
    assert report.setting["resident_slots"] == 0
    assert any("without any, the predicted peak is" in note for note in report.cautions)


@pytest.mark.lengthy
def test_plans_and_sweeps_take_it_too(path: Path, tmp_path: Path) -> None:
    number = moe_rl.simulate(path, resident_slots="auto", **SMALL).setting["resident_slots"]
    made = moe_rl.plan(path, resident_slots="auto", **SMALL | {"policy": ["moe-rl"]})
    assert made.placement.resident_slots == number
    swept = moe_rl.sweep(path, {"resident_slots": [0, "auto"]}, jobs=1, **SMALL)
    assert [point.point["resident_slots"] for point in swept.points] == [0, "auto"]
    assert swept.points[1].policies["moe-rl"] > swept.points[0].policies["moe-rl"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"resident_slots": "many"}, "neither a whole number nor auto (got 'many')"),
        ({"hidden_size": None}, "needs a memory prediction, but moe_rl had to assume the model's hidden_size"),
        ({"objective": "imbalance"}, "looks for the shortest step, which the objective imbalance does not predict"),
        (
            {"policy": ["static", "ultraep"], "policy_option": []},
            "no policy in --policy (static, ultraep) makes replicas for a whole step",
        ),
        (
            {"policy": ["static", "ultraep"], "policy_option": [], "resident_slots": 0, "cross_node_slots": "auto"},
            "no policy in --policy (static, ultraep) makes replicas across nodes",
        ),
    ],
)
def test_what_it_cannot_be_chosen_for_is_refused(
    path: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    given = {"resident_slots": "auto", **SMALL, **options}
    with pytest.raises(InvalidInputError, match=re.escape(sentence)):
        moe_rl.simulate(path, **given)
    out = path.with_name("sweep.jsonl")
    with pytest.raises(InvalidInputError, match=re.escape(sentence)):
        moe_rl.sweep(path, {"replica_slots": [1, 2]}, out=out, **given)
    assert not out.exists()


def test_an_expert_map_needs_a_number(path: Path, tmp_path: Path) -> None:
    shape = ("--num-experts", 8, "--ep", 4, "--resident-slots", "auto")
    ran = command_line("plan", path, *shape, "--export", "sglang", "-o", tmp_path / "map.json")
    assert ran.code == 2
    assert "--resident-slots=auto works only for a training step. For an expert map, set a number." in ran.err
