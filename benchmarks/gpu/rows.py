"""What a run on a GPU machine leaves: a row per step, appended to one file as they are made. Standard library only."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

Figure = float | int | str | list[str] | list[float] | None
ROWS = "rows.jsonl"


class Outcome(StrEnum):
    """What became of a step. Time that runs out says nothing about a kernel: it is not reached, not wrong."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step of one phase."""

    phase: str
    step: str
    outcome: Outcome
    why: str = ""
    """A sentence, of what is wrong or was not reached."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    is_peer: bool = False
    """Whether it is of somebody else's kernel, whose fault is not ours."""
    seconds: float = 0.0
    """That the step took, its preparation included."""

    @classmethod
    def parse(cls, line: str) -> Self:
        """Read what `as_json` wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "outcome": Outcome(fields["outcome"])})

    def as_json(self) -> str:
        """Return strict JSON on one line; what is not finite becomes null."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)


def outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """Return what an error of a step means, and a sentence.

    A comparison that fails and a kernel that faults are wrong; all else (what is not there, no memory) was not reached.
    """
    sentence = f"{type(error).__name__}: {error}".splitlines()[0]
    is_of_device = type(error).__name__ in ("CudaError", "AcceleratorError") or "CUDA error" in str(error)
    is_fault = type(error).__module__ == "emulator.faults" and type(error).__name__ != "Unsupported"
    if isinstance(error, AssertionError) or is_fault or (is_of_device and "out of memory" not in str(error)):
        return Outcome.WRONG, sentence
    return Outcome.NOT_REACHED, sentence


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(folder: Path, rows: Iterable[Row]) -> None:
    """Add rows to the file of a run."""
    with (folder / ROWS).open("a", encoding="utf-8") as file:
        file.writelines(row.as_json() + "\n" for row in rows)


def read(folder: Path) -> list[Row]:
    """Return the rows of a run; of a step that was tried again the last row. A line that was cut off is left out."""
    found: dict[tuple[str, str], Row] = {}
    if (folder / ROWS).is_file():
        for line in (folder / ROWS).read_text(encoding="utf-8").splitlines():
            try:
                row = Row.parse(line)
            except (ValueError, TypeError, KeyError):
                continue
            found.pop((row.phase, row.step), None)
            found[row.phase, row.step] = row
    return list(found.values())
