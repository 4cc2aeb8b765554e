"""TRL's GRPOTrainer takes the routes of generation in every update."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.framework
EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_grpo.py"


def test_the_example_replays_every_route() -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    shares = {
        name: (int(same), int(total))
        for name, same, total in re.findall(r"^(\w+): (\d+) of (\d+) routes", ran.stdout, flags=re.MULTILINE)
    }
    same, total = shares["replay"]
    assert same == total > 0
    same, total = shares["live"]
    assert 0 < same < total, "updates change the routers: without replay some routes differ"
