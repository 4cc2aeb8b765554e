"""Which copy of moe_rl runs, where Python could have taken another one."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import moe_rl
from moe_rl.cli.console import say

COMPLETING = "_MOE_RL_COMPLETE"
"""Set while a shell asks for completions: a line on stderr would stand in the middle of what is typed."""


def unused_copy(folders: Sequence[str]) -> Path | None:
    """Return the first copy of moe_rl in `folders` that is not the one that runs; None if there is no other.

    Example: in the checkout /b, `PYTHONPATH=. moe-rl` of an environment with an editable install of /a runs /a, since
    the finder of an editable install comes before all folders of the path.
    """
    running = Path(moe_rl.__file__)
    for folder in folders:
        start = Path(folder or ".") / "moe_rl" / "__init__.py"
        # An editable install keeps its compiled core in a folder moe_rl without this file.
        if start.is_file() and not start.samefile(running):
            return start.resolve().parent
    return None


def say_which_runs() -> None:
    """Say which copy runs if there is another one on the path."""
    other = unused_copy(sys.path)
    if other is not None and COMPLETING not in os.environ:
        running = Path(moe_rl.__file__).resolve().parent
        say(
            f"note: this command runs moe_rl from {running}, not from {other}. `make env` in that checkout makes an "
            "environment for it."
        )
