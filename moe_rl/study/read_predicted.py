"""A policy's step out of a file of `moe-rl simulate --json`, for comparison with a recording."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.profiling.attribution import Call
from moe_rl.profiling.comparison import PART_OF_PREDICTION
from moe_rl.report.document import SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """What the simulator said of one policy."""

    policy: str
    breakdown_s: Mapping[str, float]
    setting: Mapping[str, Any] = field(default_factory=dict)
    trace: Mapping[str, Any] = field(default_factory=dict)

    def share_of_step(self, calls: Collection[Call]) -> tuple[float, list[str]]:
        """Return which share of the predicted micro-batches was recorded, and what a reader must know about it."""
        predicted = self.setting.get("num_micro_batches")
        recorded = len({call.micro_batch for call in calls if call.micro_batch is not None})
        if not recorded or not isinstance(predicted, int):
            return 1.0, ["the recording does not say which micro-batches it holds: it is taken as whole steps."]
        require(
            recorded <= predicted,
            f"the recording holds {recorded} micro-batches, the prediction {predicted}: it is of another step.",
        )
        if recorded == predicted:
            return 1.0, []
        return recorded / predicted, [
            f"the recording holds {recorded} of {predicted} micro-batches: predicted seconds are scaled by that share."
        ]

    def notes(self) -> list[str]:
        """Return what of the prediction is not compared."""
        unseen = {name: s for name, s in self.breakdown_s.items() if name not in PART_OF_PREDICTION and s}
        said = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in unseen.items())
        return [f"predicted and no work of a GPU, so not compared: {said}."] if said else []


def read_prediction(path: Path, policy: str) -> PredictedStep:
    """Read one policy, or yardstick, of a simulation with times."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"--predicted {path} does not exist.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInputError(f"--predicted {path} is not a JSON file: {error}.") from None
    is_ours = isinstance(document, dict) and document.get("schema") == SCHEMA
    require(is_ours, f"--predicted {path} is not a file of moe-rl simulate --json ({SCHEMA}).")
    known = {**document.get("yardsticks", {}), **document.get("policies", {})}
    if policy not in known:
        raise InvalidInputError(f"--policy-name {policy!r} is not in {path}.{nearest_name(policy, known)}")
    breakdown = known[policy].get("breakdown_s")
    require(
        isinstance(breakdown, dict), f"{path} holds no times of {policy!r}: simulate with --objective time to compare."
    )
    return PredictedStep(
        policy=policy,
        breakdown_s={name: float(seconds) for name, seconds in breakdown.items()},
        setting=document.get("setting", {}),
        trace=document.get("trace", {}),
    )
