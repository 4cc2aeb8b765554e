"""The verdict on public recipes is what a person says that read them.

PUBLIC_CHECKOUTS names a folder with checkouts of the repositories of public_labels.yaml, as owner/name.
"""

import os
from pathlib import Path

import pytest
import yaml

from moe_rl.core.errors import InvalidInputError
from moe_rl.doctor.verdict import attach_verdict
from moe_rl.launch import interpret, read_run

VARIABLE = "PUBLIC_CHECKOUTS"
LABELS = yaml.safe_load(Path(__file__).with_name("public_labels.yaml").read_text())
LEAST_RIGHT, LEAST_RECIPES, REPOSITORIES = 0.95, 150, 9
WORDS = {"attaches": ("attaches", "attaches, but"), "refused": ("does not attach",)}


def labeled() -> list[tuple[str, str, str]]:
    """(repository, path, label) of every recipe."""
    return [(name, path, label) for name, of in LABELS.items() for label in WORDS for path in of[label]]


def said(path: Path) -> str:
    """The verdict's word, or that the file cannot be read."""
    try:
        return attach_verdict(interpret(read_run([path]))).word
    except InvalidInputError:
        return "not readable"


def test_enough_recipes_are_labeled_once() -> None:
    names = [(name, path) for name, path, _ in labeled()]
    assert len(names) == len(set(names)) >= LEAST_RECIPES
    assert len(LABELS) >= REPOSITORIES


@pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no checkouts of the repositories")
def test_the_verdict_is_the_label_and_no_all_clear_is_false() -> None:
    root = Path(os.environ[VARIABLE])
    found = {(name, path): (label, said(root / name / path)) for name, path, label in labeled()}
    wrong = {place: pair for place, pair in found.items() if pair[1] not in WORDS[pair[0]]}
    assert not [place for place, (label, word) in wrong.items() if label == "refused" and word in WORDS["attaches"]]
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(found), wrong
