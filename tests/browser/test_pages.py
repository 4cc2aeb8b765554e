"""What a reader does with the pages: open, choose another map, scroll on a narrow screen, read in the dark."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

Open = Callable[..., AbstractContextManager[Any]]
pytestmark = pytest.mark.browser
PAGES = ("simulation", "training", "projection", "sweep", "tune", "rl-step")
WITH_MAPS = ("simulation", "projection")
NORMAL_TEXT, LARGE_TEXT, GRAPHICS = 4.5, 3.0, 3.0
"""Least contrast under WCAG 2.1 AA: criteria 1.4.3 and 1.4.11."""

CONTRAST = """
() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = channels(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return [r, g, b];
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
  };
  const found = [];
  const add = (element, kind, color, what) => {
    const [a, b] = [luminance(channels(color).slice(0, 3)), luminance(ground(element))];
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    found.push({kind, large, what, ratio: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)});
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || element.closest("script, style") || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    add(element, "text", element instanceof SVGElement ? style.fill : style.color, text.slice(0, 40));
  }
  for (const curve of document.querySelectorAll("svg .curve"))
    add(curve.ownerSVGElement, "curve", getComputedStyle(curve).stroke, curve.ownerSVGElement.ariaLabel);
  return found;
}
"""


def unfold(page: Any) -> None:
    """Open what the page folds."""
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")


@pytest.mark.parametrize("width", [1400, 500])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_messages_and_can_be_read(opened: Open, name: str, scheme: str, width: int) -> None:
    with opened(name, width=width, scheme=scheme) as page:
        assert page.locator("h1").inner_text()
        unfold(page)
        assert page.locator("svg").count() > 0
        # Nothing but what scrolls by itself is wider than the window.
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        found = page.evaluate(CONTRAST)
    with_curves = name in ("training", "sweep", "tune")
    assert {each["kind"] for each in found} == ({"text", "curve"} if with_curves else {"text"})
    least = {"text": NORMAL_TEXT, "curve": GRAPHICS}
    pale = [each for each in found if each["ratio"] < (LARGE_TEXT if each["large"] else least[each["kind"]])]
    assert pale == []


@pytest.mark.parametrize("name", PAGES)
def test_dark_is_dark_and_light_is_light(opened: Open, name: str) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        with opened(name, scheme=scheme) as page:
            color = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            grounds[scheme] = sum(color[:3]) / 3
    assert grounds["dark"] < 64 < 192 < grounds["light"]


@pytest.mark.parametrize("name", WITH_MAPS)
def test_a_select_changes_its_own_map(opened: Open, name: str) -> None:
    with opened(name) as page:
        unfold(page)
        figures = page.locator("figure[data-panel]")
        assert figures.count() >= 2
        for index in range(figures.count()):
            figure = figures.nth(index)
            select = figure.get_by_role("combobox")
            policies = select.locator("option").all_text_contents()
            assert len(policies) > 2
            pictures, most = {}, set()
            others = [figures.nth(other).locator("image") for other in range(figures.count()) if other != index]
            before = [image.get_attribute("href") for image in others]
            for policy in policies:
                select.select_option(policy)
                pictures[policy] = figure.locator("image").get_attribute("href")
                most.add(figure.locator(".most").inner_text())
                decoded = (
                    "href => { const image = new Image(); image.src = href; return image.decode().then(() => true); }"
                )
                assert page.evaluate(decoded, pictures[policy])
            assert len(set(pictures.values())) > 1
            assert len(most) > 1
            assert [image.get_attribute("href") for image in others] == before


@pytest.mark.parametrize("name", WITH_MAPS)
def test_the_first_screen_answers(opened: Open, name: str) -> None:
    """At 1400 x 900, without scrolling: the verdict, a bar for static, the best published, ours, and both load maps."""
    with opened(name) as page:
        page.set_viewport_size({"width": 1400, "height": 900})
        assert page.locator(".verdict li").count() in (3, 4)
        for shown in (
            "h1",
            ".verdict",
            "figure[data-kind='0'][data-panel='0']",
            "figure[data-kind='0'][data-panel='1']",
        ):
            box = page.locator(shown).bounding_box()
            assert box is not None
            assert box["y"] + box["height"] <= 900, shown
        assert page.locator("details[open]").count() == 0


SHAPES = """
() => [...document.querySelectorAll("main svg")].filter((svg) => svg.getClientRects().length).map((svg) => ({
  width: svg.getBoundingClientRect().width,
  letters: Math.min(...[...svg.querySelectorAll("text")].map((text) =>
    parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)),
}))"""
LEGIBLE = 9.0  # Pixels of a letter.


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (400, "light")])
@pytest.mark.parametrize("name", PAGES)
def test_the_main_picture_fills_the_width_and_its_letters_can_be_read(
    opened: Open, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    """A screenshot of every page lies beside it, for eyes."""
    with opened(name, width=width, scheme=scheme) as page:
        page.screenshot(path=pages[name].with_name(f"{name}-{width}-{scheme}.png"))
        assert pages[name].with_name(f"{name}-{width}-{scheme}.png").read_bytes()[1:4] == b"PNG"
        if name not in ("sweep", "tune", "rl-step", "simulation"):
            return
        room = page.evaluate("document.querySelector('main').clientWidth")
        picture = page.evaluate(SHAPES)[0]
        assert picture["width"] >= 0.9 * room
        assert picture["letters"] >= LEGIBLE
        rings = page.locator("svg:visible .answer").count()
        assert rings == (name in ("sweep", "tune"))


@pytest.mark.parametrize("name", WITH_MAPS)
def test_a_map_says_its_values_under_the_pointer(opened: Open, name: str) -> None:
    with opened(name) as page:
        image = page.locator("figure[data-panel] image").first
        image.scroll_into_view_if_needed()
        image.hover()
        tip = page.locator("#tip")
        assert tip.is_visible()
        assert "x mean" in tip.inner_text()
        page.mouse.move(0, 0)
        assert tip.is_hidden()


@pytest.mark.parametrize("name", PAGES[:3])  # the others show theirs as text
def test_wide_tables_scroll_on_a_narrow_screen(opened: Open, name: str) -> None:
    with opened(name, width=500) as page:
        unfold(page)
        wide = 0
        for table in page.locator("table:visible").all():
            frame = table.locator("xpath=ancestor::*[contains(@class, 'scroll')][1]")
            hidden = frame.evaluate("frame => frame.scrollWidth - frame.clientWidth")
            if hidden <= 0:
                continue
            wide += 1
            frame.focus()  # by keyboard too
            frame.evaluate("frame => { frame.scrollLeft = frame.scrollWidth; }")
            assert frame.evaluate("frame => frame.scrollLeft") == pytest.approx(hidden, abs=1)
            cells = table.locator("tr").first.locator("th").last.bounding_box()
            assert cells is not None
            assert cells["x"] + cells["width"] <= 500
        assert wide >= 1


def test_the_training_page_leads_to_its_projection(opened: Open) -> None:
    with opened("training") as page:
        link = page.get_by_role("link", name="projection")
        assert link.get_attribute("href") == "training-projection.html"


def covered(below: str, above: str) -> bool:
    """Whether one line runs through all points of another."""
    return set(below.split()) <= set(above.split())


def drawn(sample: dict[str, Any]) -> tuple[Any, ...]:
    return sample["stroke"], sample["dash"]


def test_the_legend_shows_every_line_as_it_is_drawn_and_no_line_is_hidden(opened: Open) -> None:
    """Two lines of a chart differ in color or in dashes, and of two on the same points the upper one is dashed."""
    looks = """section => [".legend", ".chart"].map((part) =>
      [...section.querySelectorAll(`${part} .curve`)].map((curve) => ({
        stroke: getComputedStyle(curve).stroke,
        dash: getComputedStyle(curve).strokeDasharray,
        points: curve.getAttribute("points"),
      })))"""
    with opened("training") as page:
        sections = [section for section in page.locator("main section").all() if section.locator(".curve").count()]
        assert len(sections) == 3
        for section in sections:
            samples, curves = section.evaluate(looks)
            assert [drawn(sample) for sample in samples] == [drawn(curve) for curve in curves]
            assert len({drawn(curve) for curve in curves}) == len(curves) >= 2
            for below, above in combinations(curves, 2):
                if covered(below["points"], above["points"]):
                    assert above["dash"] != "none"
