"""What each lever brings to the forecast RL step of published recipes: balance, packing, weight sync, engine map, split
of GPUs, all of them.

    python benchmarks/step_levers.py rl_steps.json

Rows are those of `benchmarks/fit_rl_step.py`. Balance: every rank has the mean rows in the update, the most that
balancing can bring. Packing, of the update too: as few micro-batches as no packing goes below, from first-fit with the
longest first. Routes of log-prob and reference passes are not known before they run, so these stay as they are. Sync:
by the plan, between GPUs of their own; colocated engines keep theirs. From what: the forecast without a transport's
name, NeMo-RL's packed broadcast, and its reshard. Map: engines of these recipes cut every expert over their ranks and
have no map; the column is what a map of their loads brings to an engine of as many GPUs that spreads experts, if its
fullest rank has 1.7 times the mean without one. It is not part of `all`. Split: the best share of the same GPUs for the
rollout, an eighth to seven eighths, of asynchronous recipes. Simulated, nothing measured.
"""

import argparse
import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.fit_rl_step import PublishedStep
from moe_rl.core.errors import InvalidInputError
from moe_rl.simulators.rl_step import RlStepSetting, rl_step
from moe_rl.simulators.rl_update import fewest_bins

PLANNED = "planned"
# Rows of an engine's fullest rank over the mean, without a map of its own rollouts.
ENGINE_IMBALANCE = 1.7


@dataclass(frozen=True, kw_only=True)
class Levers:
    """What is done to a recipe."""

    balanced: bool = False
    packed: bool = False
    transport: str = ""
    rollout_imbalance: float = 1.0
    rollout_map: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published step under its own imbalance and perfectly balanced."""

    step: PublishedStep
    even: PublishedStep
    packed: PublishedStep
    """In as few micro-batches as can be."""
    even_and_packed: PublishedStep

    def seconds(self, levers: Levers, rollout_gpus: int | None = None) -> float:
        """Return the forecast step with some levers; training scales with the trainer's GPUs."""
        row, passes = self.step.row, self._passes(levers)
        own = row["rollout_gpus"]
        gpus = own if rollout_gpus is None else rollout_gpus
        train_gpus = row["train_gpus"] + (0 if own is None else own - gpus)
        setting = RlStepSetting(
            train_gpus=train_gpus,
            rollout_gpus=gpus,
            engine_size=row["engine"],
            staleness=row["staleness"],
            rollout_precision=row.get("rollout_precision", "bf16"),
            rollout_imbalance=levers.rollout_imbalance,
            rollout_map=levers.rollout_map,
            trainer_pp_size=row["setting"].get("pipeline_model_parallel_size", 1),
        )
        if own is not None:
            setting = replace(setting, weight_sync_transport=levers.transport)
        slower = row["train_gpus"] / train_gpus
        return rl_step(
            self.step.model,
            self.step.hardware,
            setting,
            response_lengths=self.step.responses,
            prompt_tokens=row["prompt"],
            forward_s=slower * passes.forward_s,
            update_s=slower * passes.update_s,
            static_s=(slower * self.step.forward_s, slower * self.step.update_s),
        ).step_time_s

    def _passes(self, levers: Levers) -> PublishedStep:
        if levers.balanced:
            return self.even_and_packed if levers.packed else self.even
        return self.packed if levers.packed else self.step

    def best_split(self, levers: Levers) -> float:
        """Return the shortest step over splits of the GPUs, the recipe's own among them."""
        row, times = self.step.row, [self.seconds(levers)]
        if row["rollout_gpus"] is not None and row["staleness"]:
            gpus = row["train_gpus"] + row["rollout_gpus"]
            for eighths in range(1, 8):
                rollout = gpus * eighths // 8
                if rollout and rollout % row["engine"] == 0:
                    with contextlib.suppress(InvalidInputError):  # the weights do not fit
                        times.append(self.seconds(levers, rollout))
        return min(times)


def recipe_of(row: dict[str, Any]) -> Recipe:
    """Return the recipe of a row."""
    return Recipe(
        step=PublishedStep(row),
        even=PublishedStep(row, imbalance=1.0),
        packed=PublishedStep(row, packing=fewest_bins),
        even_and_packed=PublishedStep(row, imbalance=1.0, packing=fewest_bins),
    )


def parts(recipe: Recipe) -> dict[str, float]:
    """Return the step with each lever over the step without it."""
    now, planned = recipe.seconds(Levers()), recipe.seconds(Levers(transport=PLANNED))
    spread = Levers(rollout_imbalance=ENGINE_IMBALANCE)
    mapped = replace(spread, rollout_map=True)
    return {
        "balance": recipe.seconds(Levers(balanced=True)) / now,
        "packing": recipe.seconds(Levers(packed=True)) / now,
        "sync": planned / now,
        "broadcast": planned / recipe.seconds(Levers(transport="packed-broadcast")),
        "reshard": planned / recipe.seconds(Levers(transport="reshard")),
        "map": recipe.seconds(mapped) / recipe.seconds(spread),
        "split": recipe.best_split(Levers()) / now,
        "all": recipe.best_split(Levers(balanced=True, packed=True, transport=PLANNED)) / now,
    }


def main() -> None:
    """Print seconds of every recipe, and what each lever takes off it in per cent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    rows = json.loads(parser.parse_args().rows.read_text())["points"]
    print(f"{'recipe':46s} published  forecast")
    for row in rows:
        recipe = recipe_of(row)
        cells = [f"{recipe.step.published:9.1f}", f"{recipe.seconds(Levers()):9.1f}"]
        cells += [f"{name} {100 * (part - 1):.1f}%" for name, part in parts(recipe).items()]
        print(f"{row['name'].removeprefix('NeMo-RL '):46s}", *cells)


if __name__ == "__main__":
    main()
