"""Every kind of fault finds its place in a source, and what it makes of it is another program that compiles."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCE = '''
import torch.distributed as dist

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
    "off by one": {"a[2:] - b", "(a) <= (b)"},
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


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(TESTS))
    from mutants import __main__ as program

    return program


def test_a_kind_makes_of_a_line_what_its_name_says(kinds) -> None:  # type: ignore[no-untyped-def]
    edits = [edit for edit in kinds.edits_of(SOURCE) if kinds.is_fault(SOURCE, edit)]
    assert {edit.kind for edit in edits} == set(EXPECTED)
    for edit in edits:
        changed = kinds.applied(SOURCE, edit)
        ast.parse(changed)
        assert any(text in changed and text not in SOURCE for text in EXPECTED[edit.kind]), changed
    for kind, texts in EXPECTED.items():
        for text in texts:
            assert any(text in kinds.applied(SOURCE, edit) for edit in edits if edit.kind == kind), (kind, text)


def test_what_is_symmetric_is_not_swapped(kinds) -> None:  # type: ignore[no-untyped-def]
    assert not kinds.edits_of("a = max(b, c) + torch.equal(b, c) + _same_layout(b, c) + option_in(b, c)\n")
    assert not kinds.edits_of("a = np.abs(b - c) + abs(d - e)\n")
    assert [edit.text for edit in kinds.edits_of("a = np.abs((b - c) - d)\n")] == ["(c) - (b)"]


def test_texts_and_annotations_stay_as_they_are(kinds) -> None:  # type: ignore[no-untyped-def]
    """A sentence that says another number is a fault that only a test of its words could see."""
    assert not kinds.edits_of('def f(a: "x[1:]") -> "y[1:]":\n    log(f"{a[1:]} of {a - 1}")\n')


def test_every_mutated_module_has_tests_of_its_own_that_exist(program) -> None:  # type: ignore[no-untyped-def]
    entries = {name: program.entry_of(name) for name, _ in program.modules() if name not in program.PARTS}
    assert not [name for name, entry in entries.items() if entry in program.PARTS], "an entry below its room's"
    unused = set(program.COVER) - set(entries.values()) - set(program.PARTS)
    assert not unused, "of modules that are gone"
    files = {file for tests in program.COVER.values() for file in tests}
    assert not [file for file in files if not (program.ROOT / file).exists()]


def test_of_a_small_draw_as_many_may_live_as_chance_brings(program) -> None:  # type: ignore[no-untyped-def]
    assert [program.most_alive(count) for count in (1, 10, 100, 200)] == [1, 4, 5, 10]


def test_a_mutant_is_imported_in_the_place_of_its_module_and_finds_what_lies_beside_it(tmp_path: Path) -> None:
    mutant, module = tmp_path / "mutant.py", TESTS.parent / "moe_rl" / "core" / "metrics.py"
    mutant.write_text("def there():\n    return __file__\n")
    environment = {
        "PYTHONPATH": str(TESTS / "mutants" / "hook"),
        "MOE_RL_TEST_MUTANT_MODULE": "moe_rl.core.metrics",
        "MOE_RL_TEST_MUTANT_FILE": str(module),
        "MOE_RL_TEST_MUTANT_TEXT": str(mutant),
    }
    ask = "import inspect, moe_rl.core.metrics as m; print(m.there(), inspect.getsource(m.there), sep='\\n', end='')"
    ran = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout == f"{module}\n{mutant.read_text()}", ran.stderr


def test_what_python_refuses_and_what_is_the_same_program_is_no_mutant(kinds) -> None:  # type: ignore[no-untyped-def]
    same = """
if isinstance(a, Layer) and get_tensor_model_parallel_world_size() > 1 and same_places(old, new):
    sentence += f"{name} is set"
"""
    assert {edit.kind for edit in kinds.edits_of(same)} == {"other branch"}
    samples = "read(name, group=group)\nRecordedSequence(group=group)\n"
    assert not kinds.edits_of(samples)
    assert len(kinds.edits_of("import torch\ndist.all_reduce(rows, group=group)\nTransport(group=group)\n")) == 2


def test_an_edit_is_reached_by_the_lines_of_its_own_statement(kinds) -> None:  # type: ignore[no-untyped-def]
    text = "if a(\n    b,\n    1,\n):\n    d = e[1:]\n    f = (\n        g - h\n    )\n"
    lines = {edit.kind: list(edit.lines) for edit in kinds.edits_of(text)}
    assert lines == {"other branch": [1, 2, 3, 4], "off by one": [5], "swapped operands": [6, 7, 8]}
