"""Times of expert MLPs in BF16 and FP8, predicted and measured, and how far off a predicted speed-up of FP8 is.

`python -m benchmarks.kernels.held_out --save` writes `expert_times.json`, for `make tables` and `moe-rl bench layer`.

A time is of forward and backward of the experts of one EP rank. The H200 measured the ranks of a recorded step (phase
`promise` of `benchmarks/results/gpu/h200/rows.jsonl`), whose times gave no rate to the predictions.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

FILE = Path(__file__).resolve().parents[1] / "results" / "static" / "expert_times.json"
ROWS_BOUNDS = (12_000, 20_000)
"""Between the three bins of recorded ranks, in rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeTimes:
    """Microseconds of the same experts under both recipes."""

    bf16_us: float
    fp8_us: float

    @property
    def speedup(self) -> float:
        """How many times as fast FP8 is."""
        return self.bf16_us / self.fp8_us


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTimes:
    """One rank's experts."""

    model: str
    rows: int
    tokens: int | None
    """Per rank of EP8, routed evenly; None: the rows of a rank of the recorded step."""
    measured: RecipeTimes | None
    """On the H200."""
    h200: RecipeTimes
    """Predicted, as is `h100`."""
    h100: RecipeTimes

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Self:
        """Return what `asdict` made."""
        names = ("measured", "h200", "h100")
        times = {name: RecipeTimes(**fields[name]) if fields[name] else None for name in names}
        return cls(**{**fields, **times})


def save(times: Sequence[ExpertTimes], path: Path = FILE) -> None:
    """Write JSON, one rank per line, in tenths of a microsecond."""
    exact = json.dumps([asdict(rank) for rank in times])
    ranks = json.loads(exact, parse_float=lambda digits: round(float(digits), 1))
    lines = ",\n".join(f" {json.dumps(rank)}" for rank in ranks)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read(path: Path = FILE) -> list[ExpertTimes]:
    """Read what `save` wrote."""
    return [ExpertTimes.of_json(fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Ratios of the ranks of a bin."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Self:
        """Return the mean and the extremes."""
        return cls(mean=statistics.mean(ratios), low=min(ratios), high=max(ratios))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRanks:
    """Recorded ranks with similar numbers of rows."""

    ranks: tuple[ExpertTimes, ...]

    @property
    def rows(self) -> str:
        """Return "5,316 to 11,743"."""
        rows = [rank.rows for rank in self.ranks]
        return f"{min(rows):,} to {max(rows):,}"

    def mean_speedup(self, source: str) -> float:
        """Return the mean speed-up of FP8: "measured", or predicted for "h200" or "h100"."""
        return statistics.mean(getattr(rank, source).speedup for rank in self.ranks)

    def error(self) -> Spread:
        """Return predicted / measured speed-ups on the H200."""
        ratios = []
        for rank in self.ranks:
            assert rank.measured is not None
            ratios.append(rank.h200.speedup / rank.measured.speedup)
        return Spread.of(ratios)


def measured_ranks(times: Sequence[ExpertTimes]) -> MeasuredRanks:
    """Return all recorded ranks."""
    return MeasuredRanks(ranks=tuple(rank for rank in times if rank.measured is not None))


def bins(times: Sequence[ExpertTimes]) -> list[MeasuredRanks]:
    """Return the recorded ranks in three bins of rows."""
    few, many = ROWS_BOUNDS
    ranks = measured_ranks(times).ranks
    parts = (
        tuple(rank for rank in ranks if rank.rows < few),
        tuple(rank for rank in ranks if few <= rank.rows < many),
        tuple(rank for rank in ranks if many <= rank.rows),
    )
    return [MeasuredRanks(ranks=part) for part in parts]


def table(times: Sequence[ExpertTimes]) -> str:
    """Return the speed-up of FP8 as a table of Markdown: recorded ranks, then layers with even routing."""
    lines = [
        "| model | rows per rank | source | H200 measured | H200 predicted | predicted / measured | H100 predicted |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    for part in bins(times):
        measured, h200, h100 = (f"{part.mean_speedup(source):.2f}x" for source in ("measured", "h200", "h100"))
        error = part.error()
        error_range = f"{error.mean:.2f} ({error.low:.2f} to {error.high:.2f})"
        source = f"{len(part.ranks)} recorded ranks"
        cells = (part.ranks[0].model, part.rows, source, measured, h200, error_range, h100)
        lines.append(f"| {' | '.join(cells)} |")
    for layer in times:
        if layer.tokens is not None:
            h200, h100 = f"{layer.h200.speedup:.2f}x", f"{layer.h100.speedup:.2f}x"
            cells = (layer.model, f"{layer.rows:,}", f"`--tokens {layer.tokens}`", "not measured", h200, "", h100)
            lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)
