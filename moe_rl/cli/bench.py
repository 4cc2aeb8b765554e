"""`moe-rl bench planner`: the planner benchmark of a checkout."""

import contextlib
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from moe_rl.cli.console import say
from moe_rl.cli.outputs import check_outputs, write_outputs
from moe_rl.core.errors import nearest_name, require

app = typer.Typer(help="Measure quality and time on this machine.", no_args_is_help=True)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@app.callback()
def _bench() -> None:
    pass


@app.command()
def planner(
    sections: Annotated[
        str | None, typer.Option(help="Comma-separated: trace, synthetic, time, perturbed, speed; by default all.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="GPT-OSS-20B routing (.npz) for section trace; left out when absent.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures; - for standard output.")] = None,
) -> None:
    """Compare quality and time of every policy on real, synthetic and Qwen3-shaped loads.

    Needs a checkout: the cases are those of benchmarks/bench_planner.py.
    """
    benchmark = _benchmark("bench_planner")
    known = benchmark.ALL_SECTIONS
    chosen = [section.strip() for section in sections.split(",")] if sections else list(known)
    for section in chosen:
        require(section in known, f"--sections: {section!r} is unknown.{nearest_name(section, known)}")
    require(trace is None or trace.is_file(), f"there is no trace at {trace}.")
    check_outputs({"--json": json_path}, inputs=() if trace is None else (trace,))
    to_stdout = str(json_path) == "-"
    command = shlex.join(["moe-rl", *sys.argv[1:]])
    with contextlib.redirect_stdout(sys.stderr) if to_stdout else contextlib.nullcontext():
        document = benchmark.run_sections(chosen, trace or benchmark.DEV_TRACE, command=command)
    text = json.dumps(document, indent=1) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    elif json_path is not None:
        write_outputs({json_path: text.encode()})
        say(f"wrote {json_path}")


def _benchmark(name: str) -> ModuleType:
    """Return a module of the checkout's benchmarks; raise where there is no checkout (an installed wheel)."""
    path = BENCHMARKS / f"{name}.py"
    require(path.is_file(), f"benchmarks are part of a checkout, there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"moe_rl_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
