"""What a cluster's owner timed, priced by the simulator: operations, layers, attention, whole steps.

`moe_rl.profiling.calibration` fits constants to any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from moe_rl.config import load_cluster, load_model
from moe_rl.core.cost import TUNED_COSTS, LayerRows, all_to_all_time, gemm_time
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.software import SoftwareCosts
from moe_rl.core.step_words import Dispatcher
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.measurements import Measurement, read_measurements
from moe_rl.simulators.balanced import uniform_load
from moe_rl.simulators.base_time import layer_parts
from moe_rl.simulators.rows import uniform_rows
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.whole_runs import WholeRun
from moe_rl.study.groups import PricingOptions
from moe_rl.study.known_steps import PricedRun, stated_rows
from moe_rl.study.options import SimulationOptions
from moe_rl.yaml_files import read_yaml

YAML = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """A whole step under forced balance, per token of a GPU."""

    run: WholeRun

    @property
    def time_ms(self) -> float:
        """Milliseconds that a GPU took per token."""
        return 1e3 / self.run.tokens_per_s

    @property
    def group(self) -> str:
        """The model: what is held out together."""
        return self.run.model

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """Return the step of a row, as benchmarks/validate_model reads them."""
        return cls(run=WholeRun.of(row, lambda name: load_model(name).spec, load_cluster))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """A whole step in the words of the options, as `--known-step` takes it."""

    run: PricedRun
    seconds: float

    @property
    def time_ms(self) -> float:
        """Milliseconds of the step."""
        return 1e3 * self.seconds

    @property
    def group(self) -> str:
        """The model: what is held out together."""
        return self.run.model


Timing = Measurement | TimedStep | TimedRun


def read_timed(path: Path, cluster: str) -> Sequence[Timing]:
    """Read a CSV of operations, or a YAML file of whole steps, run on `cluster` where a row names none.

    `steps` are rows in the words of the options, `points` have the form of published runs.
    """
    if path.suffix not in YAML:
        return read_measurements(path)
    content = read_yaml(path)
    if isinstance(content.get("steps"), list):
        stated = stated_rows(
            content["steps"], SimulationOptions(pricing=PricingOptions(cluster=cluster)), name=path.name
        )
        return [TimedRun(run=run, seconds=seconds) for run, seconds in stated]
    rows = content.get("points")
    if not isinstance(rows, list) or not rows:
        raise InvalidInputError(f"{path} contains no steps, because the list `points` is missing or empty.")
    return [TimedStep.of({"cluster": cluster, "name": f"step {number}", **row}) for number, row in enumerate(rows, 1)]


def predicted_seconds(timed: Timing, hardware: HardwareSpec, costs: SoftwareCosts = TUNED_COSTS) -> float:
    """Return what the simulator says that it takes on `hardware` under this software, routing being uniform."""
    if isinstance(timed, TimedRun):
        return float(timed.run.price(hardware, costs)[0])
    if isinstance(timed, TimedStep):
        return 1.0 / timed.run.predicted(hardware, costs).tokens_per_s_per_gpu
    model = timed.model()
    setting = StepSetting(dispatcher=Dispatcher(timed.dispatcher), precision=timed.precision, software=costs)
    backward, tokens = timed.phase == "backward", timed.tokens_per_rank
    part = layer_parts(model, hardware, setting, backward=backward, moe_layer=True)["attention"]
    attention = part.per_token * tokens + part.per_square * tokens * timed.sequence_length
    if timed.kind == "attention":
        return attention
    params = setting.layer_cost_params(model, timed.topology(hardware))
    rows = _uniform_rows(timed, float(hardware.gemm_tile_rows))
    all_to_all = float(all_to_all_time(params, rows).max())
    gemm = float(gemm_time(params, rows, backward=backward).max())
    if backward:
        fixed_ms = hardware.layer_fixed_backward_ms
    else:
        fixed_ms = hardware.layer_fixed_forward_ms
    moe_layer = gemm + 2.0 * all_to_all + fixed_ms * 1e-3
    by_kind = {"all_to_all": all_to_all, "expert_gemm": gemm, "moe_layer": moe_layer, "layer": attention + moe_layer}
    return by_kind[timed.kind]


@lru_cache(maxsize=4096)
def _uniform_rows(timed: Measurement, tile_rows: float) -> LayerRows:
    """Return where the rows go when every expert takes the same share of every rank's tokens.

    A fit prices every measurement some hundred times, and no constant that it moves changes where rows go.
    """
    model, topology = timed.model(), timed.topology(load_cluster("h100"))
    load = uniform_load(model, topology, tokens_per_rank=timed.tokens_per_rank)
    return uniform_rows(load, topology, tile_rows=tile_rows, deduplicated=not Dispatcher(timed.dispatcher).sends_rows)
