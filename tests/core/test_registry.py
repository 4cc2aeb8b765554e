"""Entries by name: order, refusals, and what other packages add."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.registry import Registry


@dataclass(frozen=True)
class Tool:
    name: str
    weight: int = 1


def test_entries_are_found_by_name_in_the_order_of_registration() -> None:
    tools = Registry("tool", [Tool("saw"), Tool("axe")])
    added = tools.register(Tool("file", 3))
    assert tools.names == ("saw", "axe", "file")
    assert [tool.name for tool in tools] == list(tools.names)
    assert tools["file"] is added
    assert ("axe" in tools, "hammer" in tools, len(tools)) == (True, False, 3)


def test_a_class_that_names_itself_is_registered_by_decorating_it() -> None:
    kinds: Registry[type] = Registry("kind")

    @kinds.register
    class Kind:
        name: ClassVar[str] = "kind"

    assert kinds["kind"] is Kind


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidInputError, match=r"^unknown tool 'ax'\. Did you mean 'axe'\?$"):
        Registry("tool", [Tool("saw"), Tool("axe")])["ax"]


def test_a_taken_name_no_name_and_a_failed_check_are_refused() -> None:
    def heavy(tool: Tool) -> None:
        require(tool.weight > 1, f"{tool.name} is too light.")

    tools = Registry("tool", [Tool("saw", 2)], check=heavy)
    with pytest.raises(InvalidInputError, match="already"):
        tools.register(Tool("saw", 2))
    with pytest.raises(InvalidInputError, match="needs a name"):
        tools.register(Tool(""))
    with pytest.raises(InvalidInputError, match="axe is too light"):
        tools.register(Tool("axe"))
    assert tools.names == ("saw",)


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution on the path whose module offers what each test writes into it."""
    info = tmp_path / "other_tools-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-tools\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[test.tools]\nplane = other_tools_module:PLANE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "other_tools_module.py"
    sys.modules.pop("other_tools_module", None)


def test_another_package_adds_an_entry_which_is_loaded_when_the_registry_is_first_read(other_package: Path) -> None:
    tools = Registry("tool", [Tool("saw")], group="test.tools")
    other_package.write_text("class PLANE:\n    name = 'plane'\n")
    assert "other_tools_module" not in sys.modules
    assert tools.names == ("saw", "plane")
    assert tools["plane"].name == "plane"


@pytest.mark.parametrize(
    ("source", "reason"),
    [("raise ImportError('no blade')", "no blade"), ("PLANE = 3", "needs a name"), ("", "no attribute|PLANE")],
)
def test_a_package_whose_entry_cannot_be_used_is_named(other_package: Path, source: str, reason: str) -> None:
    other_package.write_text(source)
    tools = Registry("tool", [Tool("saw")], group="test.tools")
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=rf"^the tool 'plane' of other-tools .*({reason})"):
            tools["saw"]
