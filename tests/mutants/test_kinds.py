"""Every kind of fault finds its place in a source, and what it makes of it is another program that compiles."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCE = '''
def moved(self, a, b):
    """Größe: columns of a tree are bytes."""
    self._kept = a[1:] - b
    self.total += 1
    self.work.wait()
    if a < b:
        dist.all_reduce(a, group=self.group)
    return self.placement, swap(a, b)
'''
EXPECTED = {
    "off by one": {"a[2:] - b", "a <= b"},
    "wrong group": {"group=None"},
    "missing wait": {"    pass\n    if"},
    "dropped fold": {"    pass\n    self.work"},
    "stale homes": {"    pass\n    self.total", "return self.own_placement"},
    "swapped operands": {"(b) - (a[1:])", "swap(b, a)"},
    "other branch": {"if not (a < b)"},
}


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(TESTS))
    from mutants import kinds

    return kinds


def test_a_kind_makes_of_a_line_what_its_name_says(kinds) -> None:  # type: ignore[no-untyped-def]
    edits = kinds.edits_of(SOURCE)
    assert {edit.kind for edit in edits} == set(EXPECTED)
    for edit in edits:
        changed = kinds.applied(SOURCE, edit)
        ast.parse(changed)
        assert any(text in changed and text not in SOURCE for text in EXPECTED[edit.kind]), changed
    for kind, texts in EXPECTED.items():
        for text in texts:
            assert any(text in kinds.applied(SOURCE, edit) for edit in edits if edit.kind == kind), (kind, text)


def test_a_mutant_is_imported_in_the_place_of_its_module(tmp_path: Path) -> None:
    mutant = tmp_path / "mutant.py"
    mutant.write_text("THERE = 1\n")
    environment = {
        "PYTHONPATH": str(TESTS / "mutants" / "hook"),
        "MOE_RL_TEST_MUTANT_MODULE": "moe_rl.core.metrics",
        "MOE_RL_TEST_MUTANT_FILE": str(mutant),
    }
    ask = "import moe_rl.core.metrics as m; print(m.THERE)"
    ran = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout == "1\n", ran.stderr
