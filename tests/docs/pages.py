"""The Markdown pages of the project, and what stands in their fenced blocks."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "configs" / "traces" / "README.md"], key=str)
FENCE = re.compile(
    r"(?:^ *<!-- not run by a test: (?P<reason>[^\n]*) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the lines that a shell would run, continued lines joined, or Python."""

    lines: tuple[str, ...]
    reason: str | None
    """Why no test runs them, as the page says in a comment above the block."""
    python: str = ""
    """The whole block, of which `lines` are none, where it is Python."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks that hold commands or Python, in the order of the page."""
    for found in FENCE.finditer(text):
        if found["language"] in ("", "bash", "sh"):
            joined = found["text"].replace("\\\n", " ").splitlines()
            lines = tuple(line.strip() for line in joined if line.strip() and not line.strip().startswith("# "))
            yield Block(lines, found["reason"])
        elif found["language"] == "python":
            yield Block((), found["reason"], python=textwrap.dedent(found["text"]))


def inline_commands(text: str) -> list[str]:
    """Return the `moe-rl ...` lines that stand in backticks within sentences and tables."""
    return re.findall(r"`(moe-rl [^`\n]+)`", FENCE.sub("", text))


def shell_lines(text: str) -> list[str]:
    """Return the lines of all blocks."""
    return [line for block in blocks(text) for line in block.lines]


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)
