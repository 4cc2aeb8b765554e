"""The list of traps in docs/doctor.md, written from the registry: `python -m moe_rl.doctor.page docs/doctor.md`."""

import sys
from pathlib import Path

from moe_rl.doctor.checks.registry import TRAPS
from moe_rl.doctor.readers.registry import READERS
from moe_rl.doctor.traps import Trap

BEGIN, END = "<!-- begin: moe_rl.doctor.page -->", "<!-- end -->"


def traps_markdown() -> str:
    """Return every trap with its severity, why, what to do and its source."""
    return "\n".join(_trap_markdown(trap) for trap in TRAPS)


def _trap_markdown(trap: Trap) -> str:
    named = [reader.title for reader in READERS if trap.concerns(reader)]
    frameworks = "all frameworks" if len(named) == len(READERS) else ", ".join(named)
    also = " and the installation alone" if trap.of_installation else ""
    return (
        f"### `{trap.name}`\n\n"
        f"{trap.severity}: {trap.title} ({frameworks}{also})\n\n"
        f"{trap.why}\n\n"
        f"*Do:* {trap.remedy}\n\n"
        f"*Source:* {trap.source}\n"
    )


def updated(text: str) -> str:
    """Return the page's text with the part between the markers written anew."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n\n{traps_markdown()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
