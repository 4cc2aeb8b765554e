"""The objects of users: a simulation or a sweep that prints itself, saves itself, and shows itself in a notebook.

The terminal's parts are imported where something is printed, so that the library loads no rich.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.report.document import document
from moe_rl.report.headline import headline
from moe_rl.report.html import render_html, render_notebook, render_picture, save_as
from moe_rl.report.simulation import ReportData
from moe_rl.report.sweep import SweepData
from moe_rl.report.sweep_chart import draw_sweep, sweep_panels

if TYPE_CHECKING:
    from rich.console import Console

# A sweep is drawn as any of these; the last two need CairoSVG.
PICTURES = (".html", ".svg", ".png", ".pdf")
# A page scrolls the table below its picture, so the table may be wider than a terminal.
PAGE_COLUMNS = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport(ReportData):
    """Result of a simulation; `print` shows the same report as `moe-rl simulate`.

    >>> report = moe_rl.simulate("run.moetrace", model="qwen3-235b-a22b", cluster="h100")  # doctest: +SKIP
    >>> print(report.table())  # doctest: +SKIP
    >>> report.save("report.html")  # doctest: +SKIP
    >>> report.plans["moe-rl"].save("step.plan.npz")  # doctest: +SKIP
    """

    def table(self, *names: str) -> str:
        """Return the policy table as text; `names` are columns as `--columns` takes them, "all" for every one."""
        from moe_rl.report.terminal import policy_table

        return printed(lambda console: console.print(policy_table(self, names)), 1000)

    @property
    def headline(self) -> str:
        """The sentences that answer the question, as below the table in a terminal: a line each."""
        return "\n".join(headline(self).lines)

    def save(self, path: Path | str) -> None:
        """Write a self-contained page (`.html`) or all figures (`.json`); raises before anything is written."""
        save_as(path, {".html": lambda: render_html(self).encode(), ".json": lambda: self.json().encode()})

    def as_json(self) -> dict[str, object]:
        """Return the figures of `--json`; a figure that was not computed is absent."""
        return document(self)

    def json(self) -> str:
        """Return the document of `--json` as text."""
        return json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"

    def __str__(self) -> str:
        from moe_rl.report.terminal import print_report

        return printed(lambda console: print_report(self, console, explain=True), 100)

    def _repr_html_(self) -> str:
        return render_notebook(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(SweepData):
    """The points of a grid, the last parameter varying fastest; printed, it is the table of `moe-rl sweep`."""

    def table(self, width: int = 100) -> str:
        """Return a line per point as text."""
        from moe_rl.report.terminal import print_sweep

        return printed(lambda console: print_sweep(self, console), width)

    __str__ = table

    def save(self, path: Path | str) -> None:
        """Draw the sweep: a page (`.html`) or `.svg`; `.png` and `.pdf` need the extra `plot`."""
        draw_by_suffix: dict[str, Callable[[], bytes]] = {".html": self._page}
        for suffix in PICTURES:
            if suffix != ".html":
                draw_by_suffix[suffix] = partial(draw_sweep, self, suffix.removeprefix("."))
        save_as(path, draw_by_suffix)

    def _page(self) -> bytes:
        return render_picture("moe_rl sweep", self.finding, partial(sweep_panels, self), self.table(PAGE_COLUMNS))

    def _repr_svg_(self) -> str:
        return draw_sweep(self, "svg").decode()


def printed(show: "Callable[[Console], None]", width: int) -> str:
    """Return what `show` prints on a console of `width` columns, as plain text."""
    text = io.StringIO()
    from rich.console import Console

    show(Console(file=text, width=width, markup=False, highlight=False, color_system=None))
    return text.getvalue().rstrip("\n")
