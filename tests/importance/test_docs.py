"""The documentation's example runs as printed, and its tables name what exists."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks.make_tables import BLOCK, renewed
from moe_rl.importance import LOSS_AGG_MODES, OBJECTIVES, ROLLOUT_PRESETS, PolicyLossInputs
from moe_rl.importance.objectives.base import Level, Widths

PAGE = Path(__file__).parents[2] / "docs" / "importance.md"


def test_the_example_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    grad = names["log_prob"].grad  # type: ignore[attr-defined]
    assert isinstance(grad, torch.Tensor)
    assert grad.isfinite().all()
    kept = names["kept"]
    assert isinstance(kept, torch.Tensor)
    assert torch.equal(grad[~kept], torch.zeros_like(grad[~kept]))
    # Group 2 has equal rewards and so no gradient; group 1 has one.
    assert grad[:2].abs().sum() > 0
    assert grad[2:].abs().sum() == 0
    assert re.search(r"gamma 0\.9\d\d", capsys.readouterr().out)


def test_the_table_of_objectives_is_what_the_registry_says() -> None:
    text = PAGE.read_text()
    assert BLOCK.sub(renewed, text) == text, "run: make tables"


def test_every_objective_declares_its_facts() -> None:
    known = {field.name for field in dataclasses.fields(PolicyLossInputs)}
    for entry in OBJECTIVES:
        assert entry.formula
        assert entry.source
        assert set(entry.needs) <= known
        assert entry.default_loss_agg_mode in LOSS_AGG_MODES
        assert entry.ratio_level in get_args(Level)
        assert entry.widths in get_args(Widths)


def test_the_presets_on_the_page_exist() -> None:
    named = set(re.findall(r"`((?:decoupled|bypass)_(?!ppo`|policy)\w+)`", PAGE.read_text()))
    assert len(named) > 5
    assert named <= set(ROLLOUT_PRESETS)
