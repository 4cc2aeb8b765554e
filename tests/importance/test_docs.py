"""The documentation's example runs as printed, and its tables name what exists."""

import re
from pathlib import Path

import pytest
import torch

from moe_rl.importance import OBJECTIVES, RolloutCorrectionConfig

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


def test_every_objective_is_on_the_page() -> None:
    table = PAGE.read_text().split("## Objectives")[1].split("## Edge cases")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(OBJECTIVES)


def test_the_presets_on_the_page_exist() -> None:
    for name in re.findall(r"`(?:RolloutCorrectionConfig\.)?((?:decoupled|bypass)_\w+)\(", PAGE.read_text()):
        assert callable(getattr(RolloutCorrectionConfig, name))
