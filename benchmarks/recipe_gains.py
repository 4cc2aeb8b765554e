"""What perfectly balanced routing would bring to a step of RL of eight published recipes: an upper bound of balancing.

    python -m benchmarks.recipe_gains

Routing of these runs is not published, so the imbalance of static placement is assumed: 1.5 and 2.5 times the mean rows
on the fullest rank. Simulated; nothing was run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import moe_rl
from moe_rl.simulators.rl_step import RlStep

FILE = Path(__file__).with_name("published_rl_recipes.yaml")
IMBALANCES = (1.5, 2.5)
IN_README = ("Qwen3-30B-A3B, 32 H100", "Qwen3-235B-A22B, 256 H100")
HOURS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeGain:
    """One recipe under static placement and under perfect balance."""

    name: str
    gpus: int
    published_s: float
    static: RlStep
    """At the first of `IMBALANCES`."""
    speedups: tuple[float, ...]
    """Of the step, by `IMBALANCES`."""

    @property
    def hours_a_day(self) -> float:
        """GPU hours a day that the first imbalance costs."""
        return HOURS * self.gpus * (1.0 - 1.0 / self.speedups[0])

    @property
    def limit(self) -> str:
        """What a step spends most on, or that it waits for the rollout."""
        parts = self.static.parts_s
        if self.static.beside and self.static.rollout_s >= self.static.training_s:
            return "waits for the rollout"
        largest = max(parts, key=lambda part: parts[part])
        return f"{largest.replace('_', ' ')} {parts[largest] / sum(parts.values()):.0%}"


def gain_of(recipe: Mapping[str, Any]) -> RecipeGain:
    """Price a recipe under every imbalance."""
    options = recipe["options"]
    found = [moe_rl.rl_step(**options, imbalance=imbalance) for imbalance in IMBALANCES]
    return RecipeGain(
        name=recipe["name"],
        gpus=options["train_gpus"] + options.get("rollout_gpus", 0),
        published_s=recipe["published_s"],
        static=found[0]["static"],
        speedups=tuple(each["static"].step_time_s / each["forced_balance"].step_time_s for each in found),
    )


def gains() -> list[RecipeGain]:
    """Return all recipes, in the order of the file."""
    return [gain_of(recipe) for recipe in yaml.safe_load(FILE.read_text())]


def table(names: tuple[str, ...] = ()) -> str:
    """Return one row of Markdown per recipe, or for those of these names."""
    lines = [
        "",
        "| recipe | published step | simulated step | speed-up, imbalance 1.5 | speed-up, imbalance 2.5 "
        "| GPU hours saved a day, imbalance 1.5 | largest part |",
        "|---|---|---|---|---|---|---|",
    ]
    for gain in gains():
        if not names or gain.name in names:
            cells = (
                gain.name, f"{gain.published_s:g} s", f"{gain.static.step_time_s:.0f} s",
                *(f"{speedup:.3f}x" for speedup in gain.speedups),
                f"{gain.hours_a_day:.0f} of {HOURS * gain.gpus:,}", gain.limit,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in (*lines, ""))


def short_table() -> str:
    """Return the rows of README."""
    return table(IN_README)


if __name__ == "__main__":
    print(table())
