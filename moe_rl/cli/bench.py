"""`moe-rl bench`: compare kernels with their peers, and the planner's policies, with the benchmarks of a checkout."""

import contextlib
import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from moe_rl.cli.console import comma_separated, command_line, deliver, json_text, say
from moe_rl.cli.help import TwoLevelCommand, command, plain_app, worded
from moe_rl.core.errors import require, require_known
from moe_rl.core.outputs import check_outputs
from moe_rl.version import install_line

app = plain_app(help="Benchmark planners and kernels on this machine.", invoke_without_command=True)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KERNEL_SUITES = {
    "gemm": "Time the grouped GEMMs: forward, dgrad, wgrad, and all three with quantization and padding.",
    "experts": "Time the expert MLP forward and backward, quantization included.",
    "quantize": "Time quantization to FP8: of rows, of weights, and along the token dimension.",
    "permute": "Time the permutation of tokens into expert order and back, forward and backward.",
    "swiglu": "Time gated activations: forward, forward with quantization, and backward.",
    "router": "Time the router's log-probabilities and the histogram of tokens per expert.",
}
WRONG_RESULT = 1
PRESET_BUDGET_S = 0.002


@app.callback()
def _bench(context: typer.Context) -> None:
    """Without a command, time every suite of kernels on a tiny model, and predict the times of an H100."""
    if context.invoked_subcommand is None:
        run = _operators("")
        import torch

        torch.set_num_threads(1)  # on shapes as small as these, threads wait for each other
        device = run.device_here()
        _show(_run(run.select(device=device, models="tiny", routings="uniform"), device, PRESET_BUDGET_S))


@command(app, "bench planner")
def planner(
    sections: str | None = None,
    trace: Path | None = None,
    board: list[Path] | None = None,
    json_path: Path | None = None,
) -> None:
    """Compare the plan quality and planning time of all policies on recorded, synthetic and Qwen3-sized loads.

    The command needs a checkout of the repository. Its cases are defined in benchmarks/bench_planner.py, those of
    --board in benchmarks/board.py.
    """
    if board:
        judge = _benchmark("board")
        check_outputs({"--json": json_path}, inputs=tuple(board))
        scores = judge.board(tuple(board))
        deliver({}, partial(json_text, scores), json_path)
        for line in judge.as_text(scores).splitlines():
            say(line)
        return
    benchmark = _benchmark("bench_planner")
    all_sections = benchmark.ALL_SECTIONS
    if sections:
        names = comma_separated(sections)
    else:
        names = list(all_sections)
    for section in names:
        require_known(section, (*all_sections, "scale"), f"--sections: {section!r} is unknown.")
    require(trace is None or trace.is_file(), f"there is no trace at {trace}.")
    check_outputs({"--json": json_path}, inputs=() if trace is None else (trace,))
    with contextlib.redirect_stdout(sys.stderr) if str(json_path) == "-" else contextlib.nullcontext():
        document = benchmark.run_sections(names, trace or benchmark.DEV_TRACE, command=command_line())
    deliver({}, partial(json_text, document), json_path)


@command(app, "bench layer")
def layer(
    model: str = "qwen3-30b-a3b",
    gpu: str = "h100",
    tokens: int = 4096,
    ep_size: int = 8,
    json_path: Path | None = None,
) -> None:
    """Predict the time of one layer's experts and permutation on a GPU that is not there, without running them.

    The rates are those that kernels reached on an H200. The command needs a checkout of the repository and Triton.
    """
    from moe_rl.config import load_model

    _operators(" layer")
    require(importlib.util.find_spec("triton") is not None, f"moe-rl bench layer needs Triton: {install_line('gpu')}.")
    predicted = _benchmark("kernels.predicted_layer")
    require_known(gpu, predicted.TB_PER_S, f"--gpu: {gpu!r} is unknown.")
    check_outputs({"--json": json_path}, inputs=())
    spec = load_model(model).spec
    document = predicted.layer_document(spec, gpu=gpu, ep_size=ep_size, tokens=tokens, command=command_line())
    text = predicted.as_text(document)
    deliver({}, partial(json_text, document), json_path, lambda out: out.print(text, soft_wrap=True))


def _benchmark(name: str) -> ModuleType:
    """Return a module of the checkout's benchmarks; raise if there is no checkout (in an installed wheel)."""
    path = BENCHMARKS.joinpath(*name.split(".")).with_suffix(".py")
    require(
        path.is_file(),
        f"benchmarks need a checkout of moe_rl, but the file {path} does not exist: run `pip install -e .` in the "
        "checkout.",
    )
    sys.path.insert(0, str(BENCHMARKS.parent))
    return importlib.import_module(f"benchmarks.{name}")


def _kernels(suite: str, summary: str) -> None:
    """Add the command that times one suite of kernels."""

    def time_suite(
        model: str | None = None,
        routing: str | None = None,
        of_pass: str | None = None,
        provider: str | None = None,
        tokens: int | None = None,
        ep_size: int | None = None,
        trace: Path | None = None,
        device: str = "cuda",
        budget_s: float = 0.3,
        json_path: Path | None = None,
    ) -> None:
        run = _operators(f" {suite}")
        run.require_device(device)
        require(budget_s > 0, f"--budget-s must be positive, got {budget_s}.")
        selection = run.select(
            suite, device=device, models=model, routings=routing, passes=of_pass, providers=provider, tokens=tokens,
            ep_size=ep_size, trace=trace,
        )  # fmt: skip
        check_outputs({"--json": json_path}, inputs=() if trace is None else (trace,))
        document = _run(selection, device, budget_s)
        _show(document, json_path)

    help_text = (
        f"{summary} The result of each kernel is checked before the kernel is timed. The last column computes the time "
        "on an H100 from roofs, for GEMMs of the plain loop: it is optimistic, not a forecast. The command needs a "
        "checkout of the repository."
    )
    app.command(suite, cls=TwoLevelCommand, help=help_text)(worded("bench kernels", time_suite))


def _run(selection: Any, device: str, budget_s: float) -> dict[str, object]:
    """Return the rows of a selection; with Triton, rows of our kernels also have what their roofs allow on an H100."""
    from moe_rl.kernels.registry import is_interpreted

    # An interpreted kernel cannot be recorded.
    compiled = not is_interpreted() and importlib.util.find_spec("triton") is not None
    if compiled:
        model = _benchmark("kernels.prediction").load_model()
    else:
        model = None
    document: dict[str, object] = _benchmark("operators.run").run(
        selection, device=device, budget_s=budget_s, command=command_line(), tell=say, predict=model and model.predict
    )
    return document | {"predicted_from": model.shares.source if model else ""}


def _operators(suite: str) -> ModuleType:
    """Return `benchmarks.operators.run`; raise if torch or the checkout is missing."""
    require(
        importlib.util.find_spec("torch") is not None,
        f"moe-rl bench{suite} needs torch: {install_line('gpu')}, or {install_line('torch')} for a CPU.",
    )
    return _benchmark("operators.run")


def _show(document: dict[str, object], json_path: Path | None = None) -> None:
    """Write the document, print the table and what was missing or wrong; a wrong result makes the exit code 1."""
    harness, run = _benchmark("operators.harness"), _benchmark("operators.run")
    table = harness.table(run.rows_of(document))

    def text() -> str:
        return f"{harness.as_json(document, indent=1)}\n"

    deliver({}, text, json_path, lambda out: out.print(table, soft_wrap=True))
    for sentence in run.missing_providers(document):
        say(f"not run: {sentence}")
    for row in (wrong := run.wrong_rows(document)):
        say(f"WRONG: {row}")
    if wrong:
        raise typer.Exit(WRONG_RESULT)


for _suite, _summary in KERNEL_SUITES.items():
    _kernels(_suite, _summary)
