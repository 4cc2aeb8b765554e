"""`moe-rl demo --train` from the run to its pages, on a model that has learned next to nothing."""

from pathlib import Path

import pytest
from cli_runner import moe_rl

from moe_rl.cli.train_demo import train_demo
from moe_rl.core.errors import InvalidInputError

TINY = (
    "num_steps=2",
    "world_size=2",
    "model={num_layers: 1, hidden_size: 32, moe_ffn_hidden_size: 16}",
    "warm_start={num_updates: 2, batch_problems: 4}",
    "rollout={problems_per_step: 2, group_size: 2, precision: fp8-block}",
    "train={num_mini_batches: 1, micro_batch_size: 2, compare_replay: true}",
    "evaluation={every: 1, num_problems: 2, group_size: 1}",
)


@pytest.mark.multi_rank
def test_the_training_demo_ends_with_a_report_of_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page = tmp_path / "page.html"
    train_demo(page, command="moe-rl demo --train", overrides=(*TINY, f"out={tmp_path / 'run'}"))
    printed = capsys.readouterr()
    phases = (
        "a training run",
        "2 steps of GRPO",
        "loading",
        "supervised start: 2",
        "starting 2 processes",
        "simulating",
    )
    places = [printed.err.index(phase) for phase in phases]
    assert places == sorted(places)
    shown = printed.out
    for words in ("held-out accuracy", "without replay", "busiest rank, predicted", "moe-rl"):
        assert words in shown
    content = page.read_text()
    assert content.count("<svg") >= 2
    assert "page-projection.html" in content
    assert "EP8" in content
    assert "<svg" in (tmp_path / "page-projection.html").read_text()


def test_the_training_demo_says_which_options_it_does_not_have(tmp_path: Path) -> None:
    ran = moe_rl("demo", "--train", "--cluster", "h100", "--ep", 4)
    assert ran.code == 2
    assert "so it cannot be combined with --ep, --cluster" in ran.err


def test_without_a_checkout_one_sentence_says_where_the_run_is(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="only in a checkout of moe_rl"):
        train_demo(None, command="moe-rl demo --train", checkout=tmp_path)
