"""`make lint`: words that a reader of the field stumbles over stand in no page, help text or message.

Each row of `BANNED` is a pattern and what to write instead. Read are the pages, the YAML files of sentences and
options in `moe_rl`, and in its Python code the strings that are raised, warned or logged. Code in backticks and
fences is left out, and so are comments.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
BANNED = {
    r"foret(?:old|ells?)": "predicted",
    r"heard": "recorded, counted",
    r"put away": "offloaded",
    r"st(?:ands?|ood) in\b(?!-)": "replaces, is in",
    r"stands? (?:for|behind|against|beside|below|above)": "means, follows, prevents",
    r"what stands": "what is",
    r"lies? (?:in|at|on|below|above|beside|there)": "is in",
    r"(?:what|that|where it) pays(?! back)": "what saves time",
    r"at work": "helps, is used",
    r"(?:is|are|was|were) told": "gets",
    r"told to|unless told": "asked to, unless you set",
    r"(?:no|some|any)body": "name who: the user, the planner, a rank",
    r"in the place of|in (?:its|their) place": "in place of, instead",
    r"otherwise than": "differently from",
    r"(?:there|where)(?:by|in|of|with)": "so, in which",
    r"anew": "again",
    r"how near|nearer": "how close, closer",
    r"(?:is|was|are) said|said once": "is logged, is stated",
    r"hangs? on": "depends on",
    r"in the figures": "in the numbers",
    r"go(?:es)? home": "return to the owner",
    r"to be had": "available",
    r"dear(?:er|est)": "more expensive",
    r"put right|set right": "corrects",
    r"like with like": "similar ones",
    r"falls? away|fell away": "is not needed",
    r"hold good": "hold",
    r"no use": "useless",
    r"at hand": "available",
    r"as it stands": "as it is",
}
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CODE = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->", re.DOTALL)
SPOKEN = {"warn", "warning", "info", "error", "exception"}
"""Functions whose strings a user reads: of `warnings` and of loggers."""


def main() -> int:
    """Print every banned word with its file and what to write instead; return how many there are, at most 1."""
    pattern = re.compile("|".join(rf"(?P<w{row}>\b(?:{word})\b)" for row, word in enumerate(BANNED)), re.IGNORECASE)
    instead = list(BANNED.values())
    faults = 0
    for path, text in texts():
        for match in pattern.finditer(text):
            assert match.lastgroup is not None
            around = " ".join(text[max(0, match.start() - 40) : match.end() + 30].split())
            print(f"{path.relative_to(ROOT)}: '{match[0]}' in '{around}': write {instead[int(match.lastgroup[1:])]}")
            faults += 1
    return min(faults, 1)


def texts() -> Iterator[tuple[Path, str]]:
    """Yield the texts that a user reads, with the files that they are in."""
    for path in PAGES:
        yield path, CODE.sub("", path.read_text())
    for path in (ROOT / "moe_rl").rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            yield from ((path, CODE.sub("", text)) for text in leaves(document))
    for path in (ROOT / "moe_rl").rglob("*.py"):
        yield from ((path, CODE.sub("", text)) for text in messages(ast.parse(path.read_text())))


def leaves(document: object) -> Iterator[str]:
    """Yield the strings of a YAML document that are sentences; keys are none."""
    if isinstance(document, str) and " " in document:
        yield document
    elif isinstance(document, dict):
        for value in document.values():
            yield from leaves(value)
    elif isinstance(document, list):
        for value in document:
            yield from leaves(value)


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of errors that are raised and of warnings and lines that are logged."""
    for node in ast.walk(tree):
        spoken = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SPOKEN
        if isinstance(node, ast.Raise) or spoken:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


if __name__ == "__main__":
    sys.exit(main())
