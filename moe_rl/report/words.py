"""The words of tables, charts and pages: YAML files beside this module."""

from pathlib import Path
from typing import Any

import yaml


def read_words(file: str) -> dict[str, Any]:
    """Return the content of a YAML file of this folder."""
    words: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    return words
