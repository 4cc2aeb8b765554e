"""Lets the tests of this folder import the modules beside them; `outcome` is in tests/conftest.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
