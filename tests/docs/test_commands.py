"""Every command of the pages is run by a test, or the page says above it why not.

`<!-- not run by a test: REASON -->` stands above a block whose commands need what no test has. All others are run by
`.ci/run` (make), by the test of their page, or here, in a folder that holds the files that the pages speak of.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cli_runner import moe_rl
from pages import PAGES, ROOT, blocks, inline_commands, name, words

FOLLOWED = "docs/tutorials/trace.md"
"""The page whose commands tests/docs/test_tutorial.py runs, for every engine in turn."""
START = {
    "moe-rl": [sys.executable, "-c", "from moe_rl.cli import main; main()"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
READ_BY_THE_DOCTOR = {
    "slime/train_fp8.sh": "run.sh",
    "slime/models/qwen3_moe.sh": "model.sh",
    "megatron/arguments.log": "train.log",
    "nemo_rl/qwen3_moe.yaml": "recipe.yaml",
}
ELSEWHERE = {
    "quick": "a part of `make test`",
    "test-docs": "runs this file, and takes minutes",
    "gpu-pack": "minutes of compiling; tests/kernels holds that what it makes is of these kernels",
    "kernel-carried": "minutes of an emulator; six of its launches are part of `make test`",
    "test-first-call": "brings another Python and torch; tests/kernels runs the same on this one",
    "kernel-proof": "minutes of compiling; tests/kernels compiles the same launches",
}
"""Targets of make that `.ci/run` leaves out, and why."""
DOCTOR_FOUND = 1
"""`moe-rl doctor` ends with it when a run has an error; what it reads here has some."""


def left_to_make(line: str) -> bool:
    targets = {words(step)[1] for step in (ROOT / ".ci" / "run").read_text().splitlines() if step.startswith("make ")}
    return line.startswith("make ") and set(words(line)[1:]) <= targets | ELSEWHERE.keys()


def commands(page: Path) -> list[str]:
    """Return the commands of a page that are run here, in their order."""
    if name(page) == FOLLOWED:
        return []
    found = [line for block in blocks(page.read_text()) if block.reason is None for line in block.lines]
    found += [line for line in inline_commands(page.read_text()) if line not in INLINE_ELSEWHERE and is_whole(line)]
    return [line for line in found if not left_to_make(line)]


INLINE_ELSEWHERE = {
    "moe-rl bench planner --sections speed": "minutes of planning; tests/test_cli_bench.py runs its sections on less",
    "moe-rl demo --train": "tests/test_cli_train_demo.py",
    "moe-rl advise metrics.jsonl": "the file is a run's own; tests/countdown makes one",
}
"""Commands within sentences that are run, or need what no test has; where or why."""
FILES = ("run.moetrace", "run.sh", "configs/traces/countdown-grpo.moetrace", "countdown-grpo")
WITHOUT_FILE = ("clusters", "demo", "models", "policies")


def is_whole(line: str) -> bool:
    """Whether a command within a sentence can be run: others name a command, or an option of one."""
    arguments = words(line)[1:]
    reads_a_file = any(file in arguments for file in FILES) and not any(word.isupper() for word in arguments)
    return (
        reads_a_file
        or arguments[0] in WITHOUT_FILE
        or {"--help", "--help-all", "--framework"} & set(arguments) != set()
    )


PAGES_WITH_COMMANDS = [page for page in PAGES if commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_command_that_no_test_runs_has_a_reason(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.reason is not None:
            assert len(block.reason.split()) >= 3, block
    for line in commands(page):
        assert words(line)[0] in START, f"{line}: what is this? Say above it why no test runs it."
        assert "..." not in line, line


@pytest.fixture(scope="module")
def options_of() -> Callable[[tuple[str, ...]], set[str]]:
    """The options of a command by its words, as its help has them."""

    @cache
    def options(command: tuple[str, ...]) -> set[str]:
        shown = [moe_rl(*command, flag) for flag in ("--help", "--help-all")]
        assert shown[0].code == 0, f"{command}: {shown[0].err}"
        return set(re.findall(r"--?[a-z][a-z0-9-]*", "".join(ran.out for ran in shown)))

    return options


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_command_within_a_sentence_exists_with_its_options(
    page: Path, options_of: Callable[[tuple[str, ...]], set[str]]
) -> None:
    for line in inline_commands(page.read_text()):
        arguments = words(line)[1:]
        group = 2 if arguments[0] in ("trace", "replay", "bench") and len(arguments) > 1 else 1
        command = tuple(word for word in arguments[:group] if not word.startswith("-"))
        known = options_of(command)
        for word in arguments[len(command) :]:
            assert not word.startswith("-") or word in known, f"{line}: {word} is no option of {' '.join(command)}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages speak of, made by the commands that make them."""
    made = tmp_path_factory.mktemp("reader")
    for path in ("examples", "benchmarks", "configs", "moe_rl", "tests"):
        (made / path).symlink_to(ROOT / path)
    shape = "--num-layers 48 --num-experts 128 --moe-router-topk 8"  # of qwen3-30b-a3b
    run(f"moe-rl trace synth grpo run.moetrace {shape} --option num_steps=1 --option num_sequences=64", made)
    shutil.copytree(made / "run.moetrace", made / "today.moetrace")
    shutil.copy(ROOT / "configs" / "clusters" / "h100.yaml", made / "mine.yaml")
    fixtures = ROOT / "tests" / "doctor" / "fixtures"
    shutil.copytree(fixtures / "slime" / "models", made / "models")
    for source, target in READ_BY_THE_DOCTOR.items():
        shutil.copy(fixtures / source, made / target)
    return made


def environment(folder: Path) -> dict[str, str]:
    """A reader's shell: kernels are not interpreted unless the page says so."""
    of_reader = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**of_reader, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}


def run(line: str, folder: Path) -> None:
    program, *arguments = words(line)
    ran = subprocess.run(
        [*START[program], *arguments], cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
    )
    allowed = (0, DOCTOR_FOUND) if arguments[:1] == ["doctor"] else (0,)
    assert ran.returncode in allowed, f"{line}\n{ran.stdout}{ran.stderr}"


PASTED = [
    ROOT / "README.md", ROOT / "docs" / "reference" / "python.md", ROOT / "docs" / "importance.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]  # fmt: skip
"""Pages of which a newcomer pastes every block."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PASTED, ids=name)
def test_the_python_of_a_page_runs_as_pasted(page: Path, folder: Path) -> None:
    for block in blocks(page.read_text()):
        if block.python and block.reason is None:
            command = [sys.executable, "-c", block.python]
            ran = subprocess.run(
                command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
            )
            assert ran.returncode == 0, block.python + ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=name)
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    for line in commands(page):
        run(line, folder)
