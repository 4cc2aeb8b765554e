"""Checkouts of frameworks that are on no registry, in the folder that `FRAMEWORK_SOURCES` names."""

import os
from pathlib import Path

import pytest

SOURCES = Path(os.environ.get("FRAMEWORK_SOURCES", "/absent"))


def needs_checkout(name: str) -> pytest.MarkDecorator:
    """Leave a test out, before its ranks start, where the checkout `name` is not there."""
    reason = f"NOT RUN: FRAMEWORK_SOURCES names no folder with a checkout of {name} (it is on no registry)"
    return pytest.mark.skipif(not (SOURCES / name).is_dir(), reason=reason)
