"""The pictures show the data."""

import base64
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_samples import BOUNDS, SETTING, TRACE, forecast, prediction, report

from benchmarks.make_tables import wait_bars
from moe_rl.planner.registry import POLICIES
from moe_rl.report.bars import LEFT, RIGHT, WORDS_RIGHT, excess_bars, memory_bars, time_bars
from moe_rl.report.colors import POLICY_COLORS, policy_colors
from moe_rl.report.html import render_html
from moe_rl.report.maps import MapKind, color_of, levels, png_data_uri
from moe_rl.report.svg import DARK, LIGHT, WIDTH, standalone
from moe_rl.report.sweep import SweepData, SweptPoint
from moe_rl.report.sweep_chart import sweep_panels

ROOT = Path(__file__).parents[2]


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
    assert levels(np.array([[0.0, 2.0], [4.0, 8.0]]), 4.0).tobytes() == bytes([0, 128, 255, 255])


def bars_of(svg: str) -> list[tuple[float, float, str]]:
    found = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="24" fill="([^"]+)"', svg)
    return [(float(x), float(width), fill) for x, width, fill in found]


def test_bars_are_as_long_as_their_parts() -> None:
    one = replace(prediction("static", 8.0, load=2.0), breakdown_s={"attention": 2.0, "expert_gemm": 6.0})
    (first, second) = bars_of(str(time_bars([one], num_policies=1).drawing))
    assert second[1] == pytest.approx(3 * first[1], abs=0.1)
    assert second[0] == pytest.approx(first[0] + first[1], abs=0.1)


def test_hidden_time_lies_over_the_end_of_the_bar() -> None:
    parts = {"attention": 4.0, "overlap": -1.0, "head": 2.0}
    one = replace(prediction("static", 5.0, load=2.0), breakdown_s=parts)
    svg = str(time_bars([one], num_policies=1).drawing)
    *solid, hidden = bars_of(svg)
    end = solid[-1][0] + solid[-1][1]
    assert hidden[0] + hidden[1] == pytest.approx(end, abs=0.1)
    assert hidden[2] == "url(#hid)"
    assert ">5.00<" in svg  # the step, not the sum of what is drawn


def test_a_map_has_a_line_between_nodes_and_labels_on_both_axes() -> None:
    def drawn(ranks: int, every: int) -> str:
        values = {"static": np.ones((4, ranks), np.float32)}
        said = {"title": "x", "caption": "", "quantity": "", "across": "EP rank", "shown": ("static",)}
        return str(MapKind(**said, every=every, layer_ids=[3, 4, 5, 6], values=values).picture("static"))

    svg = drawn(16, 8)
    assert svg.count('class="node"') == 1
    assert ">MoE layer<" in svg
    assert "EP rank (dashed: node boundary)" in svg
    assert "dashed" not in drawn(8, 8)
    assert "dashed" not in drawn(8, 0)


def test_every_policy_has_a_color_of_its_own_whatever_else_is_shown() -> None:
    ours = [name for name in POLICIES.names if POLICIES[name].__module__.startswith("moe_rl.")]
    colors = policy_colors(ours)
    assert len(set(colors.values())) == len(ours)
    assert colors == {name: POLICY_COLORS[name] for name in ours}
    for name, color in colors.items():
        assert policy_colors([name]) == {name: color}
        assert policy_colors(["static", name, "somebody-else"])[name] == color
    assert colors["static"] == "#7d8590"


def test_names_without_a_color_take_what_the_others_leave() -> None:
    colors = policy_colors(["static", "eplb", "moe-rl", "theirs", "another"])
    assert len(set(colors.values())) == 5


def test_colors_of_policies_are_readable_on_light_paper_and_on_dark() -> None:
    for name, color in POLICY_COLORS.items():
        for scheme in (LIGHT, DARK):
            paper = scheme["paper"] if len(scheme["paper"]) == 7 else "#ffffff"
            low, high = sorted((luminance(color), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) >= 3, (name, paper)


def luminance(color: str) -> float:
    """Relative luminance of #rrggbb as WCAG 2.1 defines it."""
    shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_report_and_sweep_and_the_pictures_of_the_documents_show_a_policy_in_one_color() -> None:
    """The report draws three policies, the sweep two, the documents others: moe-rl is the same in all of them."""
    page = render_html(report(prediction("static", 10.0, load=2.2), prediction("moe-rl", 7.0, load=1.1)))
    points = [
        SweptPoint(point={"seed": seed}, policies={"eplb-oracle": 1.1, "moe-rl": 1.2}, yardsticks={},
                   imbalance_static=2.0, phi=0.5)
        for seed in (0, 1)
    ]  # fmt: skip
    swept = SweepData(
        values={"seed": (0, 1)}, metric="speedup_vs_static", points=tuple(points), trace=TRACE, setting=SETTING
    )
    picture = str(sweep_panels(swept))
    assert POLICY_COLORS["moe-rl"] in page
    assert POLICY_COLORS["moe-rl"] in picture
    assert POLICY_COLORS["eplb-oracle"] in picture
    for scheme in ("light", "dark"):
        text = (ROOT / "docs" / "pictures" / f"sweep-{scheme}.svg").read_text()
        used = {name for name, color in POLICY_COLORS.items() if color in text}
        assert used == {"static", "eplb", "moe-rl"}


def test_memory_stands_against_the_gpus_line() -> None:
    svg = str(memory_bars({"static": forecast(100.0), "moe-rl": forecast(60.0)}, num_policies=2).drawing)
    (line,) = re.findall(r'<line class="limit" x1="([\d.]+)"', svg)
    scale = (WIDTH - LEFT - WORDS_RIGHT) / 100.0
    assert float(line) == pytest.approx(LEFT + 80.0 * scale, abs=0.1)
    assert [width for _, width, _ in bars_of(svg)] == pytest.approx(
        [25 * scale, 75 * scale, 15 * scale, 45 * scale], abs=0.1
    )
    assert svg.count("does not fit") == 1
    assert 'class="alarm">100.0 does not fit<' in svg


def test_memory_below_the_gpus_shows_the_line_at_the_end() -> None:
    svg = str(memory_bars({"static": forecast(60.0)}, num_policies=1).drawing)
    assert "does not fit" not in svg
    (line,) = re.findall(r'<line class="limit" x1="([\d.]+)"', svg)
    assert float(line) == pytest.approx(WIDTH - RIGHT, abs=0.1)


def test_memory_far_below_the_gpus_has_the_width_and_the_limit_is_named() -> None:
    svg = str(memory_bars({"static": forecast(8.0)}, num_policies=1).drawing)
    assert sum(width for _, width, _ in bars_of(svg)) == pytest.approx(WIDTH - LEFT - RIGHT, abs=0.1)
    assert 'class="limit"' not in svg
    assert "80.0 GiB of the GPU: far to the right" in svg


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
    widths = [width for _, width, _ in bars_of(str(excess_bars(policies, BOUNDS).drawing))]
    assert sum(widths[:2]) == pytest.approx(WIDTH - LEFT - RIGHT, abs=0.1)
    assert sum(widths[2:]) == pytest.approx((WIDTH - LEFT - RIGHT) / 12, abs=0.1)
