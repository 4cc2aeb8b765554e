"""The Markdown pages of the project, and what stands in their fenced blocks."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "configs" / "traces" / "README.md"], key=str)
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shell_lines(text: str) -> list[str]:
    """Return the lines of blocks that a shell would run, continued lines joined."""
    blocks = [found["text"] for found in FENCE.finditer(text) if found["language"] in ("", "bash", "sh")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip()]


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)
