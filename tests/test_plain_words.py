"""The list of `make lint`: what it reads, and that a banned word is found with what to write instead."""

import ast

import pytest
from plain_words import BANNED, leaves, main, messages


def test_no_page_help_or_message_has_a_banned_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out


def test_raised_and_logged_strings_are_read_and_docstrings_are_not() -> None:
    source = '''
def load(path):
    """Docstring."""
    logger.warning("moe_rl: a line that is logged")
    raise ValueError(f"a sentence about {path}")
'''
    assert set(messages(ast.parse(source))) == {"moe_rl: a line that is logged", "a sentence about "}


def test_sentences_of_a_yaml_file_are_read_and_its_keys_are_not() -> None:
    assert list(leaves({"a key": ["one sentence", {"deep": "another one"}, "word", 3]})) == [
        "one sentence",
        "another one",
    ]


def test_every_word_has_something_to_write_instead() -> None:
    assert len(BANNED) >= 29
    assert all(BANNED.values())
