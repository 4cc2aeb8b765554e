"""Render a report as one HTML page that needs nothing else: style, script and pictures are inside.

Names of traces, models and policies come from outside and are escaped everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from moe_rl.core.errors import require
from moe_rl.core.metrics import StepPrediction
from moe_rl.core.outputs import check_outputs, write_outputs
from moe_rl.report.bars import BarChart, excess_bars, memory_bars, rl_bars, time_bars
from moe_rl.report.colors import BASELINE_COLOR, policy_colors
from moe_rl.report.columns import Column, cells_of, chosen_columns, columns
from moe_rl.report.headline import headline
from moe_rl.report.limits import limits
from moe_rl.report.maps import micro_batch_maps, rank_maps
from moe_rl.report.ranking import ranking_rows, ranking_sentences
from moe_rl.report.simulation import ReportData
from moe_rl.report.svg import NARROW_WIDTH, PAGE_WIDTH, standalone
from moe_rl.report.units import batch_words, format_time, layout_words, parallelism, sequences_of


def render_html(report: ReportData) -> str:
    """Return the page."""
    # One color per policy on the whole page: dots of tables and the verdict's bars read as one legend.
    colors = policy_colors(report.policy_names)
    kinds = [rank_maps(report), micro_batch_maps(report)]
    return (
        environment()
        .get_template("simulation.html.j2")
        .render(
            report=report,
            headline=headline(report),
            limits=limits(report),
            sequences=sequences_of(report.setting),
            parallelism=parallelism(report.setting),
            batch=batch_words(report.trace, report.setting),
            layout=layout_words(report.setting),
            colors=colors,
            verdict=_verdict(report, colors),
            rl_bars=None if report.rl is None else drawings_of(partial(rl_bars, report.rl.steps)),
            table=policy_rows(report, chosen_columns(report)),
            whole_table=policy_rows(report, columns(report)),
            ranking=ranking_sentences(report),
            ranking_rows=ranking_rows(report),
            kinds=kinds,
            map_data=[kind.data() for kind in kinds],
            style=asset("style.css"),
            script=asset("script.js"),
            time_chart=_time_chart(report),
            memory_chart=_memory_chart(report),
            excess_chart=_excess_chart(report),
        )
    )


def render_picture(
    kicker: str,
    title: str,
    draw: Callable[[float], Markup],
    table: str,
    sentences: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> bytes:
    """Return a page of one picture: what it shows as the title, its figures as a text table below.

    `draw` takes the width: the picture is drawn for the whole page and for a phone.
    """
    template = environment().get_template("picture.html.j2")
    page = template.render(
        kicker=kicker,
        title=title,
        drawings=drawings_of(draw),
        table=table,
        sentences=sentences,
        notes=notes,
        style=asset("style.css"),
    )
    return page.encode()


def drawings_of(draw: Callable[[float], Markup]) -> dict[str, Markup]:
    """Return a picture by the class of its frame, of which the style sheet shows one: letters are legible in both."""
    return {"wide": draw(PAGE_WIDTH), "narrow": draw(NARROW_WIDTH)}


def render_notebook(report: ReportData) -> str:
    """Return the report for a notebook: headline, table, parts of the time, notes."""
    time = _time_chart(report)
    return (
        environment()
        .get_template("notebook.html.j2")
        .render(
            headline=headline(report),
            limits=limits(report),
            table=policy_rows(report, chosen_columns(report)),
            cautions=report.all_cautions,
            notes=report.notes,
            bars=standalone(time.drawing) if time else None,
            legend=time.legend if time else {},
        )
    )


def save_as(path: Path | str, kinds: Mapping[str, Callable[[], bytes]]) -> None:
    """Write the bytes that `kinds` makes for `path`'s suffix; raises first for another suffix or a bad place."""
    path = Path(path)
    require(path.suffix in kinds, f"{path} must end in one of {', '.join(kinds)}.")
    check_outputs({"": path})
    write_outputs({path: kinds[path.suffix]()})


def _verdict(report: ReportData, colors: dict[str, str]) -> list[dict[str, Any]]:
    """Return the bars of the first screen: static, the best published policy, the best, and forced balance."""
    compared = (report.baseline, report.runner_up, report.best, report.yardstick("forced_balance"))
    bars: dict[str, dict[str, Any]] = {}
    for row in compared:
        if row is None:
            continue
        if report.timed:
            length = row.step_time_s or 0.0
            figure = f"{format_time(length)}, {row.speedup_vs_static or 1.0:.2f}x"
        else:
            length = row.imbalance
            figure = f"{length:.2f} x mean"
        color = colors.get(row.policy, BASELINE_COLOR)
        is_yardstick = row.policy not in colors
        bars[row.policy] = {"name": row.policy, "figure": figure, "color": color, "yardstick": is_yardstick}
        bars[row.policy]["share"] = length
    longest = max(bar["share"] for bar in bars.values())
    for bar in bars.values():
        bar["share"] /= max(longest, 1e-300)
    return list(bars.values())


def _time_chart(report: ReportData) -> BarChart | None:
    """Return the parts of every row's step; None if times were not computed."""
    timed = [row for row in (*report.policies, *report.yardsticks) if row.breakdown_s]
    if not timed:
        return None
    return time_bars(timed, num_policies=len(report.policies))


def _memory_chart(report: ReportData) -> BarChart | None:
    """Return the parts of every row's peak memory; None without forecasts."""
    memory = {}
    for row in (*report.policies, *report.yardsticks):
        if row.policy in report.memory:
            memory[row.policy] = report.memory[row.policy]
    if not memory:
        return None
    return memory_bars(memory, num_policies=len(report.policies))


def _excess_chart(report: ReportData) -> BarChart | None:
    """Return the reasons for the imbalance of every policy that has bounds; None if none has."""
    bounded = [row for row in report.policies if row.policy in report.bounds]
    if not bounded:
        return None
    return excess_bars(bounded, report.bounds)


def policy_rows(report: ReportData, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the shown columns and the rows of the policy table, for a template."""
    best = report.best.policy

    def row(prediction: StepPrediction) -> dict[str, Any]:
        is_best = prediction.policy == best != "static"
        return {"name": prediction.policy, "cells": cells_of(columns, prediction), "best": is_best}

    rows, yardsticks = list(map(row, report.policies)), list(map(row, report.yardsticks))
    return {"columns": columns, "rows": rows, "yardsticks": yardsticks}


def asset(name: str) -> Markup:
    """Return a style sheet or a script of the pages, to be put into one as it is."""
    return Markup((resources.files("moe_rl.report") / "templates" / name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    """Return the templates of pages; they escape every value."""
    return Environment(
        loader=PackageLoader("moe_rl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
