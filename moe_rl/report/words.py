"""The words of tables, charts and pages: YAML files beside this module."""

from pathlib import Path
from typing import Any

from moe_rl.yaml_files import read_yaml


def read_words(file: str) -> dict[str, Any]:
    """Return the content of a YAML file of this folder."""
    return read_yaml(Path(__file__).with_name(file))
