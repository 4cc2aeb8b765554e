"""Under importmode=importlib only this makes `pages`, and the payloads of the importers' tests, importable here."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "replay")]
