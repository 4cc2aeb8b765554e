"""Functions for notebooks and frameworks: simulate, plan, sweep and tune with the commands' options as keywords."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs, encodable
from moe_rl.core.plan import Plan
from moe_rl.report.faces import SimulationReport, Sweep
from moe_rl.report.sweep import Value
from moe_rl.report.tuning import Tuned
from moe_rl.simulators.rl_step import RlStep
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.executors import executor_named
from moe_rl.study.options import SimulationOptions, merge_options, takes_options
from moe_rl.study.plan_and_price import make_plans
from moe_rl.study.resident_slots import open_scenario
from moe_rl.study.rl_options import RlStepOptions, TuneOptions
from moe_rl.study.rl_passes import predict_with_rl, training_passes
from moe_rl.study.run_sweep import run_sweep, span_grid
from moe_rl.study.scenario import Progress
from moe_rl.study.search_layouts import tune as search_layouts
from moe_rl.study.traces import TraceLike


@takes_options(SimulationOptions)
def simulate(
    trace: TraceLike,
    *,
    sensitivity: bool = False,
    config: Path | str | None = None,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> SimulationReport:
    """Predict the gain of every balancing policy on a trace, given as a path, an open trace or a `RoutingTrace`.

    `options` are those of `moe-rl simulate` in Python spelling (`moe_rl.study.SimulationOptions`), over those of
    the YAML file `config`. With `sensitivity` the report says where constants that are 30 % off change the ranking.
    `progress` is called with what is done now, items done and items in all. Raises `InvalidInputError` with the
    sentences of the command line.

    >>> report = simulate("run.moetrace", model="qwen3-235b-a22b", cluster="h100", ep=16)
    ... # doctest: +SKIP
    >>> report.best.policy  # doctest: +SKIP
    'moe-rl'
    """
    merged = merge_options(SimulationOptions, options, config)
    if sensitivity:
        merged.pricing.require_times("sensitivity needs times")
    with collected_notes() as warnings:
        scenario = open_scenario(trace, merged, progress)
        command = _call("simulate", trace, options)
        return predict_with_rl(scenario, progress, command=command, warnings=warnings, sensitivity=sensitivity)


@takes_options(SimulationOptions)
def plan(
    trace: TraceLike,
    *,
    config: Path | str | None = None,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> Plan:
    """Plan one step with one policy, by default `moe-rl`; `options` are those of `moe-rl plan`.

    >>> step = plan("run.moetrace", micro_batch_tokens=16384)  # doctest: +SKIP
    >>> step.save("step.plan.npz")  # doctest: +SKIP
    """
    merged = merge_options(SimulationOptions, options, config).of_one_policy()
    (plan_made,) = make_plans(open_scenario(trace, merged, progress), merged.planning.policy, progress).values()
    return plan_made


@takes_options(RlStepOptions)
def rl_step(
    trace: TraceLike | None = None,
    *,
    config: Path | str | None = None,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> dict[str, RlStep]:
    """Predict the time of a whole RL step under every policy; return a dict by policy, with `static` first.

    `options` are those of `moe-rl rl-step`. Without a trace they describe the samples: the result then holds `static`
    with the given `imbalance`, and `forced_balance`.

    >>> steps = rl_step(model="qwen3-30b-a3b", train_gpus=32, expert_model_parallel_size=8, num_samples=2048,
    ...                 mean_length=3200, max_length=4096, micro_batch_tokens=4096, rollout_engine_size=2)
    >>> steps["static"].step_time_s > steps["forced_balance"].step_time_s
    True
    """
    merged = merge_options(RlStepOptions, options, config)
    return training_passes(trace, merged, progress).steps(merged)


@takes_options(SimulationOptions)
def sweep(
    trace: TraceLike,
    values: Mapping[str, Sequence[Value]],
    *,
    out: Path | str | None = None,
    config: Path | str | None = None,
    jobs: int | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> Sweep:
    """Simulate every combination of the option values in `values` on all cores; `options` sets the other options.

    `jobs` sets how many points run at once. With `executor` "ray" they run on the Ray cluster at `ray_address`, whose
    workers see the same files; None is the cluster that this machine is part of, or one that is started here.

    Points that stand in the file `out` (.jsonl) already are not computed again; None keeps no file.

    >>> found = sweep("run.moetrace", {"expert_model_parallel_size": [8, 16, 32]}, model="qwen3-235b-a22b")
    ... # doctest: +SKIP
    >>> found.save("sweep.svg")  # doctest: +SKIP
    """
    merged = merge_options(SimulationOptions, options, config)
    grid = span_grid(values.items(), merged)
    if out is not None:
        require(Path(out).suffix == ".jsonl", f"{out} must end in .jsonl.")
        inputs = (Path(trace),) if isinstance(trace, str | Path) else ()
        check_outputs({"": Path(out)}, inputs=inputs)
    workers = executor_named(executor, jobs=jobs, ray_address=ray_address)
    file = None if out is None else Path(out)
    command = _call("sweep", trace, options)
    return run_sweep(trace, grid, merged, file, progress=progress, executor=workers, command=command)


@takes_options(TuneOptions)
def tune(
    trace: TraceLike | None = None,
    *,
    out: Path | str | None = None,
    config: Path | str | None = None,
    jobs: int | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> Tuned:
    """Search for the fastest parallel layout (tokens/s) on `gpus` GPUs; lengths come from a trace or the options.

    `options` are those of `moe-rl tune`; layouts with results in the file `out` (.jsonl) are not computed again.

    >>> found = tune(model="qwen3-30b-a3b", gpus=32, num_samples=512, mean_length=4000)  # doctest: +SKIP
    >>> print(found.best.lines("verl"))  # doctest: +SKIP
    """
    merged = merge_options(TuneOptions, options, config)
    workers = executor_named(executor, jobs=jobs, ray_address=ray_address)
    if out is not None:
        out = Path(out)
    return search_layouts(trace, merged, executor=workers, progress=progress, out=out)


def _call(name: str, trace: TraceLike, options: Mapping[str, Any]) -> str:
    arguments = ["trace"]
    if isinstance(trace, str | Path):
        arguments = [repr(str(trace))]
    arguments += [f"{key}={value!r}" for key, value in options.items()]
    return encodable(f"moe_rl.{name}({', '.join(arguments)})")
