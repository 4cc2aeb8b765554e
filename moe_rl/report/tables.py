"""The look of every table in a terminal."""

from rich import box
from rich.table import Table


def figures_table(*headings: str, gap: int = 1) -> Table:
    """Return an empty table: words under the first heading, figures under the others, `gap` blanks between."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=True, justify="right" if index else "left")
    return table
