"""The tokenizer gives every text back, learns the frequent pairs first, and is the same for the same text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.recipes.byte_pairs import EOS_ID, FIRST_BYTE_ID, FIRST_MERGE_ID, PAD_ID, BytePairTokenizer

TEXTS = ["the cat sat on the mat\n    the end", "in 2024 and 1999: x = y + 12;", "naïve café … the theme"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = BytePairTokenizer.learn(TEXTS, 300)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(FIRST_BYTE_ID <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode([PAD_ID, *ids, EOS_ID]) == text


def test_the_most_frequent_pair_is_merged_first() -> None:
    """Sennrich et al., figure 1 in spirit: low, lowest, newer, wider; "er" and "lo" are found, ties by lowest byte."""
    tokenizer = BytePairTokenizer.learn(["low " * 5 + "newer " * 6 + "wider " * 3], FIRST_MERGE_ID + 1)
    (pair,) = tokenizer.merges
    assert tokenizer.decode([FIRST_MERGE_ID]) == "er"
    assert pair == (FIRST_BYTE_ID + ord("e"), FIRST_BYTE_ID + ord("r"))
    assert tokenizer.encode("er") == [FIRST_MERGE_ID]


def test_merges_stop_when_no_pair_comes_twice() -> None:
    tokenizer = BytePairTokenizer.learn(["abab"], 1000)
    assert tokenizer.vocab_size == FIRST_MERGE_ID + 1
    assert tokenizer.encode("abab") == [FIRST_MERGE_ID, FIRST_MERGE_ID]


@pytest.mark.parametrize("texts", [[], [""], ["a"]])
def test_text_without_pairs_leaves_bytes(texts: list[str]) -> None:
    tokenizer = BytePairTokenizer.learn(texts, 500)
    assert tokenizer.merges == ()
    assert tokenizer.encode("ab") == [FIRST_BYTE_ID + ord("a"), FIRST_BYTE_ID + ord("b")]


def test_learning_twice_gives_the_same_merges() -> None:
    assert BytePairTokenizer.learn(TEXTS, 320) == BytePairTokenizer.learn(TEXTS, 320)
