"""`moe-rl demo --train`: the Countdown run, which needs a checkout."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from moe_rl.config import CONFIGS
from moe_rl.core.errors import require

CHECKOUT = CONFIGS.parents[1]  # Of an editable install; elsewhere the folder that holds the installed moe_rl.
NEEDED = ("torch", "transformers", "megatron", "tensorboard")


def train_demo(html: Path | None, *, command: str, overrides: Sequence[str] = (), checkout: Path = CHECKOUT) -> None:
    """Train, simulate the recorded routes and report, as `examples/countdown/demo.py` does."""
    require(
        (checkout / "examples" / "countdown" / "demo.py").is_file(),
        "demo --train runs examples/countdown, which is only in a checkout of moe_rl. Clone the repository and run "
        "`make env` in it.",
    )
    missing = [name for name in NEEDED if find_spec(name) is None]
    require(
        not missing,
        f"demo --train needs {', '.join(missing)}. Install them in a checkout with pip install -e '.[countdown]'.",
    )
    sys.path.insert(0, str(checkout))
    import_module("examples.countdown.demo").train_demo(html, command=command, overrides=overrides)
