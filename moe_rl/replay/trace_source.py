"""What every trace offers, wherever it is stored."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from moe_rl.core.errors import require
from moe_rl.replay.sequences import Trace, concatenate

Progress = Callable[[int, int], None]
"""Called with (done, total), both in the same unit."""


@dataclass(frozen=True, kw_only=True)
class TraceSource(ABC):
    """A trace anywhere, which is read step by step and never held in memory as a whole."""

    steps_apart: ClassVar[bool] = False
    """True: a step is read without reading the others."""
    path: Path
    format: str
    """Its name, as `open_source` takes it."""
    num_experts: int
    top_k: int
    moe_layer_ids: tuple[int, ...]
    """Model layers that the trace covers."""
    model: str
    """Empty if unknown."""
    provenance: str
    """R2, R3, live, synthetic or unknown."""
    steps: tuple[int, ...]
    """Training steps, in recorded order."""
    num_sequences: int
    num_tokens: int
    """Rows of all steps, filler rows included."""
    counts_only: bool = False
    """True when parts are `SequenceCounts`."""
    inferred_fields: tuple[str, ...] = ()
    """What neither the file nor the options say and was guessed from the contents."""
    origin: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """What is known of the trace's making."""

    @abstractmethod
    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield consecutive pieces of one step (default: of all steps)."""

    @abstractmethod
    def validate(self, progress: Progress | None = None) -> None:
        """Read everything and raise at the first damage; `progress` gets what is done and all."""

    def load(self, step: int | None = None) -> Trace:
        """Return one step (default: all steps) as one object."""
        return concatenate(list(self.parts(step)))

    def require_step(self, *steps: int | None) -> None:
        """Raise where the trace lacks one of the steps; None stands for all that it has."""
        # All missing steps in one sentence: the user fixes the command once.
        missing = [str(step) for step in steps if step not in (None, *self.steps)]
        held = f"steps {min(self.steps)} to {max(self.steps)}" if self.steps else "none"
        require(not missing, f"{self.path} has no step {', '.join(missing)}: it holds {held}.")

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the trace to the directory `path`, every row checked; bad input leaves `path` as it was."""
        from moe_rl.replay.convert import convert_trace  # which needs this class

        convert_trace(self, path, overwrite=overwrite)
