"""A whole run, killed and resumed: the same curve as one that was left alone, and no process left behind."""

import importlib
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.countdown.config import load_config
from examples.countdown.run import run
from moe_rl.core.errors import InvalidInputError

pytestmark = pytest.mark.example
ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
kill_trials = importlib.import_module("benchmarks.kill_trials")

SHORT = {"num_steps": 4}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("countdown-run") / "reference"
    kill_trials.uninterrupted(folder, **SHORT)
    return folder


@pytest.mark.multi_rank
def test_a_run_logs_its_curve_and_its_trace_and_learns_from_the_same_weights(reference: Path) -> None:
    curve = kill_trials.curve_of(reference)
    assert [line["step"] for line in curve] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in curve if "evaluation/accuracy" in line] == [0, 3, 4]
    for line in curve[1:]:
        assert abs(line["mismatch/k3_kl"]) <= 1e-6
        assert line["export/max_token_k3"] <= 1e-6
        assert line["moe_rl/misplaced_share"] == 0.0
        assert line["moe_rl/fallback"] == 0.0
        assert line["moe_rl/imbalance"] <= line["moe_rl/static_imbalance"]
    assert any(line["train/grad_norm"] > 0 for line in curve[1:]), "no reward differed: nothing was learned from"
    assert [line["step"] for line in curve if "moe_rl/moved_experts" in line] == [1, 4]
    trace = kill_trials.TraceReader(reference / "run" / "trace.moetrace").load()
    assert trace.num_sequences == 4 * 4 * 4
    assert len(set(trace.group_id.tolist())) == 4 * 4, "a prompt group per problem"
    assert set(trace.policy_version.tolist()) == {0, 1, 2, 3}
    assert not trace.valid[trace.cu_seqlens[1:] - 1].any(), "a last token has no route"
    assert list((reference / "run" / "tensorboard").iterdir())


@pytest.mark.multi_rank
def test_a_run_is_not_started_over_another_one(reference: Path) -> None:
    before = (reference / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(InvalidInputError, match=r"already contains a run: resume it \(--resume\), or replace it"):
        run(load_config(reference / "small.yaml"))
    other = load_config(reference / "small.yaml", ["seed=1", "train.objective=gspo"])
    with pytest.raises(InvalidInputError, match="has a run with a different seed, train: it cannot be resumed"):
        run(other, resume=True)
    assert (reference / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.multi_rank
def test_a_killed_run_resumes_to_the_same_curve(reference: Path) -> None:
    shutil.copytree(reference.parent / "cache", reference.parent / "killed" / "cache")
    trial = kill_trials.kill_and_resume(
        reference.parent / "killed" / "trial", kill_trials.curve_of(reference), random.Random(3), **SHORT
    )
    assert trial.problem == ""


@pytest.mark.slow
@pytest.mark.multi_rank
def test_a_run_in_bfloat16_with_fp8_experts_on_both_sides(reference: Path, tmp_path: Path) -> None:
    shutil.copytree(reference.parent / "cache", tmp_path / "cache")
    sections: dict[str, dict[str, Any]] = {
        "train": {"precision": "bfloat16", "compare_replay": True},
        "rollout": {"precision": "fp8-block"},
        "balancer": {"experts": "grouped", "recipe": "fp8-block"},
    }
    changes = {name: {**kill_trials.SMALL[name], **section} for name, section in sections.items()}
    curve = kill_trials.uninterrupted(tmp_path / "bf16", num_steps=2, **changes)
    assert [line["step"] for line in curve] == [0, 1, 2]
    for line in curve[1:]:
        assert line["export/max_token_k3"] <= 1e-6, "the check is of float32, whatever the run computes in"
        # bfloat16 keeps 8 bits; weights of another policy differ by 0.1 and more.
        assert 0 < line["mismatch/max_logprob_diff"] < 0.1
        assert line["moe_rl/misplaced_share"] == 0.0


@pytest.mark.slow
@pytest.mark.multi_rank
def test_twenty_kills_lose_nothing_but_the_current_step(tmp_path: Path) -> None:
    assert kill_trials.main(["--trials", "20", "--folder", str(tmp_path)]) == 0
