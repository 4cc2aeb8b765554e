"""The documentation's example runs as printed, and its tables name what exists."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.make_tables import BLOCK, renewed
from moe_rl.importance import (
    LOSS_AGG_MODES,
    OBJECTIVES,
    ROLLOUT_PRESETS,
    PolicyLossInputs,
)
from moe_rl.importance.objectives.base import Level, Widths

DOCS = Path(__file__).parents[2] / "docs"
PAGE, REFERENCE = DOCS / "importance.md", DOCS / "importance-reference.md"


def test_the_trainer_of_the_page_learns(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    trainer = max(blocks, key=len)  # the other is a fragment
    exec(compile(trainer, str(PAGE), "exec"), {"__name__": "trainer"})
    lines = capsys.readouterr().out.splitlines()
    first, last = (float(re.search(r"reward ([\d.]+), gamma 0\.\d+", line)[1]) for line in (lines[0], lines[-1]))  # type: ignore[index]
    assert last > 0.8  # 1 / 8 by chance
    assert last >= first - 0.05


def test_the_tables_of_the_reference_are_what_the_code_says() -> None:
    pytest.importorskip("megatron.core", reason="slime's entry asks Megatron for its groups")
    text = REFERENCE.read_text()
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
    named = set(re.findall(r"`((?:decoupled|bypass)_(?!ppo`|policy)\w+)`", PAGE.read_text() + REFERENCE.read_text()))
    assert len(named) > 5
    assert named <= set(ROLLOUT_PRESETS)
