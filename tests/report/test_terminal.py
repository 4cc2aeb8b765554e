"""The policy table in a terminal and the sentences below it."""

from dataclasses import replace

import pytest
from report_samples import BOUNDS, SETTING, TRACE, prediction, printed, report, untimed

from moe_rl.core.errors import InvalidInputError
from moe_rl.report.columns import WORDS, chosen_columns, columns
from moe_rl.report.faces import SimulationReport
from moe_rl.report.html import render_html
from moe_rl.report.simulation import LoadBounds
from moe_rl.report.terminal import setting_lines


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_figure_is_cut_at_any_width(width: int) -> None:
    """Sentences keep to the width; the table is at most 80 columns wide and is never cut."""
    text = printed(report(setting=SETTING | {"scaled": True}), width)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= max(min(width, 100), 80)
    for figure in ("1.429x", "85.7%", "10.00", "3.00"):
        assert figure in text


@pytest.mark.parametrize(
    "shown", [report(bounds=BOUNDS), report(untimed(report().policies[1]), yardsticks=(), bounds=BOUNDS)]
)
def test_the_table_has_at_most_seven_columns_unless_more_are_asked_for(shown: SimulationReport) -> None:
    assert 1 + len(chosen_columns(shown)) <= 7
    assert len(chosen_columns(shown, ("all",))) == len(columns(shown)) > 6
    wide = printed(shown, 60, names=("all",))
    assert "…" not in wide
    assert "planning" in wide


def test_columns_are_named_as_in_the_json_document() -> None:
    shown = report(bounds=BOUNDS)
    asked = ("plan_time_s", "imbalance")
    assert [column.field for column in chosen_columns(shown, asked)] == list(asked)
    figures = shown.policies[1].as_json()
    assert {column.field for column in columns(shown)} <= set(WORDS)
    of_a_simulation = {
        "reorder_share",
        "peak_memory_bytes",
        "resident_bytes",
        "inter_node_copies_per_token",
        "step_time_interval_s",
    }
    assert set(WORDS) - set(figures) <= {"node_bound", "placement_bound", "vs_best_engine"} | of_a_simulation
    with pytest.raises(InvalidInputError, match="there is no column 'imbalanse'"):
        chosen_columns(shown, ("imbalanse",))


def test_a_column_has_one_number_of_decimals_and_one_unit() -> None:
    policies = [replace(prediction("static", 12.5, load=2.0), moved_bytes=0)]
    policies += [replace(prediction(f"p{n}", 0.3 * 3**n, load=1.1), moved_bytes=10 ** (5 + n)) for n in range(4)]
    shown = report(
        *policies, bounds={policy.policy: LoadBounds(lb0=1.0, node=1.0, placement=1.0) for policy in policies}
    )
    for column in columns(shown):
        cells = [column.text(row) for row in shown.policies]
        assert len({len(cell.partition(".")[2]) for cell in cells}) == 1, cells


@pytest.mark.parametrize("width", [60, 80, 100])
def test_at_most_eight_lines_stand_below_the_table(width: int) -> None:
    shown = report(
        bounds=BOUNDS,
        setting=SETTING | {"scaled": True},
        cautions=("look here.",),
        notes=("something is assumed. " * 9,),
    )
    lines = printed(shown, width).rstrip().splitlines()
    table_ends = max(index for index, line in enumerate(lines) if line.lstrip().startswith("ideal"))
    said = [line for line in lines[table_ends + 1 :] if line.strip()]
    assert len(said) <= 8
    assert "look here." in " ".join(said)
    assert "more sentences: --explain" in " ".join(said)
    everything = printed(shown, width, explain=True)
    assert "something is assumed." in everything
    assert "more sentences: --explain" not in everything


def test_markup_in_names_is_printed_as_it_is() -> None:
    text = printed(report(trace=TRACE | {"name": "[bold red]x[/]"}, notes=("[link=evil]y[/link]",)), 100, explain=True)
    assert "[bold red]x[/]" in text
    assert "[link=evil]y[/link]" in text


def test_columns_that_nobody_fills_are_left_out() -> None:
    fields = {column.field for column in columns(report())}
    assert "peak_memory_bytes" not in fields
    assert "cross_node_replicas_per_plan" not in fields
    crossing = replace(prediction("moe-rl", 6.5, load=1.02), cross_node_replicas_per_plan=0.5)
    shown = columns(report(prediction("static", 10.0, load=2.0), crossing))
    assert "cross_node_replicas_per_plan" in {column.field for column in shown}


def test_control_characters_in_names_do_not_reach_the_terminal() -> None:
    text = printed(report(trace=TRACE | {"name": "a\x1b[31m\nb"}, notes=("c\x07\udcff",)), 100, explain=True)
    assert r"a\x1b[31m\nb" in text
    assert r"c\x07\udcff" in text


def test_the_first_lines_name_layout_and_software() -> None:
    setting = SETTING | {"layout": "megatron", "software": "tuned"}
    head = " ".join(" ".join(setting_lines(report(setting=setting))).split())
    assert "3 micro-batches of 8,192 tokens per rank, laid out as megatron does (--layout)" in head
    assert "software tuned" in head
    assert "<li>laid out as megatron does (--layout)</li>" in render_html(report(setting=setting))
    # Micro-batches that were recorded, or cut from those of an EP group, are no framework's.
    assert "laid out" not in " ".join(setting_lines(report()))
    assert "laid out" not in render_html(report())


def test_no_caution_is_left_out() -> None:
    cautions = tuple(f"caution {number} " * 12 for number in range(5))
    text = " ".join(printed(report(cautions=cautions), 60).split())
    assert all(" ".join(caution.split()) in text for caution in cautions)
    assert "1.43x" in text
    assert "more sentences: --explain" in text
