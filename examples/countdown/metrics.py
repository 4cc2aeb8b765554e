"""What a run logs: one JSON line per step, the same in TensorBoard, and a line for the person who watches."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

METRICS_FILE = "metrics.jsonl"
WALL_CLOCK_PREFIX = "time/"
"""Metrics of this prefix differ between two runs of the same config; all others are equal."""


class MetricsLog:
    """Writer of `metrics.jsonl` and `tensorboard/` of a run's folder, and of its progress on stderr."""

    def __init__(self, folder: Path, *, first_step: int, num_steps: int) -> None:
        """Go on at `first_step`; what TensorBoard has of it and later steps is taken back."""
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to load, and one rank of many writes

        self._file = (folder / METRICS_FILE).open("ab")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        console = Console(stderr=True, markup=False, highlight=False)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("steps", total=num_steps, completed=max(0, first_step - 1))
        self._num_steps = num_steps

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._board.close()
        self._file.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> int:
        """Log a step; return the size of the metrics file, which is on disk up to there."""
        line = json.dumps({"step": step, **metrics}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()
        self._progress.update(self._task, completed=step)
        self._progress.console.print(summary(step, self._num_steps, metrics), soft_wrap=True)
        return os.fstat(self._file.fileno()).st_size


def summary(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Return the line of a step; what was not measured in it is left out."""
    forms = {
        "reward": ("reward/mean", "{:.3f}"),
        "held-out accuracy": ("evaluation/accuracy", "{:.3f}"),
        "greedy": ("evaluation/greedy_accuracy", "{:.3f}"),
        "mismatch KL": ("mismatch/k3_kl", "{:.1e}"),
        "imbalance": ("moe_rl/static_imbalance", "{:.2f}"),
        "balanced": ("moe_rl/imbalance", "{:.2f}"),
        "s": ("time/step_s", "{:.1f}"),
    }
    parts = [f"{word} {form.format(metrics[name])}" for word, (name, form) in forms.items() if name in metrics]
    return f"step {step}/{num_steps}: " + ", ".join(parts)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return every line of a run's metrics, in the order of the steps."""
    text = (folder / METRICS_FILE).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
