"""Every adapter to a framework has its page, at most three lines for a user, and the symbols that it relies on."""

from pathlib import Path

import pytest

from moe_rl.core import frameworks as core_frameworks
from moe_rl.frameworks import FRAMEWORKS
from moe_rl.frameworks.contract import Framework

REGISTRY = FRAMEWORKS
DOCS = Path(__file__).parents[2] / "docs" / "frameworks"

every_adapter = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda each: each.name)


@every_adapter
def test_a_user_writes_three_lines_at_most(framework: Framework) -> None:
    assert 1 <= len([line for line in framework.lines if not line.startswith("pip install ")]) <= 3


@every_adapter
def test_it_says_how_replay_goes_on_and_which_rows_have_no_route(framework: Framework) -> None:
    assert framework.facts[0].startswith("Replay: ")
    assert any(fact.startswith("Tokens without a route: ") for fact in framework.facts)
    assert all(fact.endswith(".") for fact in framework.facts)


@every_adapter
def test_its_symbols_are_named_once_and_where_they_are(framework: Framework) -> None:
    names = [symbol.name for symbol in framework.symbols + framework.beside]
    assert len(set(names)) == len(names) > 0
    assert all(":" in name for name in names)


@every_adapter
def test_its_page_is_linked(framework: Framework) -> None:
    if framework.name not in core_frameworks.FRAMEWORKS:
        pytest.skip("another package has its own page")
    pages = {"megatron": "megatron-loops.md", "trl": "transformers.md", "miles": "slime.md"}
    page = pages.get(framework.name, f"{framework.name}.md")
    assert (DOCS / page).is_file()
    assert f"({page})" in (DOCS / "README.md").read_text()
