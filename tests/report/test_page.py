"""The page is well-formed, self-contained and safe."""

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
from report_samples import BOUNDS, SETTING, TRACE, forecast, prediction, printed, report, untimed

from moe_rl.report.html import render_html
from moe_rl.report.limits import limits


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
    assert "Busiest rank of every layer and micro-batch" in text


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
    for data, values in ((ranks, loads.rank_share), (cells, loads.imbalance_map)):
        assert data["layers"] == [3, 4, 5, 6]
        assert data["columns"] == values.shape[1]
        levels = np.frombuffer(base64.b64decode(data["policies"]["ultraep"]["levels"]), np.uint8)
        assert np.abs(levels.reshape(values.shape) / 255 * data["top"] - values).max() <= 0.5 / 255 * data["top"] + 1e-6


def test_the_page_and_the_terminal_say_what_limits_the_step() -> None:
    shown = report(bounds=BOUNDS, memory={"static": forecast(100.0), "ultraep": forecast(60.0)})
    text, page = " ".join(printed(shown, 100, explain=True).split()), render_html(shown)
    for sentence in limits(shown).sentences:  # type: ignore[union-attr]
        assert sentence in text
        assert sentence.replace("'", "&#39;") in page
    assert Page(page).open == []
    assert "100.0 does not fit" in page
    bare = render_html(report())
    assert "What limits you" not in bare
    assert "Memory against the GPU" not in bare
