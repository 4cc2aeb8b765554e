"""Every page: its links lead somewhere, and the commands that it shows exist with their options and targets."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks, name, shell_lines, words

from benchmarks.make_tables import BLOCK, renewed
from moe_rl.cli.commands import command_named
from moe_rl.core.native import native_core

LINK = re.compile(
    r"\[[^\]]*\]\((?!https?://|mailto:)(?P<target>[^)\s]*)\)|(?:src|srcset|href)=\"(?!https?:)(?P<source>[^\"]+)\""
)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for found in LINK.finditer(CODE.sub("", page.read_text())):
        path, _, anchor = (found["target"] or found["source"]).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), found[0]
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), found[0]


def command_of(line: str) -> tuple[list[str], set[str]]:
    """Return the words of a `moe-rl` line and the options of the command that it calls."""
    given = words(line.removeprefix("$ "))
    command, place = command_named(given[1]), 2
    while hasattr(command, "commands") and place < len(given) and not given[place].startswith("-"):
        command = command.commands[given[place]]
        place += 1
    return given, {option for parameter in command.params for option in parameter.opts} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_and_option_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shell_lines(page.read_text()):
        if line.startswith("moe-rl "):
            given, known = command_of(line)
            assert {word.split("=")[0] for word in given if word.startswith("--")} <= known, line
        elif line.startswith("make "):
            asked = [word for word in words(line)[1:] if "=" not in word]
            assert set(asked) <= targets, line
        elif line.startswith("python ") and words(line)[1].endswith(".py"):
            assert (ROOT / words(line)[1]).exists(), line


@pytest.mark.filterwarnings("ignore")  # of megatron-core, imported for its attach function's docstring
@pytest.mark.parametrize(
    "page",
    [
        *("docs/traces.md", "docs/reference/python.md", "docs/reference/options.md", "docs/kernels.md"),
        pytest.param("README.md", marks=pytest.mark.lengthy),  # runs the demo
    ],
)
def test_what_a_page_takes_from_the_code_is_what_the_code_says(page: str) -> None:
    if page == "README.md" and native_core() is None:
        pytest.skip("the demo's figures are those of the C++ core")
    text = (ROOT / page).read_text()
    assert BLOCK.sub(renewed, text) == text, "make tables"


@pytest.mark.lengthy
def test_the_python_block_of_the_readme_prints_the_table_below_it() -> None:
    """It is the demo: the rows of `make demo`, which the page shows, and its headline."""
    if native_core() is None:
        pytest.skip("the demo's figures are those of the C++ core")
    text = (ROOT / "README.md").read_text()
    (block,) = (block.python for block in blocks(text) if block.python)
    program = block.replace('report.save("out/report.html")\n', "")
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    (shown,) = re.findall(r"<!-- begin: terminal moe-rl demo -->\n```text\n(.*?)```", text, re.DOTALL)
    assert words_of(ran.stdout) == words_of(shown)


def words_of(table: str) -> list[str]:
    """The words and figures of a printed table, without its lines and the ends of lines."""
    return [word for word in table.split() if set(word) != {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"}]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_has_syntax_that_github_shows_as_it_is(page: Path) -> None:
    assert not re.search(r"^(:::|===|!!!|\?\?\?) ", CODE.sub("", page.read_text()), re.MULTILINE)


def test_all_commands_of_the_tutorial_are_about_one_run() -> None:
    """Another model, batch, layout or token budget would be another question: `tune` has them in `--current`, too."""
    text = (ROOT / "docs" / "tutorials" / "trace.md").read_text()
    options = [options_of(line) for line in shell_lines(text) if "--global-batch-size" in line]
    simulated, perturbed, tuned, rl_step = options
    run = simulated.items() - {("--html", "report.html"), ("--json", "report.json")}
    assert perturbed.items() - {("--sensitivity", "")} == run
    assert rl_step.items() - {("--prompt-tokens", rl_step["--prompt-tokens"])} == run
    searched = {"--ep": "ep", "--micro-batch-tokens": "tokens", "--recompute-granularity": "recompute"}
    current = ",".join(f"{name}={simulated[flag]}" for flag, name in searched.items())
    assert tuned.items() == {item for item in run if item[0] not in searched} | {("--current", current)}
    for option in ("--layout", "--software"):
        assert f"- **`{option}`** " in text


def options_of(line: str) -> dict[str, str]:
    """Return the flags of a command with their values, empty where a flag has none."""
    arguments = words(line)
    values = dict[str, str]()
    for flag, value in zip(arguments, [*arguments[1:], "--"], strict=True):
        if flag.startswith("--"):
            values[flag] = "" if value.startswith("--") else value
    return values
