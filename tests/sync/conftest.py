"""Makes `layout_cases` importable under importmode=importlib."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
