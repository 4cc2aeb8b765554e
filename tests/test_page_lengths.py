"""How many words a newcomer has to read: what is counted, and the bounds."""

import pytest
from page_lengths import main, written_words

PAGE = """# A heading of five words

A sentence with `code in it`, and 3 numbers: 1.25.

| EP8 | 1.2 s |
|---|---|

<details markdown="1"><summary>Folded</summary>

A folded sentence.

</details>

<!-- begin: registry recipes -->
Made by a program.
<!-- end -->

```
moe-rl demo
```
"""


def test_sentences_cells_and_folded_parts_are_counted_and_code_and_made_blocks_are_not() -> None:
    assert written_words(PAGE) == 5 + 8 + 2 + 1 + 3


def test_readme_and_docs_keep_their_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out


def test_a_less_than_sign_is_no_tag_and_tags_are_not_counted() -> None:
    page = "tokens with A < 0 that the clip leaves <code>without</code> <img alt='no word'> gradient if B > 0"
    assert written_words(page) == 11
