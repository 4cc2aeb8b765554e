"""Lets the tests of this folder import what the tests of the Megatron runtime share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
