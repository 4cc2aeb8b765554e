"""What exercises the entries lies beside the tests of their folders, and is imported by name."""

import sys
from pathlib import Path

for folder in ("replay", "doctor"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
