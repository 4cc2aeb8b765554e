"""Every EP size beside the setting that a run has today: the table of `moe-rl tune --current`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_rl.core.mappings import without
from moe_rl.report.tuned_settings import ShapeLevers, TunedSetting, fastest_lever

ENGINES_ALONE = ("static", "engine")
"""Levers that a run has without moe_rl."""


def with_moe_rl(speeds: Mapping[str, float]) -> str:
    """Return the fastest lever of `moe-rl`, of speeds by lever."""
    return fastest_lever(without(speeds, ENGINES_ALONE))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSize:
    """A setting's speeds over that of today's setting with static placement, by the routes of the trace."""

    setting: TunedSetting
    static: float
    moe_rl: float
    interval: tuple[float, float]
    """Both ends of the 80 % interval of `moe_rl`."""
    other: tuple[float, float] | None
    """`static` and `moe_rl` with the other kind of software; None where known steps decide the software."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparison:
    """Today's setting, then the fastest of every EP size."""

    today: ShapeLevers
    software: str
    other_software: str
    rows: tuple[ComparedSize, ...]
    """Today's setting first."""
    unstated: tuple[str, ...] = ()
    """Of today's setting, what the user left out, as it was chosen, e.g. "tokens=8192"."""

    def __str__(self) -> str:
        setting = self.today.setting
        head = (
            f"speed relative to today's setting ({setting.name}, {setting.dispatcher}, micro-batches of "
            f"{setting.micro_batch_tokens:,} tokens, recompute {setting.recompute}) with static placement, "
            f"{self.today.speeds['static']:,.0f} tokens/s/GPU"
        )
        if self.unstated:
            head += f"\nnot stated by --current, so assumed of today's setting: {', '.join(self.unstated)}"
        columns = f"{'':27}{self.software + ':':>9} static  moe-rl  80 % interval"
        if self.rows[0].other is not None:
            columns += f"  {self.other_software + ':':>9} static  moe-rl"
        return "\n".join([head, columns, *(self._line(row, today=row is self.rows[0]) for row in self.rows)])

    def _line(self, row: ComparedSize, *, today: bool) -> str:
        name = f"today, {row.setting.name}" if today else f"{row.setting.name}, {row.setting.dispatcher}"
        interval = "-".join(f"{end:.2f}x" for end in row.interval)
        line = f"{name:30}{row.static:12.2f}x  {row.moe_rl:5.2f}x  {interval:>13}"
        if row.other is not None:
            line += f"{row.other[0]:17.2f}x  {row.other[1]:5.2f}x"
        return line

    def sentences(self) -> list[str]:
        """Return the gain at today's EP size, and of the best setting, with their intervals."""
        today, best = self.rows[0], max(self.rows, key=lambda row: row.moe_rl)
        low, high = today.interval
        sentences = [f"At today's setting, moe-rl is {low:.2f}x to {high:.2f}x as fast as static placement."]
        if best is not today:
            low, high = best.interval
            certainty = "" if low > 1.0 else ", so the forecast does not tell the two apart"
            sentences.append(
                f"{best.setting.name} with moe-rl is {low:.2f}x to {high:.2f}x as fast as today's setting with static "
                f"placement{certainty}."
            )
        if self.today.command:
            sentences.append(f"To get the same numbers for today's setting: {self.today.command}")
        return sentences

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        rows = []
        for row in self.rows:
            figures: dict[str, Any] = {
                "name": row.setting.name, "dispatcher": row.setting.dispatcher, "static": row.static,
                "moe_rl": row.moe_rl, "interval": list(row.interval),
            }  # fmt: skip
            if row.other is not None:
                figures["other_software"] = list(row.other)
            rows.append(figures)
        return {
            "today": self.today.as_json(),
            "software": self.software,
            "other_software": self.other_software,
            "sizes": rows,
        }
