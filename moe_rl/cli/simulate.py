"""`moe-rl simulate`, `moe-rl demo` and `moe-rl plan`."""

from functools import partial
from pathlib import Path

from moe_rl.cli.console import (
    comma_separated,
    command_line,
    deliver,
    flags_with_values,
    progress_bar,
    results,
    say,
    say_notes,
)
from moe_rl.cli.options import with_options
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.options import SimulationOptions, merge_options


def simulate_trace(
    trace: Path,
    options: SimulationOptions,
    json_path: Path | None = None,
    html: Path | None = None,
    trace_out: Path | None = None,
    trace_micro_batches: int = 1,
    columns: str | None = None,
    explain: bool = False,
    sensitivity: bool = False,
    expert_map: Path | None = None,
) -> None:
    """Predict the gain of every balancing policy on a recorded routing trace.

    Example: moe-rl simulate run.moetrace --model qwen3-30b-a3b --cluster h100 --ep 16
    """
    from moe_rl.cli.rollout_map import score_map_file
    from moe_rl.report.columns import check_columns
    from moe_rl.report.html import render_html
    from moe_rl.report.terminal import print_report
    from moe_rl.study.plan_and_price import chrome_trace
    from moe_rl.study.resident_slots import open_scenario
    from moe_rl.study.rl_passes import predict_with_rl

    if expert_map is not None:
        flags = {"--html": html, "--trace-out": trace_out, "--sensitivity": sensitivity}
        refused = flags_with_values(flags)
        require(
            not refused,
            f"--expert-map evaluates decoding, not training, so it cannot be combined with {refused}.",
        )
        score_map_file(trace, expert_map, options, json_path)
        return
    if trace_out is not None:
        options.pricing.require_times("--trace-out draws times")
    if sensitivity:
        options.pricing.require_times("--sensitivity needs times")
    if columns is not None:
        names = tuple(comma_separated(columns.replace("-", "_")))
    else:
        names = ()
    check_columns(names)
    check_outputs({"--json": json_path, "--html": html, "--trace-out": trace_out}, inputs=(trace,))
    files: dict[Path, bytes] = {}
    with progress_bar() as advance, collected_notes() as warnings:
        scenario = open_scenario(trace, options, advance)
        report = predict_with_rl(scenario, advance, command=command_line(), warnings=warnings, sensitivity=sensitivity)
        advance("writing", 0, 1)
        if html is not None:
            files[html] = render_html(report).encode()
        if trace_out is not None:
            files[trace_out] = chrome_trace(scenario, report.plans, num_micro_batches=trace_micro_batches)
    show = partial(print_report, report, names=names, explain=explain)
    deliver(files, report.json, json_path, show)


simulate = with_options(SimulationOptions)(simulate_trace)


def demo(
    json_path: Path | None = None,
    html: Path | None = None,
    columns: str | None = None,
    explain: bool = False,
    tokens_per_rank: int | None = None,
    expert_model_parallel_size: int | None = None,
    cluster: str | None = None,
    policy: str | None = None,
    train: bool = False,
) -> None:
    """Simulate all policies on the bundled trace of a small Qwen3-MoE, with options of configs/experiments/demo.yaml.

    With --train, the trace comes from a new GRPO run with the settings in examples/countdown/demo.yaml.
    """
    from moe_rl.cli.train_demo import train_demo
    from moe_rl.config import bundled_traces

    if train:
        flags = {"--json": json_path, "--tokens-per-rank": tokens_per_rank, "--ep": expert_model_parallel_size}
        refused = flags_with_values(flags | {"--cluster": cluster, "--policy": policy})
        require(
            not refused,
            f"demo --train takes its settings from examples/countdown, so it cannot be combined with {refused}.",
        )
        train_demo(html, command=command_line())
        return
    settings = {
        "tokens_per_rank": tokens_per_rank,
        "expert_model_parallel_size": expert_model_parallel_size,
        "cluster": cluster,
        "policy": policy,
    }
    options = merge_options(SimulationOptions, settings, "demo")
    simulate_trace(bundled_traces()["countdown-grpo"], options, json_path, html, columns=columns, explain=explain)


@with_options(SimulationOptions)
def plan(
    trace: Path,
    options: SimulationOptions,
    out: Path | None = None,
    export: str | None = None,
    json_path: Path | None = None,
    capacity: bool = False,
) -> None:
    """Plan one training step with one policy, or place the experts of a rollout engine, and write the result.

    Example: moe-rl plan run.moetrace --ep 16 -o plan.npz

    Example: moe-rl plan run.moetrace --ep 16 --resident-slots 1 --export sglang
    """
    from moe_rl.cli.rollout_map import export_map
    from moe_rl.core.metrics import imbalance, rank_load
    from moe_rl.planner.registry import make_planner
    from moe_rl.report.units import format_bytes, format_time
    from moe_rl.study.plan_and_price import load_bounds, load_under, make_plans
    from moe_rl.study.resident_slots import open_scenario

    if export is not None:
        export_map(trace, export, options, out or Path(f"{trace.stem}.{export}.json"), json_path)
        return
    out = out or Path(f"{trace.stem}.plan.npz")
    require(json_path is None, "--json works only with --export; use --out to write a plan.")
    options = options.of_one_policy()
    if capacity:
        options = options.for_static_buffers()
    require(out.suffix == ".npz", f"--out {out} must end in .npz.")
    check_outputs({"--out": out}, inputs=(trace,))
    with progress_bar() as advance, collected_notes() as warnings:
        scenario = open_scenario(trace, options, advance)
        (plan_made,) = make_plans(scenario, options.planning.policy, advance).values()
        load = load_under(plan_made, scenario.batch)
        before = imbalance(rank_load(make_planner("static").plan(scenario.problem), scenario.batch.load))
        after = imbalance(rank_load(plan_made, load))
        bounds = load_bounds(plan_made, load, scenario.topology)
    require(
        not capacity or plan_made.capacity is not None,
        "some tokens have no recorded route, so --capacity works only for the recorded batch size: leave out "
        "--tokens-per-rank.",
    )
    plan_made.save(out)
    lines = {
        "policy": plan_made.policy,
        "max/mean rank load": f"{before:.3f} static, {after:.3f} planned",
        "bound of its replicas": f"{bounds.placement:.3f}, however tokens are split among an expert's replicas",
        "bound of its nodes": "none, because replicas cross nodes"
        if bounds.node is None
        else f"{bounds.node:.3f}, with replicas only inside nodes",
        "bound of every plan": f"{bounds.lb0:.3f}",
        "replicas per layer": f"{plan_made.replicas_per_plan:.2f}",
        "moved between steps": f"{format_bytes(plan_made.migration.moved_bytes)} by all ranks together",
        "solved in": format_time(plan_made.solve_time_s),
        "hash": plan_made.hash,
    }
    console = results()
    for name, value in lines.items():
        console.print(f"{name:23} {value}")
    for sentence in plan_made.capacity.sentences() if capacity and plan_made.capacity else ():
        console.print(sentence, soft_wrap=True)
    say_notes((*plan_made.notes, *warnings))
    say(f"wrote {out}")
