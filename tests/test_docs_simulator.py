"""docs/simulator.md: its commands and options exist, and its tables name what exists."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.validate_model.compare import PUBLISHED
from moe_rl.cli.commands import command_named
from moe_rl.profiling.calibration import CONSTANTS
from moe_rl.profiling.measurements import Measurement
from moe_rl.study.options import BUNDLED_SETTINGS

PAGE = Path(__file__).parents[1] / "docs" / "simulator.md"


def commands() -> list[list[str]]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if not language]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("moe-rl ")]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_and_option_on_the_page_exists(words: list[str]) -> None:
    command = command_named(words[1])
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


def test_every_command_of_this_page_is_shown() -> None:
    shown = {"demo", "profile", "calibrate", "simulate", "sweep", "rl-step"}
    assert {words[1] for words in commands()} == shown


def test_every_constant_and_column_is_named() -> None:
    text = PAGE.read_text()
    for name in (*CONSTANTS, *Measurement.__annotations__):
        assert f"`{name}`" in text, name


def test_the_error_table_has_a_row_for_every_published_set() -> None:
    titles = {
        line.split(":", 1)[1].strip().strip("\"'")
        for path in PUBLISHED.glob("*.yaml")
        for line in path.read_text().splitlines()
        if line.startswith("title:")
    }
    assert titles
    for title in titles:
        assert title in PAGE.read_text(), title


def test_the_sweep_of_the_page_finds_its_files() -> None:
    names = [words[words.index("--config") + 1] for words in commands() if "--config" in words]
    assert names
    for name in names:
        assert (BUNDLED_SETTINGS / f"{name}.yaml").exists(), name
