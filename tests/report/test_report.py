"""The report: sentences follow from the numbers, the page is self-contained and safe, the pictures show the data."""

import base64
import json
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import StepPrediction, imbalance
from moe_rl.report import LoadBounds, PolicyLoads, SimulationReport, headline, limits, render_html
from moe_rl.report.bars import LEFT, RIGHT, WORDS_RIGHT, excess_bars, memory_bars, time_bars, wait_bars
from moe_rl.report.charts import MAP_WIDTH, imbalance_curves, layer_map
from moe_rl.report.colors import policy_colors
from moe_rl.report.columns import columns, fitting_columns
from moe_rl.report.heatmap import color_of, levels_base64, png_data_uri
from moe_rl.report.ranking import ranking_sentences
from moe_rl.report.svg import DARK, LIGHT, WIDTH, standalone
from moe_rl.report.terminal import print_report
from moe_rl.report.units import GIB, format_bytes, format_count, format_time, listed, ticks, time_unit
from moe_rl.simulators.memory import MemoryForecast
from moe_rl.simulators.sensitivity import PerturbedRanking

SETTING: dict[str, object] = {
    "model": "gpt-oss-20b",
    "cluster": "h100",
    "ep_size": 16,
    "ranks_per_node": 8,
    "num_micro_batches": 3,
    "tokens_per_rank": 8192.0,
    "sequence_length": 400.0,
    "slots": 1,
    "cross_node_slots": 0,
    "objective": "time",
    "dispatcher": "deepep",
    "recompute": "none",
    "scaled": False,
    "assumptions": ["kv_channels: assumed"],
    "constants": {"rdma_gb_per_s": {"value": 43.0, "source": "a table"}},
}
TRACE: dict[str, object] = {
    "name": "run.npz",
    "num_sequences": 12,
    "num_tokens": 74_470,
    "num_moe_layers": 4,
    "num_experts": 32,
    "top_k": 4,
    "provenance": "R3",
    "moe_layer_ids": [3, 4, 5, 6],
}


def prediction(policy: str, seconds: float, *, load: float, node: float = 1.05, static: float = 10.0) -> StepPrediction:
    """A policy of a step whose forced-balance time is 6 s and bound 5 s."""
    return StepPrediction(
        policy=policy,
        imbalance=load,
        node_imbalance=node,
        step_time_s=seconds,
        tokens_per_s=1e6 / seconds,
        speedup_vs_static=static / seconds,
        fraction_of_forced_balance=6.0 / seconds,
        fraction_of_ideal=5.0 / seconds,
        phi=0.5,
        replicas_per_plan=0.0 if policy == "static" else 2.5,
        cross_node_replicas_per_plan=0.0,
        moved_bytes=0 if policy == "static" else 3_000_000_000,
        plan_time_s=0.1,
        breakdown_s={"attention": seconds - 3.0, "expert_gemm": 2.0, "all_to_all": 1.0, "reorder": 0.0},
    )


def loads(seed: int = 0, skew: float = 1.0) -> PolicyLoads:
    rng = np.random.default_rng(seed)
    return PolicyLoads.from_rank_loads((1000 * rng.gamma(1 / skew, skew, (1, 3, 4, 16))).astype(np.int64))


def report(*predictions: StepPrediction, **changes: object) -> SimulationReport:
    policies = predictions or (prediction("static", 10.0, load=2.2), prediction("ultraep", 7.0, load=1.1))
    yardsticks = (prediction("forced_balance", 6.0, load=1.0), prediction("ideal", 5.0, load=1.0))
    values: dict[str, object] = {
        "trace": TRACE,
        "setting": SETTING,
        "policies": policies,
        "yardsticks": yardsticks,
        "loads": {policy.policy: loads(index) for index, policy in enumerate(policies)},
        "notes": ("eplb has no history.",),
        "command": "moe-rl simulate run.npz --ep 16",
        "version": "0.1.0",
    }
    return SimulationReport(**values | changes)  # type: ignore[arg-type]


def untimed(policy: StepPrediction) -> StepPrediction:
    return replace(policy, step_time_s=None, breakdown_s=None, speedup_vs_static=None, phi=None)


# --- headline -----------------------------------------------------------------------------------------------


def test_the_headline_names_the_fastest_policy_with_its_gain() -> None:
    said = headline(report())
    assert said.title == (
        "ultraep makes this step 1.43x as fast as static placement and reaches 86% of the speed of perfectly balanced "
        "routing."
    )
    assert "2.20 times the mean load" in said.details[0]
    assert "would save 40.0% of the step" in said.details[0]


def test_the_headline_says_what_packing_alone_brings() -> None:
    rows = {"static": 10.0, "static+pack": 9.6, "relibra": 7.5, "moe-rl-unpacked": 7.0, "moe-rl": 6.5}
    said = headline(report(*(prediction(name, seconds, load=1.1) for name, seconds in rows.items())))
    sentence = (
        "Of moe-rl, packing alone is 1.04x as fast as static, and everything but packing is 1.43x as fast as static."
    )
    assert sentence in said.details
    assert "The next best, relibra, takes 15% longer." in said.details


def test_a_gain_inside_the_models_error_is_called_no_help() -> None:
    said = headline(report(prediction("static", 10.0, load=2.2), prediction("eplb", 9.8, load=2.1)))
    assert said.title == "No policy helps much here: the best, eplb, is 1.02x as fast as static placement."


def test_a_balanced_step_is_called_balanced() -> None:
    static, eplb = prediction("static", 6.05, load=1.01), prediction("eplb", 6.04, load=1.0)
    said = headline(report(static, eplb))
    assert said.title == "There is little to win: imbalance costs 0.8% of this step."


def test_static_may_be_the_best_policy() -> None:
    said = headline(report(prediction("static", 10.0, load=2.0), prediction("eplb", 12.0, load=2.0)))
    assert "the best, static, is 1.00x" in said.title


@pytest.mark.parametrize("shown", [prediction("static", 10.0, load=2.0), untimed(prediction("static", 1, load=2.0))])
def test_static_alone_is_compared_with_nothing(shown: StepPrediction) -> None:
    assert headline(report(shown)).title.startswith("Only static placement was simulated")


def test_equals_are_called_equal() -> None:
    policies = (
        prediction("static", 10.0, load=2.2),
        prediction("ultraep", 7.0, load=1.1),
        prediction("relibra", 7.03, load=1.05),
    )
    assert "relibra is within 1 % of it" in " ".join(headline(report(*policies)).details)


def test_more_than_balanced_routing_is_explained() -> None:
    policies = (prediction("static", 10.0, load=2.2), prediction("moe-rl", 5.5, load=1.02))
    said = headline(report(*policies))
    assert "reaches 109% of the speed" in said.title
    assert any(detail.startswith("More than 100 % is possible") for detail in said.details)


def test_scaled_stands_first() -> None:
    assert headline(report(setting=SETTING | {"scaled": True})).title.startswith("Scaled: ultraep")


def test_without_times_the_balance_is_compared() -> None:
    policies = tuple(untimed(p) for p in report().policies)
    said = headline(report(*policies, yardsticks=()))
    assert said.title == (
        "ultraep cuts the load of the busiest rank from 2.20 to 1.10 times the mean, 92% of the excess."
    )
    assert "Times were not computed (objective: imbalance)." in said.details


@pytest.mark.parametrize(
    ("static", "best", "expected"),
    [(1.02, 1.0, "There is little to win"), (2.0, 1.99, "No policy improves on static placement")],
)
def test_without_times_too_little_is_called_little(static: float, best: float, expected: str) -> None:
    policies = (untimed(prediction("static", 1, load=static)), untimed(prediction("eplb", 1, load=best)))
    assert headline(report(*policies, yardsticks=())).title.startswith(expected)


def test_without_static_no_speed_up_is_claimed() -> None:
    said = headline(report(prediction("ultraep", 7.0, load=1.1)))
    assert "as fast" not in said.title
    assert "no speed-up is given" in said.details[0]


# --- report data --------------------------------------------------------------------------------------------


def test_loads_are_reduced_to_shares_and_curves() -> None:
    rows = np.array([[[[4, 0], [2, 2]], [[0, 4], [3, 1]]]])
    reduced = PolicyLoads.from_rank_loads(rows)
    assert reduced.rank_share.tolist() == [[1.0, 1.0], [1.25, 0.75]]
    assert reduced.imbalance_by_micro_batch.tolist() == [(2.0 + 1.0) / 2, (2.0 + 1.5) / 2]


def test_a_layer_and_a_micro_batch_without_rows_count_as_balanced() -> None:
    rows = np.zeros((1, 2, 2, 4), np.int64)
    rows[0, 0, 0] = [8, 0, 0, 0]
    reduced = PolicyLoads.from_rank_loads(rows)
    assert reduced.rank_share[1].tolist() == [1.0] * 4
    assert reduced.imbalance_by_micro_batch.tolist() == [2.5, 1.0]


def test_one_micro_batch_has_the_imbalance_of_the_step() -> None:
    rows = np.random.default_rng(0).integers(0, 100, (2, 1, 5, 8))
    assert PolicyLoads.from_rank_loads(rows).imbalance_by_micro_batch[0] == pytest.approx(imbalance(rows), rel=1e-6)


@pytest.mark.parametrize("key", ["ep_size", "tokens_per_rank", "dispatcher", "recompute", "scaled"])
def test_a_result_without_its_conditions_is_refused(key: str) -> None:
    with pytest.raises(InvalidInputError, match=f"setting lacks {key}"):
        report(setting={name: value for name, value in SETTING.items() if name != key})


def test_a_report_needs_distinct_policies_and_their_loads() -> None:
    static = prediction("static", 10.0, load=2.0)
    with pytest.raises(InvalidInputError, match="twice"):
        report(static, static)
    with pytest.raises(InvalidInputError, match="loads of every policy"):
        report(static, loads={})


# --- terminal -----------------------------------------------------------------------------------------------


def printed(shown: SimulationReport, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), markup=False)  # noqa: PTH123, SIM115
    with console.file:
        print_report(shown, console)
        return console.export_text()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_figure_is_cut_at_any_width(width: int) -> None:
    text = printed(report(setting=SETTING | {"scaled": True}), width)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= min(width, 100)
    assert "1.429x" in text


def test_markup_in_names_is_printed_as_it_is() -> None:
    text = printed(report(trace=TRACE | {"name": "[bold red]x[/]"}, notes=("[link=evil]y[/link]",)), 100)
    assert "[bold red]x[/]" in text
    assert "[link=evil]y[/link]" in text


def test_columns_that_nobody_fills_are_left_out() -> None:
    fields = {column.field for column in columns(report())}
    assert "peak_memory_bytes" not in fields
    assert "cross_node_replicas_per_plan" not in fields
    crossing = replace(prediction("moe-rl", 6.5, load=1.02), cross_node_replicas_per_plan=0.5)
    shown = columns(report(prediction("static", 10.0, load=2.0), crossing))
    assert "cross_node_replicas_per_plan" in {column.field for column in shown}


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    assert [column.field for column in fitting_columns(report(), 10)] == ["imbalance", "speedup_vs_static"]
    fields = {column.field for column in fitting_columns(report(), 60)}
    assert {"step_time_s", "speedup_vs_static", "fraction_of_forced_balance"} <= fields


def test_control_characters_in_names_do_not_reach_the_terminal() -> None:
    text = printed(report(trace=TRACE | {"name": "a\x1b[31m\nb"}, notes=("c\x07\udcff",)), 100)
    assert r"a\x1b[31m\nb" in text
    assert r"c\x07\udcff" in text


# --- page ---------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags with their attributes, and which tags are open when the page ends."""

    VOID = frozenset({"meta", "br", "image", "line", "circle", "polyline"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    text = render_html(report())
    page = Page(text)
    assert page.open == []
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed")
        assert "src" not in attributes
        assert str(attributes.get("href", "data:")).startswith("data:")
    assert "url(http" not in text
    assert "@import" not in text
    assert [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv")] == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    ]


EVIL = "<script>alert(1)</script>\"'&"


def test_names_from_outside_are_escaped_everywhere() -> None:
    policies = (prediction("static", 10.0, load=2.2), prediction(EVIL, 7.0, load=1.1))
    text = render_html(
        report(
            *policies,
            trace=TRACE | {"name": EVIL, "model": EVIL},
            setting=SETTING | {"model": EVIL, "assumptions": [EVIL]},
            notes=(EVIL,),
            command=EVIL,
        )
    )
    assert "<script>alert" not in text
    page = Page(text)
    assert sum(tag == "script" for tag, _ in page.tags) == 2  # the data and our own
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_the_page_shows_table_notes_sources_and_command() -> None:
    text = render_html(report(setting=SETTING | {"scaled": True}))
    for expected in ("1.429x", "eplb has no history.", "a table", "moe-rl simulate run.npz --ep 16", "phi 0.50"):
        assert expected in text
    assert '<li class="mark">scaled</li>' in text


def test_the_page_without_times_has_no_bars() -> None:
    policies = tuple(untimed(p) for p in report().policies)
    text = render_html(report(*policies, yardsticks=()))
    assert "Where the time goes" not in text
    assert "Imbalance of every layer and micro-batch" in text


def test_the_page_needs_no_more_than_the_conditions() -> None:
    bare = {key: value for key, value in SETTING.items() if key not in ("assumptions", "constants")}
    assert "Constants, their sources" not in render_html(report(setting=bare))
    shown = render_html(report(setting=SETTING | {"model_shape": {"name": "x", "num_layers": 24}}))
    assert "num layers 24" in shown


def test_the_page_of_one_policy_shows_one_map() -> None:
    text = render_html(report(prediction("static", 10.0, load=2.0)))
    assert text.count("<figure") == 2  # loads of ranks, and of layers and micro-batches


def embedded(text: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="maps">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found.group(1))
    assert isinstance(data, list)
    return data


def test_the_maps_hold_the_loads() -> None:
    shown = report()
    ranks, cells = embedded(render_html(shown))
    loads = shown.loads["ultraep"]
    for data, values in ((ranks, loads.rank_share), (cells, loads.imbalance_by_cell)):
        assert data["layers"] == [3, 4, 5, 6]
        assert data["columns"] == values.shape[1]
        levels = np.frombuffer(base64.b64decode(data["policies"]["ultraep"]["levels"]), np.uint8)
        assert np.abs(levels.reshape(values.shape) / 255 * data["top"] - values).max() <= 0.5 / 255 * data["top"] + 1e-6


# --- pictures -----------------------------------------------------------------------------------------------


def decoded_png(uri: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices [rows, columns], palette [256, 3]) of an indexed PNG, checking every checksum."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, position = {}, 8
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, content = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        (crc,) = struct.unpack(">I", data[position + 8 + length : position + 12 + length])
        assert crc == zlib.crc32(kind + content)
        chunks[kind] = content
        position += 12 + length
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, color) == (8, 3)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:], np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)


def test_a_map_is_blue_below_the_mean_white_at_it_and_red_above() -> None:
    values = np.array([[0.0, 1.0, 3.0, 9.0]])
    index, palette = decoded_png(png_data_uri(values, 3.0))
    red, _, blue = (palette[index[0]].astype(int)[:, channel] for channel in range(3))
    assert blue[0] > red[0] + 50
    assert abs(red[1] - blue[1]) < 10
    assert red[2] > blue[2] + 50
    assert index[0, 3] == index[0, 2] == 255  # beyond the scale is the end of the scale


def test_colors_are_monotone_in_the_load() -> None:
    brightness = [sum(color_of(value, 4.0)) for value in np.linspace(0.0, 4.0, 81)]
    rising, falling = brightness[:21], brightness[20:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


def test_levels_are_one_byte_per_cell() -> None:
    levels = base64.b64decode(levels_base64(np.array([[0.0, 2.0], [4.0, 8.0]]), 4.0))
    assert list(levels) == [0, 128, 255, 255]


def test_a_curve_runs_from_its_first_to_its_last_micro_batch() -> None:
    curve = np.array([1.0, 2.0, 1.5], np.float32)
    svg = str(imbalance_curves({"static": curve}, {"static": "#777"}, along="micro-batch", ids=range(3)))
    (points,) = re.findall(r'points="([^"]+)"', svg)
    xs, ys = zip(*(map(float, point.split(",")) for point in points.split()), strict=True)
    assert list(xs) == sorted(xs)
    assert ys[0] > ys[2] > ys[1]  # up is more
    assert ">micro-batch<" in svg
    assert ">max / mean rank load<" in svg


@pytest.mark.parametrize("count", [1, 2, 41, 500])
def test_any_number_of_micro_batches_is_drawn_inside_the_picture(count: int) -> None:
    curve = (1.0 + np.random.default_rng(0).random(count)).astype(np.float32)
    svg = str(imbalance_curves({"a": curve}, {"a": "#777"}, along="micro-batch", ids=range(count)))
    (points,) = re.findall(r'points="([^"]+)"', svg)
    xy = np.array([[float(part) for part in point.split(",")] for point in points.split()])
    assert len(xy) == count
    assert xy.min() >= 0
    assert xy[:, 0].max() <= MAP_WIDTH
    assert xy[:, 1].max() <= 300


def test_perfect_balance_is_drawn_on_the_axis() -> None:
    svg = str(imbalance_curves({"a": np.ones(3, np.float32)}, {"a": "#777"}, along="MoE layer", ids=[3, 4, 5]))
    (points,) = re.findall(r'points="([^"]+)"', svg)
    assert len({point.split(",")[1] for point in points.split()}) == 1


def bars_of(svg: str) -> list[tuple[float, float, str]]:
    found = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="24" fill="([^"]+)"', svg)
    return [(float(x), float(width), fill) for x, width, fill in found]


def test_bars_are_as_long_as_their_parts() -> None:
    one = replace(prediction("static", 8.0, load=2.0), breakdown_s={"attention": 2.0, "expert_gemm": 6.0})
    (first, second) = bars_of(str(time_bars([one], num_policies=1)))
    assert second[1] == pytest.approx(3 * first[1], abs=0.1)
    assert second[0] == pytest.approx(first[0] + first[1], abs=0.1)


def test_hidden_time_lies_over_the_end_of_the_bar() -> None:
    parts = {"attention": 4.0, "overlap": -1.0, "head": 2.0}
    one = replace(prediction("static", 5.0, load=2.0), breakdown_s=parts)
    svg = str(time_bars([one], num_policies=1))
    *solid, hidden = bars_of(svg)
    end = solid[-1][0] + solid[-1][1]
    assert hidden[0] + hidden[1] == pytest.approx(end, abs=0.1)
    assert hidden[2] == "url(#hid)"
    assert ">5<" in svg  # the step, not the sum of what is drawn


def test_a_map_has_a_line_between_nodes_and_labels_on_both_axes() -> None:
    def drawn(ranks: int, every: int) -> str:
        values = np.ones((4, ranks), np.float32)
        ids = [3, 4, 5, 6]
        return str(layer_map(values, label="x", layer_ids=ids, across="EP rank", every=every, top=2.0))

    svg = drawn(16, 8)
    assert svg.count('class="node"') == 1
    assert ">MoE layer<" in svg
    assert "EP rank (dashed: node boundary)" in svg
    assert "dashed" not in drawn(8, 8)
    assert "dashed" not in drawn(8, 0)


def test_colors_are_distinct_and_static_is_gray() -> None:
    colors = policy_colors(["static", "eplb", "eplb-oracle", "lplb-oracle", "ultraep", "relibra", "moe-rl"])
    assert len(set(colors.values())) == 7
    assert colors["static"] == "#7d8590"


# --- memory -------------------------------------------------------------------------------------------------


def forecast(peak_gib: float, *, hbm_gib: float = 80.0) -> MemoryForecast:
    """A fourth of the peak are weights, the rest routed rows."""
    peak = round(peak_gib * GIB)
    return MemoryForecast(
        parts_bytes={"weights": peak // 4, "routed_rows": peak - peak // 4},
        rank_peak_bytes=np.array([peak // 2, peak]),
        layer_peak_rows=np.ones(4),
        hbm_bytes=round(hbm_gib * GIB),
    )


def test_memory_stands_against_the_gpus_line() -> None:
    svg = str(memory_bars({"static": forecast(100.0), "moe-rl": forecast(60.0)}, num_policies=2))
    (line,) = re.findall(r'<line class="limit" x1="([\d.]+)"', svg)
    scale = (WIDTH - LEFT - WORDS_RIGHT) / 100.0
    assert float(line) == pytest.approx(LEFT + 80.0 * scale, abs=0.1)
    assert [width for _, width, _ in bars_of(svg)] == pytest.approx(
        [25 * scale, 75 * scale, 15 * scale, 45 * scale], abs=0.1
    )
    assert svg.count("does not fit") == 1
    assert 'class="alarm">100.0 does not fit<' in svg


def test_memory_far_below_the_gpus_still_shows_the_line() -> None:
    svg = str(memory_bars({"static": forecast(8.0)}, num_policies=1))
    assert "does not fit" not in svg
    (line,) = re.findall(r'<line class="limit" x1="([\d.]+)"', svg)
    assert float(line) == pytest.approx(WIDTH - RIGHT, abs=0.1)


def test_the_json_holds_memory_and_bounds_of_every_policy() -> None:
    memory = {name: forecast(60.0) for name in ("static", "ultraep", "forced_balance")}
    document: Any = report(memory=memory, bounds=BOUNDS).as_json()
    assert document["policies"]["ultraep"]["memory"]["fits"] is True
    assert sum(document["policies"]["static"]["memory"]["parts_bytes"].values()) == 60 * GIB
    assert "memory" in document["yardsticks"]["forced_balance"]
    assert "memory" not in document["yardsticks"]["ideal"]
    assert document["policies"]["static"]["bounds"] == {"lb0": 1.0, "node": 1.05, "placement": 2.2}


# --- limits -------------------------------------------------------------------------------------------------

BOUNDS = {
    "static": LoadBounds(lb0=1.0, node=1.05, placement=2.2),
    "ultraep": LoadBounds(lb0=1.0, node=1.05, placement=1.08),
}


def limited(*, node: float | None = 1.05, placement: float = 1.08, load: float = 1.1, **breakdown: float) -> Any:
    """The limits of a policy of 7 s beside forced balance of 6 s and a bound of 5 s."""
    parts = {"attention": 3.0, "expert_gemm": 2.0, "all_to_all": 1.0, "reorder": 0.0}
    policies = (
        prediction("static", 10.0, load=2.2),
        replace(prediction("ultraep", 7.0, load=load), breakdown_s=parts | breakdown),
    )
    yardsticks = tuple(
        replace(prediction(name, 6.0, load=1.0), breakdown_s=parts) for name in ("forced_balance", "ideal")
    )
    bounds = BOUNDS | {"ultraep": LoadBounds(lb0=1.0, node=node, placement=placement)}
    found = limits(report(*policies, yardsticks=yardsticks, bounds=bounds))
    assert found is not None
    return found


def test_a_step_without_waiting_is_limited_by_its_kernels() -> None:
    found = limited()
    assert found.verdict == "kernel"
    assert "100% of the step" in found.sentences[0]
    assert "(attention 50%, expert GEMM 33%, all-to-all 17%)" in found.sentences[0]


@pytest.mark.parametrize(
    ("bounds", "verdict", "said"),
    [
        ({"node": 1.09, "placement": 1.1}, "node", "no replicas inside nodes go below 1.090"),
        ({"node": None, "placement": 1.1}, "node", "its node 1.050"),
        ({"node": 1.01, "placement": 1.1}, "placement", "goes below 1.100"),
        ({"node": 1.01, "placement": 1.02}, "split", "reaches 1.020"),
    ],
)
def test_waiting_for_the_busiest_rank_is_put_down_to_the_bound_that_explains_most(
    bounds: dict[str, Any], verdict: str, said: str
) -> None:
    found = limited(**bounds, expert_gemm=3.0)
    expected = "node" if bounds["node"] is None else verdict
    assert found.verdict == expected
    assert found.sentences[0].startswith(f"{verdict.capitalize()}-limited: 14.3% of the step")
    assert said in found.sentences[0]


def test_waiting_for_long_sequences_is_limited_by_packing() -> None:
    found = limited(attention=4.0)
    assert found.verdict == "packing"
    assert found.sentences[0].startswith("Packing-limited: 14.3% of the step")


def test_a_plan_may_be_limited_by_its_own_cost() -> None:
    assert limited(reorder=0.4, replicate=0.1).verdict == "plan"


def test_the_step_is_cut_without_remainder() -> None:
    found = limited(attention=3.5, expert_gemm=2.5, reorder=0.1, pipeline_bubble=0.4)
    assert sum(found.seconds.values()) == pytest.approx(3.5 + 2.5 + 1.0 + 0.1 + 0.4)
    assert found.seconds["kernels"] == pytest.approx(6.0)


def test_less_time_than_balanced_routing_is_no_negative_waiting() -> None:
    found = limited(all_to_all=0.5)
    assert min(found.seconds.values()) >= 0
    assert found.seconds["kernels"] == pytest.approx(5.5)


def test_the_excess_of_a_plan_is_split_without_remainder() -> None:
    policy = prediction("ultraep", 7.0, load=1.3, node=1.05)
    for node, placement in ((1.1, 1.2), (None, 1.2), (1.2, 1.1), (1.3, 1.3), (1.0, 1.0)):
        excess = LoadBounds(lb0=1.0, node=node, placement=placement).excess(policy)
        assert sum(excess.values()) == pytest.approx(0.3)
        assert min(excess.values()) >= 0.0


def test_bars_of_waiting_start_at_the_mean() -> None:
    svg = str(wait_bars({"static": 2.5, "moe-rl": 1.0}, {"static": "1.00x as fast", "moe-rl": "1.40x as fast"}))
    (line,) = re.findall(r'<line class="limit" x1="([\d.]+)"', svg)
    scale = (WIDTH - LEFT - WORDS_RIGHT) / 2.5
    assert float(line) == pytest.approx(LEFT + scale, abs=0.1)
    assert [width for _, width, _ in bars_of(svg)] == pytest.approx([scale, 1.5 * scale, scale], abs=0.1)
    assert "2.500, 1.00x as fast" in svg


@pytest.mark.parametrize("colors", [LIGHT, DARK])
def test_a_picture_of_its_own_has_the_colors_asked_for(colors: dict[str, str]) -> None:
    alone = str(standalone(wait_bars({"static": 2.5}, {"static": ""}), colors))
    assert f'fill="{colors["paper"]}"' in alone
    assert set(colors.values()) <= set(re.findall(r"#[0-9a-f]{3,6}", alone))


def test_bars_of_the_excess_are_as_long_as_what_is_left() -> None:
    policies = (prediction("static", 10.0, load=2.2), prediction("ultraep", 7.0, load=1.1))
    widths = [width for _, width, _ in bars_of(str(excess_bars(policies, BOUNDS)))]
    assert sum(widths[:2]) == pytest.approx(WIDTH - LEFT - RIGHT, abs=0.1)
    assert sum(widths[2:]) == pytest.approx((WIDTH - LEFT - RIGHT) / 12, abs=0.1)


@pytest.mark.parametrize(
    ("static", "best", "said"),
    [
        (7.0, 6.5, "need more imbalance than this trace has in this setting: even perfectly balanced routing"),
        (10.0, 8.0, "would be possible on this trace, where balanced routing is 1.67x as fast as static"),
        (10.0, 6.2, "appear on this trace in this setting: ultraep is 1.61x as fast as static"),
    ],
)
def test_published_gains_are_claimed_only_where_the_trace_gives_them(static: float, best: float, said: str) -> None:
    found = limits(report(prediction("static", static, load=2.2), prediction("ultraep", best, load=1.1), bounds=BOUNDS))
    assert found is not None
    assert said in found.sentences[-1]


def test_gains_over_static_placement_alone_are_not_the_published_ones() -> None:
    oracle, best = prediction("eplb-oracle", 6.4, load=1.2), prediction("ultraep", 6.2, load=1.1)
    found = limits(report(prediction("static", 10.0, load=2.2), oracle, best, bounds=BOUNDS))
    assert found is not None
    assert "be only 1.67x as fast as static and 1.07x as fast as eplb-oracle." in found.sentences[-1]


def test_without_times_the_bounds_alone_are_judged() -> None:
    def judged(load: float) -> Any:
        policies = (untimed(prediction("static", 1, load=2.2)), untimed(prediction("ultraep", 1, load=load)))
        return limits(report(*policies, yardsticks=(), bounds=BOUNDS))

    assert judged(1.1).verdict == "node"
    assert "Published gains" not in " ".join(judged(1.1).sentences)
    assert judged(1.01).verdict == "balanced"
    assert judged(1.1).seconds == {}


def test_the_page_and_the_terminal_say_what_limits_the_step() -> None:
    shown = report(bounds=BOUNDS, memory={"static": forecast(100.0), "ultraep": forecast(60.0)})
    text, page = " ".join(printed(shown, 100).split()), render_html(shown)
    for sentence in limits(shown).sentences:  # type: ignore[union-attr]
        assert sentence in text
        assert sentence.replace("'", "&#39;") in page
    assert Page(page).open == []
    assert "100.0 does not fit" in page
    bare = render_html(report())
    assert "What limits you" not in bare
    assert "Memory against the GPU" not in bare


# --- sensitivity --------------------------------------------------------------------------------------------


def rankings(*turned: tuple[str, str]) -> tuple[PerturbedRanking, ...]:
    speedups = {"static": 1.0, "ultraep": 1.4}
    return (
        PerturbedRanking(constants="RDMA", factor=0.7, speedup_vs_static=speedups, turned=()),
        PerturbedRanking(constants="HBM", factor=1.3, speedup_vs_static=speedups | {"ultraep": 1.5}, turned=turned),
    )


def test_a_ranking_that_holds_is_said_to_hold() -> None:
    shown = report(sensitivity=rankings())
    assert ranking_sentences(shown) == (
        "The ranking of the policies holds with every constant 30 % lower or higher; ultraep is 1.40x to 1.50x as fast "
        "as static.",
    )
    document: Any = shown.as_json()
    assert document["sensitivity"]["holds"] is True


def test_a_flip_is_named_with_its_constant() -> None:
    shown = report(sensitivity=rankings(("ultraep", "static")))
    (sentence,) = ranking_sentences(shown)
    assert "flips: HBM x1.3: static passes ultraep." in sentence
    assert sentence in " ".join(printed(shown, 100).split())
    page = render_html(shown)
    assert sentence in page
    assert page.count('<tr class="flips">') == 1
    document: Any = shown.as_json()
    assert [case["holds"] for case in document["sensitivity"]["perturbed"]] == [True, False]
    assert document["sensitivity"]["perturbed"][1]["turned"] == (("ultraep", "static"),)


def test_what_was_not_perturbed_is_not_mentioned() -> None:
    assert ranking_sentences(report()) == ()
    assert "sensitivity" not in report().as_json()
    assert "depend on the constants" not in render_html(report())


# --- units --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (format_time(1.236), "1.24 s"),
        (format_time(0.0231), "23.1 ms"),
        (format_time(0.00031), "310 us"),
        (format_count(74_470), "74.5k"),
        (format_count(8192), "8,192"),
        (format_count(3_100_000), "3.1M"),
        (format_count(12.5), "12.5"),
        (format_bytes(0), "0"),
        (format_bytes(3_000_000_000), "3 GB"),
        (format_bytes(1.66e12), "1.66 TB"),
        (listed(range(3)), "0, 1, 2"),
        (listed(range(48)), "0, 1 .. 47"),
        (time_unit([0.2, 3.0])[0], "s"),
        (time_unit([0.2])[0], "ms"),
    ],
)
def test_numbers_are_written_as_people_read_them(written: str, expected: str) -> None:
    assert written == expected


@pytest.mark.parametrize("top", [1e-4, 0.07, 1.0, 2.3, 9.99, 1234.5])
def test_ticks_start_at_zero_reach_the_top_and_are_few(top: float) -> None:
    marks = ticks(top, at_most=6)
    assert marks[0] == 0.0
    assert marks[-1] >= top * (1 - 1e-9)
    assert 2 <= len(marks) <= 7
    assert np.allclose(np.diff(marks), marks[1])
