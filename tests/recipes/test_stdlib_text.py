"""Each kind of text is there, differs from the others, and depends on the seed alone."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from moe_rl.recipes.stdlib_text import DOCUMENT_CHARS, KINDS, read_documents

CHARS = 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_as_much_text_as_asked_for(kind: str) -> None:
    documents = read_documents(kind, CHARS, seed=0)
    total = sum(map(len, documents))
    assert CHARS <= total <= CHARS + DOCUMENT_CHARS[1]
    assert all(DOCUMENT_CHARS[0] <= len(document) <= DOCUMENT_CHARS[1] for document in documents)
    assert documents == read_documents(kind, CHARS, seed=0)
    assert documents != read_documents(kind, CHARS, seed=1)


def test_kinds_are_told_apart_by_their_characters() -> None:
    """Total variation of the letter shares is above 0.15 for every pair of kinds."""
    shares = {}
    for kind in KINDS:
        counts = Counter("".join(read_documents(kind, CHARS, seed=0)))
        shares[kind] = {character: count / counts.total() for character, count in counts.items()}
    for kind, left in shares.items():
        for other in list(shares)[: list(shares).index(kind)]:
            right = shares[other]
            characters = left.keys() | right.keys()
            variation = sum(abs(left.get(c, 0) - right.get(c, 0)) for c in characters) / 2
            assert variation > 0.15, (kind, other, variation)


def test_text_does_not_depend_on_the_hash_seed() -> None:
    """Printed sets and object addresses would differ from process to process."""
    program = (
        "import hashlib; from moe_rl.recipes.stdlib_text import *; "
        f"print(hashlib.sha256(repr([read_documents(kind, {CHARS}, 0) for kind in KINDS]).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
