"""docs/doctor.md is what the registry says, and its commands exist."""

import re
import shlex
from pathlib import Path

from benchmarks.make_tables import BLOCK, renewed
from moe_rl.cli.commands import command_named
from moe_rl.doctor.checks.registry import TRAPS
from moe_rl.launch.readers import READERS

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_lists_the_traps_of_the_registry() -> None:
    assert BLOCK.sub(renewed, TEXT) == TEXT, "run: make tables"
    assert re.findall(r"^### `(.*)`$", TEXT, flags=re.MULTILINE) == [trap.name for trap in TRAPS]


def test_every_framework_is_on_the_page() -> None:
    table = TEXT.split("## What it reads")[1].split("##")[0]
    assert all(reader.title in table for reader in READERS)


def test_the_commands_of_the_page_have_only_known_options() -> None:
    command = command_named("doctor")
    known = {name for parameter in command.params for name in parameter.opts}
    lines = [line for line in TEXT.splitlines() if line.startswith("moe-rl doctor")]
    assert len(lines) > 3
    for line in lines:
        words = set(shlex.split(line, comments=True)) - {"-"}  # standard output
        assert {word for word in words if word.startswith("-")} <= known
