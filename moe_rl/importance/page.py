"""The table of objectives in docs/importance.md, written from the registry.

    python -m moe_rl.importance.page docs/importance.md

The table stands between the two marks; everything else on the page is written by hand.
"""

import sys
from pathlib import Path

from moe_rl.importance.objectives import OBJECTIVES

BEGIN, END = "<!-- begin: moe_rl.importance.page -->", "<!-- end -->"
COLUMNS = ("name", "loss", "ratio per", "widths on", "needs", "default aggregation", "found in", "source")


def objectives_table() -> str:
    """Return one row of Markdown per objective."""
    rows = [
        (
            f"`{entry.name}`",
            entry.formula,
            *(entry.ratio_level, entry.widths, ", ".join(f"`{name}`" for name in entry.needs) or "-"),
            *(entry.default_loss_agg_mode, ", ".join(entry.frameworks) or "-", entry.source),
        )
        for entry in OBJECTIVES
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [COLUMNS, ("---",) * len(COLUMNS), *rows])


def updated(text: str) -> str:
    """Return the page's text with the table written anew."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n\n{objectives_table()}\n\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
