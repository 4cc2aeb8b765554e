"""Fit the five constants of `simulators/rl_step.py` on published steps of RL, and print the error of held-out rows.

    python benchmarks/fit_rl_step.py rl_steps.json [--fit]

Every row names model, cluster, GPUs, engine, samples, lengths, parallel layout and the published seconds. Routing is
not published: the fullest rank is taken to have `IMBALANCE` times the mean rows. Without --fit the shipped constants
are held against the rows; with it they are fitted on all, and on all but one model for every model.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.config import load_cluster, load_model
from moe_rl.simulators import rl_step as model_of_step
from moe_rl.simulators.rl_step import FITTED, RlStep, RlStepSetting, rl_step
from moe_rl.simulators.rl_update import Packing, first_fit, trainer_seconds
from moe_rl.simulators.setting import StepSetting

IMBALANCE = 1.5
"""Of ranks, without balancing; assumed: recorded GPT-OSS routing has 1.58 at EP8 and 2.2 at EP16, Qwen3's is evener."""


class PublishedStep:
    """A row with its passes priced, so that constants can change."""

    def __init__(self, row: Mapping[str, Any], imbalance: float = IMBALANCE, packing: Packing = first_fit) -> None:
        self.row, self.published = row, float(row["published"]["step"])
        self.model, self.hardware = load_model(row["model"]).spec, load_cluster(row["cluster"])
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.normal(row["mean_seq"], row["mean_seq"] / 3, row["samples"]), 1, row["max_seq"])
        lengths = lengths.astype(np.int64)
        self.forward_s, self.update_s = trainer_seconds(
            self.model,
            self.hardware,
            StepSetting(**row["setting"]),
            lengths,
            train_gpus=row["train_gpus"],
            ep_size=row["ep_size"],
            micro_batch_tokens=row["micro_batch_tokens"],
            mini_batches=row["updates"],
            imbalance=imbalance,
            packing=packing,
        )
        self.responses = np.maximum(lengths - row["prompt"], 1)

    def predicted(self) -> RlStep:
        """Return the step under the constants in force."""
        row = self.row
        setting = RlStepSetting(
            train_gpus=row["train_gpus"],
            rollout_gpus=row["rollout_gpus"],
            engine_size=row["engine"],
            staleness=row["staleness"],
            rollout_precision=row.get("rollout_precision", "bf16"),
            framework_share=FITTED["framework_share"],
        )
        return rl_step(
            self.model,
            self.hardware,
            setting,
            response_lengths=self.responses,
            prompt_tokens=row["prompt"],
            forward_s=self.forward_s,
            update_s=self.update_s,
        )

    @property
    def error(self) -> float:
        """Share by which the prediction is above the published step."""
        return self.predicted().step_time_s / self.published - 1.0


def fitted(steps: Sequence[PublishedStep]) -> dict[str, float]:
    """Return the constants that fit the steps' logarithms best, pulled to those in force."""
    from scipy.optimize import least_squares

    names, before = list(FITTED), dict(FITTED)
    start = np.log(list(before.values()))

    def residuals(logs: np.ndarray) -> np.ndarray:
        FITTED.update(zip(names, np.exp(logs).tolist(), strict=True))
        return np.append(np.log([1.0 + step.error for step in steps]), 0.3 * (logs - start))

    try:
        found = least_squares(residuals, start)
    finally:
        FITTED.update(before)
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))


def held_out(steps: Sequence[PublishedStep]) -> Iterator[tuple[PublishedStep, float]]:
    """Yield every step with its error under constants that were fitted on the other models."""
    before = dict(FITTED)
    for name in dict.fromkeys(step.row["model"] for step in steps):
        FITTED.update(fitted([step for step in steps if step.row["model"] != name]))
        yield from ((step, step.error) for step in steps if step.row["model"] == name)
        FITTED.update(before)


def main() -> None:
    """Print a row per published step, the mean error, and with --fit the constants and held-out errors."""
    parser = argparse.ArgumentParser(description=model_of_step.__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--fit", action="store_true")
    asked = parser.parse_args()
    steps = [PublishedStep(row) for row in json.loads(asked.rows.read_text("utf-8"))["points"]]
    for step in steps:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in step.predicted().parts_s.items())
        print(f"{step.row['name']:52} {step.published:6.1f} s, {step.error:+.0%}: {parts}")
    print(f"mean error {np.mean([abs(step.error) for step in steps]):.1%} of {len(steps)} rows")
    if asked.fit:
        print("fitted on all:", {name: float(f"{value:.3g}") for name, value in fitted(steps).items()})
        errors = [abs(error) for _, error in held_out(steps)]
        print(f"models held out: mean error {np.mean(errors):.1%}")


if __name__ == "__main__":
    main()
