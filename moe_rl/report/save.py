"""Reports and sweeps as files and as text; the end of a file's name says as what."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs, write_outputs
from moe_rl.report.limits import limits
from moe_rl.report.simulation import SimulationReport


def json_text(report: SimulationReport) -> str:
    """Return the document of `moe-rl simulate --json`."""
    limited = limits(report)
    figures = report.as_json() | ({"limits": limited.as_json()} if limited else {})
    return json.dumps(figures, indent=1, allow_nan=False) + "\n"


def save_as(path: Path | str, kinds: Mapping[str, Callable[[], bytes]]) -> None:
    """Write what the kind of `path`'s suffix makes; raises first for another suffix or a bad place."""
    path = Path(path)
    require(path.suffix in kinds, f"{path} must end in {', '.join(kinds)}.")
    check_outputs({"": path})
    write_outputs({path: kinds[path.suffix]()})


def printed(show: Callable[[Console], None], width: int) -> str:
    """Return what `show` prints on a console of `width` columns, as plain text."""
    text = io.StringIO()
    show(Console(file=text, width=width, markup=False, highlight=False, color_system=None))
    return text.getvalue().rstrip("\n")
