"""Render a report as one HTML page that needs nothing else: style, script and pictures are inside.

Names of traces, models and policies come from outside and are escaped everywhere.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from moe_rl.core.metrics import StepPrediction
from moe_rl.report.bars import excess_bars, memory_bars, part_name, time_bars
from moe_rl.report.charts import imbalance_curves, node_matrix
from moe_rl.report.colors import part_color, policy_colors
from moe_rl.report.columns import columns
from moe_rl.report.curves import Line, line_sample
from moe_rl.report.headline import headline
from moe_rl.report.limits import limits
from moe_rl.report.maps import micro_batch_maps, rank_maps
from moe_rl.report.ranking import ranking_rows, ranking_sentences
from moe_rl.report.simulation import ReportData
from moe_rl.report.svg import standalone
from moe_rl.report.units import sequences_of


def render_html(report: ReportData) -> str:
    """Return the page."""
    colors = policy_colors(prediction.policy for prediction in report.policies)
    rows = (*report.policies, *report.yardsticks)
    kinds = [rank_maps(report), micro_batch_maps(report)]
    return (
        environment()
        .get_template("simulation.html.j2")
        .render(
            report=report,
            headline=headline(report),
            limits=limits(report),
            sequences=sequences_of(report.setting),
            colors=colors,
            table=policy_rows(report),
            ranking=ranking_sentences(report),
            ranking_rows=ranking_rows(report),
            kinds=kinds,
            map_data=[kind.data() for kind in kinds],
            style=asset("style.css"),
            script=asset("script.js"),
            traffic=_traffic(report),
            **_curves(report, colors),
            **_bars(report, rows),
        )
    )


def render_notebook(report: ReportData) -> str:
    """Return what a notebook shows of the report: headline, table, where the time goes, notes."""
    timed = [row for row in (*report.policies, *report.yardsticks) if row.breakdown_s]
    return (
        environment()
        .get_template("notebook.html.j2")
        .render(
            headline=headline(report),
            limits=limits(report),
            table=policy_rows(report),
            cautions=report.cautions,
            notes=report.notes,
            bars=standalone(time_bars(timed, num_policies=len(report.policies))) if timed else None,
            parts=_legend([row.breakdown_s or {} for row in timed]),
        )
    )


def _traffic(report: ReportData) -> list[dict[str, Any]]:
    """Return copies of tokens between nodes before and after, on a common scale; nothing where no token crosses one."""
    shown = [row for row in report.before_and_after if row.node_to_node_copies]
    # One scale for both pictures: the shades must compare.
    top = max((copies for row in shown for line in row.node_to_node_copies or () for copies in line), default=0.0)
    return [
        {
            "name": row.policy,
            "total": row.inter_node_copies_per_token,
            "svg": node_matrix(
                row.node_to_node_copies or (), label=f"Copies of tokens from node to node: {row.policy}", top=top
            ),
        }
        for row in shown
        if top > 0
    ]


def _curves(report: ReportData, colors: dict[str, str]) -> dict[str, Any]:
    loads = {name: report.loads[name] for name in colors}
    strong = {row.policy for row in (report.baseline, report.runner_up, report.best) if row is not None}
    looks = {name: Line(points=(), color=color, faint=name not in strong) for name, color in colors.items()}
    micro_batches = next(iter(loads.values())).imbalance_map.shape[1]
    return {
        "curves": imbalance_curves(
            {name: policy.imbalance_by_micro_batch for name, policy in loads.items()},
            looks,
            along="micro-batch",
            ids=range(micro_batches),
        ),
        "layer_curves": imbalance_curves(
            {name: policy.imbalance_by_layer for name, policy in loads.items()},
            looks,
            along="MoE layer",
            ids=report.layer_ids,
        ),
        "curve_samples": {
            name: (line.faint, line_sample(line, name))
            for name, line in sorted(looks.items(), key=lambda named: named[1].faint)
        },
    }


def _bars(report: ReportData, rows: tuple[StepPrediction, ...]) -> dict[str, Any]:
    """Return the bar charts that the report has figures for, and the legends of their parts."""
    num_policies = len(report.policies)
    timed = [row for row in rows if row.breakdown_s]
    memory = {row.policy: report.memory[row.policy] for row in rows if row.policy in report.memory}
    bounded = [policy for policy in report.policies if policy.policy in report.bounds]
    excess = [report.bounds[policy.policy].excess(policy) for policy in bounded]
    return {
        "bars": time_bars(timed, num_policies=num_policies) if timed else None,
        "parts": _legend([row.breakdown_s or {} for row in timed]),
        "overlaps": any(min((row.breakdown_s or {"": 0.0}).values()) < 0 for row in timed),
        "memory_bars": memory_bars(memory, num_policies=num_policies) if memory else None,
        "memory_parts": _legend([forecast.parts_bytes for forecast in memory.values()]),
        "excess_bars": excess_bars(bounded, report.bounds) if bounded else None,
        "excess_parts": _legend(excess),
    }


def policy_rows(report: ReportData) -> dict[str, Any]:
    """Return columns and rows of the policy table, for a template."""
    shown = columns(report)

    best = report.best.policy

    def row(prediction: StepPrediction) -> dict[str, Any]:
        cells = [column.text(prediction) for column in shown]
        return {"name": prediction.policy, "cells": cells, "best": prediction.policy == best != "static"}

    return {
        "columns": [{"lines": column.heading.split("\n"), "meaning": column.meaning} for column in shown],
        "rows": [row(prediction) for prediction in report.policies],
        "yardsticks": [row(prediction) for prediction in report.yardsticks],
    }


def _legend(bars: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """Return name and color of every part that some bar shows."""
    names = dict.fromkeys(part for bar in bars for part, value in bar.items() if value > 0)
    return [{"name": part_name(part), "color": part_color(part)} for part in names]


def asset(name: str) -> Markup:
    """Return a style sheet or a script of the pages, to be put into one as it is."""
    return Markup((resources.files("moe_rl.report") / "templates" / name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    """Return where the templates of pages are; what they show is escaped."""
    return Environment(
        loader=PackageLoader("moe_rl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
