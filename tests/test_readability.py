"""The measure of `make lint`: what it counts, and that a bound that does not hold has its sentence."""

import textwrap
from pathlib import Path

import pytest
from readability import (
    Bounds,
    Limits,
    RoomMeasure,
    faults,
    measure_rooms,
    obsolete_exceptions,
    public_class_twins,
)

STRICT = Bounds(large=0, comprehensions=0, ternaries=0, grammar=0)
LOOSE = Bounds(large=100, comprehensions=1000, ternaries=1000, grammar=100)


def package_with(tmp_path: Path, **files: str) -> Path:
    """Write a package of rooms: `core__loads` is the file core/loads.py."""
    for name, source in files.items():
        path = tmp_path / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return tmp_path


def limits(bounds: Bounds, **exceptions: frozenset[str]) -> Limits:
    return Limits(default=bounds, by_room={}, **({"wide_classes": frozenset(), "twins": frozenset()} | exceptions))


def room_of(tmp_path: Path, source: str) -> RoomMeasure:
    return measure_rooms(package_with(tmp_path, core__part=source))["core"]


def test_a_comprehension_and_its_names_are_counted(tmp_path: Path) -> None:
    counts = room_of(tmp_path, "found = [each for each in range(3)]\ntotal = 1 if found else 0\n").counts
    assert counts["statements"] == 2
    assert counts["comprehensions"] == 1
    assert counts["ternaries"] == 1
    assert counts["bindings"] == 3
    assert counts["grammar"] == 2


def test_parameters_are_bindings_and_words_inside_names_are_not_grammar(tmp_path: Path) -> None:
    counts = room_of(tmp_path, "def price(given, first_row):\n    return given + first_row\n").counts
    assert counts["bindings"] == 2
    assert counts["grammar"] == 1


@pytest.mark.parametrize(("terms", "is_large"), [(3, False), (100, True)])
def test_only_long_statements_are_large(tmp_path: Path, terms: int, is_large: bool) -> None:
    counts = room_of(tmp_path, f"total = {' + '.join(['count'] * terms)}\n").counts
    assert counts["large"] == is_large


def test_shorter_lines_docstrings_and_annotations_change_nothing(tmp_path: Path) -> None:
    plain = room_of(tmp_path / "plain", "def f(a, b):\n    return [a, b]\n").counts
    dressed = room_of(
        tmp_path / "dressed",
        'def f(a: dict[str, int], b: int) -> list[int]:\n    """Return both."""\n    return [\n a,\n b\n]\n',
    ).counts
    assert plain == dressed


def test_a_compound_statement_counts_its_header_alone(tmp_path: Path) -> None:
    body = "\n".join("    total = total + count" for _ in range(50))
    assert room_of(tmp_path, f"for count in counts:\n{body}\n").counts["large"] == 0


def test_an_empty_room_has_no_figures_above_zero(tmp_path: Path) -> None:
    assert room_of(tmp_path, "").figures == STRICT


def test_every_bound_has_its_sentence(tmp_path: Path) -> None:
    source = f"found = [each for each in range(3)]\ntotal = {' + '.join(['count'] * 100)} if found else 0\n"
    rooms = measure_rooms(package_with(tmp_path, core__part=source))
    assert len(faults(rooms, {}, limits(STRICT))) == 4
    assert faults(rooms, {}, limits(LOOSE)) == []


@pytest.mark.parametrize(
    "body", ["\n".join("    x = 1" for _ in range(251)), "\n".join(f"    def m{i}(self): ..." for i in range(21))]
)
def test_a_wide_class_fails_unless_it_is_an_exception(tmp_path: Path, body: str) -> None:
    rooms = measure_rooms(package_with(tmp_path, core__part=f"class Wide:\n{body}\n"))
    assert any("class Wide" in sentence for sentence in faults(rooms, {}, limits(LOOSE)))
    assert faults(rooms, {}, limits(LOOSE, wide_classes=frozenset({"Wide"}))) == []


def test_a_public_class_name_stands_once(tmp_path: Path) -> None:
    package = package_with(
        tmp_path, core__a="class Verdict: ...\nclass _Own: ...\n", routes__b="class Verdict: ...\nclass _Own: ...\n"
    )
    twins = public_class_twins(package)
    assert twins == {"Verdict": ["core/a.py", "routes/b.py"]}
    assert len(faults({}, twins, limits(LOOSE))) == 1
    assert faults({}, twins, limits(LOOSE, twins=frozenset({"Verdict"}))) == []


def test_an_exception_that_nothing_needs_is_named() -> None:
    stale = limits(LOOSE, wide_classes=frozenset({"Gone"}), twins=frozenset({"Verdict"}))
    assert len(obsolete_exceptions({}, {}, stale)) == 2


def test_the_projects_own_table_reads() -> None:
    table = Limits.read()
    assert table.default.grammar == 1.0
    assert set(table.by_room) <= set(measure_rooms())
