"""What each lever brings to the forecast RL step of published recipes: balance, weight sync, split of GPUs, all of
them.

    python benchmarks/step_levers.py rl_steps.json

Rows are those of `benchmarks/fit_rl_step.py`. Balance: every rank has the mean rows, the most that balancing can bring.
Sync: by the plan, between GPUs of their own; colocated engines keep theirs. Reshard: the same, beside a recipe that
already reshards; the forecast without a transport's name takes one NIC to send, which is slower than what NeMo-RL
publishes. Split: the best share of the same GPUs for the rollout, an eighth to seven eighths, of asynchronous recipes.
Simulated, nothing measured.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.fit_rl_step import PublishedStep
from moe_rl.core.errors import InvalidInputError
from moe_rl.simulators.rl_step import RlStepSetting, framework_seconds, rl_step

PLANNED = "planned"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published step under its own imbalance and perfectly balanced."""

    step: PublishedStep
    even: PublishedStep

    def seconds(self, *, balanced: bool = False, transport: str = "", rollout_gpus: int | None = None) -> float:
        """Return the forecast step with some levers; training scales with the trainer's GPUs."""
        row, passes = self.step.row, self.even if balanced else self.step
        own = row["rollout_gpus"]
        gpus = own if rollout_gpus is None else rollout_gpus
        train_gpus = row["train_gpus"] + (0 if own is None else own - gpus)
        setting = RlStepSetting(
            train_gpus=train_gpus,
            rollout_gpus=gpus,
            engine_size=row["engine"],
            staleness=row["staleness"],
            rollout_precision=row.get("rollout_precision", "bf16"),
        )
        if own is not None:
            setting = replace(setting, weight_sync_transport=transport)
        slower = row["train_gpus"] / train_gpus
        framework = framework_seconds(setting, forward_s=self.step.forward_s, update_s=self.step.update_s)
        return rl_step(
            self.step.model,
            self.step.hardware,
            setting,
            response_lengths=self.step.responses,
            prompt_tokens=row["prompt"],
            forward_s=slower * passes.forward_s,
            update_s=slower * passes.update_s,
            framework_s=slower * framework,
        ).step_time_s

    def best_split(self, *, balanced: bool = False, transport: str = "") -> float:
        """Return the shortest step over splits of the GPUs, the recipe's own among them."""
        row, times = self.step.row, [self.seconds(balanced=balanced, transport=transport)]
        if row["rollout_gpus"] is not None and row["staleness"]:
            gpus = row["train_gpus"] + row["rollout_gpus"]
            for eighths in range(1, 8):
                rollout = gpus * eighths // 8
                if rollout and rollout % row["engine"] == 0:
                    try:
                        times.append(self.seconds(balanced=balanced, transport=transport, rollout_gpus=rollout))
                    except InvalidInputError:
                        continue  # the weights do not fit
        return min(times)


def recipe_of(row: dict[str, Any]) -> Recipe:
    """Return the recipe of a row."""
    return Recipe(step=PublishedStep(row), even=PublishedStep(row, imbalance=1.0))


def main() -> None:
    """Print seconds of every recipe, and what each lever takes off it in per cent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    rows = json.loads(parser.parse_args().rows.read_text())["points"]
    columns = ("published", "forecast", "balance", "sync", "reshard", "split", "all")
    print(f"{'recipe':46s}", *(f"{column:>9s}" for column in columns))
    for row in rows:
        recipe = recipe_of(row)
        now, planned = recipe.seconds(), recipe.seconds(transport=PLANNED)
        levers = (
            recipe.seconds(balanced=True) / now,
            planned / now,
            planned / recipe.seconds(transport="reshard"),
            recipe.best_split() / now,
            recipe.best_split(balanced=True, transport=PLANNED) / now,
        )
        cells = [f"{recipe.step.published:9.1f}", f"{now:9.1f}", *(f"{100 * (lever - 1):8.1f}%" for lever in levers)]
        print(f"{row['name'].removeprefix('NeMo-RL '):46s}", *cells)


if __name__ == "__main__":
    main()
