"""`make lint`: how many words a newcomer has to read; README.md and docs/ have an upper bound each.

Of README.md all words are counted, as by `wc -w`. In docs/ only written words are counted: sentences, cells of
tables and folded parts, without code, formulas, figures and what a program writes (`make tables`, the studies).
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README_WORDS = 500
DOCS_WORDS = 25_000
UNWRITTEN = re.compile(
    r"<!-- begin: .*?<!-- end -->|<!-- \S+ writes from here -->.*?<!-- to here -->"  # written by a program
    r"|<!--.*?-->|```.*?```|\$\$.*?\$\$|</?[a-zA-Z][^>]*>",  # comments, code, formulas, tags
    re.DOTALL,
)
WORD = re.compile(r"\S*[A-Za-z]\S*")


def written_words(text: str) -> int:
    """Return how many words of a page somebody wrote.

    Example: "| EP8 | 1.2 s |" has two words, "EP8" and "s".
    """
    return len(WORD.findall(UNWRITTEN.sub(" ", text)))


def main() -> int:
    """Print the words of every page and of all; return 1 if a bound is exceeded."""
    readme = len((ROOT / "README.md").read_text().split())
    pages = {page: written_words(page.read_text()) for page in sorted((ROOT / "docs").rglob("*.md"))}
    for page, words in pages.items():
        print(f"{words:6,}  {page.relative_to(ROOT)}")
    docs = sum(pages.values())
    print(f"{docs:6,}  docs/, at most {DOCS_WORDS:,}\n{readme:6,}  README.md, at most {README_WORDS:,}")
    return int(docs > DOCS_WORDS or readme > README_WORDS)


if __name__ == "__main__":
    sys.exit(main())
