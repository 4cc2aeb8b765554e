"""`moe-rl plan --export` and `moe-rl simulate --expert-map`: files, figures, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runner import EXPERTS, LAYERS, moe_rl, routes, snapshot

from moe_rl.core.trace import RoutingTrace
from moe_rl.rollout_engines import ROLLOUT_ENGINES, read_expert_map
from moe_rl.rollout_engines.base import RunShape
from moe_rl.study import SimulationOptions, merge_options
from moe_rl.study.rollout_map import plan_rollout_map
from moe_rl.study.traces import TraceInMemory

BATCH = ("--ep", 4, "--ep-group-tokens", 12)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The hottest experts have the highest ids, of which the start map holds no copies."""
    path = tmp_path / "good.npz"
    np.savez(path, **{f"s{index}": EXPERTS - 1 - routes(40, seed=index) for index in range(24)})
    return path


@pytest.mark.parametrize("engine", ROLLOUT_ENGINES.names)
def test_a_map_is_written_scored_and_read_back(engine: str, trace: Path, tmp_path: Path) -> None:
    out, slots = tmp_path / "map.json", 1
    ran = moe_rl("plan", trace, *BATCH, "--resident-slots", slots, "--export", engine, "-o", out, "--json", "-")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    choices = [choice.name for choice in ROLLOUT_ENGINES[engine].choices]
    for name in ("start", "eplb", "moe-rl"):
        assert list(document["maps"][name]["choices"]) == choices
    best = {name: min(s["imbalance"] for s in of["choices"].values()) for name, of in document["maps"].items()}
    assert 1 <= best["moe-rl"] < best["start"]
    assert document["maps"]["moe-rl"]["twins"] == 0
    shape = RunShape(num_layers=LAYERS, moe_layer_ids=tuple(range(LAYERS)), num_experts=EXPERTS, ep_size=4)
    found, read = read_expert_map(out, shape)
    assert found.name == engine
    assert read.slots_per_rank == EXPERTS // 4 + slots
    origin = json.loads((tmp_path / f"{out.name}.provenance.json").read_text())
    assert origin["maps"] == document["maps"]
    assert len(origin["trace_sha256"]) == 64
    assert any(str(out) in line for line in ran.err.splitlines())

    again = moe_rl("simulate", trace, *BATCH, "--expert-map", out, "--json", tmp_path / "scores.json")
    assert again.code == 0, again.err
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["maps"][out.name] == document["maps"]["moe-rl"]
    assert scores["maps"]["eplb"] == document["maps"]["eplb"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--export", "sglnag", "-o", "m.json"), "unknown rollout engine 'sglnag'. Did you mean 'sglang'?"),
        (("--export", "sglang", "-o", "m.yaml"), "--out m.yaml must end in .json"),
        (
            ("--export", "sglang", "--resident-slots", 7, "-o", "m.json"),
            "gives each rank 9 slots, but the model has only 8 experts",
        ),
        (("--export", "sglang", "--policy", "ultraep", "-o", "m.json"), "leave --policy out"),
        (("--export", "sglang", "--micro-batch-tokens", 8, "-o", "m.json"), "applies to training only"),
        (("--export", "sglang", "--ep", 3, "-o", "m.json"), "--ep 3 does not divide the 8 experts"),
        (("--export", "sglang", "--step", 3, "-o", "m.json"), "does not have step 3"),
        (("--policy", "moe-rl", "-o", "m.npz", "--json", "-"), "--json works only with --export"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(
    arguments: tuple[Any, ...], sentence: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    ran = moe_rl("plan", trace, "--ep", 4, *arguments)
    assert ran.code == 2
    assert sentence in " ".join(ran.err.split())
    assert snapshot(tmp_path) == before


def test_counts_alone_and_pictures_are_refused(trace: Path, tmp_path: Path) -> None:
    counts = tmp_path / "counts.moetrace"
    assert moe_rl("trace", "convert", trace, counts, "--counts-only", "--num-experts", 8).code == 0
    ran = moe_rl("plan", counts, "--ep", 4, "--export", "sglang", "-o", tmp_path / "m.json")
    assert ran.code == 2
    assert "contains only counts, but the routes of individual tokens are needed" in ran.err
    ran = moe_rl("simulate", trace, "--expert-map", tmp_path / "m.json", "--html", tmp_path / "page.html")
    assert ran.code == 2
    assert "so it cannot be combined with --html" in ran.err


def traced(num_groups: int, *, steps: int = 1, experts: int = EXPERTS) -> RoutingTrace:
    count = 4 * num_groups * steps
    return RoutingTrace.from_sequences(
        [routes(10, seed=index, experts=experts, top_k=min(2, experts)) for index in range(count)],
        num_experts=experts,
        group_id=np.arange(count) // 4,
        step=np.repeat(np.arange(steps), count // steps),
    )


def planned_on(trace: RoutingTrace, **given: Any) -> Any:
    options = merge_options(SimulationOptions, {"expert_model_parallel_size": 2, **given})
    return plan_rollout_map(TraceInMemory.take(trace), "sglang", options)


@pytest.mark.lengthy
def test_it_is_scored_on_what_it_was_not_planned_on() -> None:
    two_steps = planned_on(traced(2, steps=3))
    assert (two_steps.facts["planned_on"], two_steps.facts["scored_on"]) == ("step 1", "step 2")
    groups = planned_on(traced(3))
    assert "the other prompt groups" in str(groups.facts["scored_on"])
    alone = planned_on(traced(1))
    assert any("scored on the sequences that it was planned for" in note for note in alone.notes)


def test_one_expert_and_one_rank_have_maps_too() -> None:
    one = planned_on(traced(2, experts=1), expert_model_parallel_size=1)
    assert one.expert_map.slots.tolist() == [[0]] * LAYERS
    assert one.scores["moe-rl"]["static"].imbalance == 1
    rank = planned_on(traced(2), expert_model_parallel_size=1)
    assert rank.scores["moe-rl"]["dynamic"].imbalance == 1
