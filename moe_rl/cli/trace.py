"""`moe-rl trace info | validate | convert | synth`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.table import Table

from moe_rl.cli.console import Advance, AsJson, print_json, progress_bar, results, say
from moe_rl.cli.help import plain_app
from moe_rl.cli.options import TracePath, with_options
from moe_rl.core.errors import require, require_kind
from moe_rl.core.outputs import printable
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import Manifest, convert_trace, write_trace
from moe_rl.report.units import format_bytes, listed
from moe_rl.simulators.registry import SYNTHETIC
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.options import TraceOptions, parse_value
from moe_rl.study.traces import describe_trace, open_for_model, options_of_model, routes_of_a_step, size_of

app = plain_app(help="Read, check, convert and generate routing traces.", no_args_is_help=True)

TargetPath = Annotated[Path, typer.Argument(help="Trace directory to write (*.moetrace).", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the trace that is there.")]


@app.command()
@with_options(TraceOptions)
def info(trace: TracePath, options: TraceOptions, as_json: AsJson = False) -> None:
    """Say what a trace holds: model shape, steps, sequences, tokens, size."""
    with progress_bar() as advance, collected_notes() as warnings:
        advance("reading the trace", 0, 1)
        source = open_for_model(trace, options, None)
        facts = describe_trace(source)
    if as_json:
        print_json(facts)
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in facts.items():
            table.add_row(name.replace("_", " "), printable(_written(name, value)))
        results().print(table)
    for warning in warnings:
        say(f"note: {warning}")


@app.command()
@with_options(TraceOptions)
def validate(trace: TracePath, options: TraceOptions) -> None:
    """Read every row and stop at the first damage: checksums, ids out of range or twice, layers not captured."""
    with progress_bar() as advance, collected_notes() as warnings:
        advance("reading the trace", 0, 1)
        source = open_for_model(trace, options, None)
        source.validate(lambda done, total: advance("checking", done, total))
    for warning in warnings:
        say(f"note: {warning}")
    typer.echo(
        f"ok: {source.num_sequences} sequences, {source.num_tokens} tokens, {len(source.moe_layer_ids)} MoE layers, "
        f"{source.num_experts} experts, top-{source.top_k}"
    )


@app.command()
@with_options(TraceOptions)
def convert(
    trace: TracePath,
    target: TargetPath,
    options: TraceOptions,
    steps: Annotated[str | None, typer.Option(help="Steps to take, such as 1,11,21; default: all.")] = None,
    routes_only: Annotated[
        bool,
        typer.Option("--routes-only", help="Leave out policy versions and router log-probabilities: a third is left."),
    ] = False,
    counts_only: Annotated[
        bool, typer.Option("--counts-only", help="Keep token counts per sequence instead of routes: much smaller.")
    ] = False,
    coded: Annotated[
        bool,
        typer.Option("--coded", help="Store routes coded: a fifth to a third of the bytes, ids of a row ascending."),
    ] = False,
    overwrite: Overwrite = False,
    model: Annotated[
        str | None,
        typer.Option(help="Model of the trace, kept there; one of `moe-rl models` says how many experts it has."),
    ] = None,
) -> None:
    """Copy a trace of any known format, or some steps of it, into a trace directory, checking every row."""
    options = options_of_model(trace, options, model)
    with progress_bar() as advance, collected_notes() as warnings:
        advance("reading the trace", 0, 1)
        written = convert_trace(
            open_for_model(trace, options, None),
            target,
            steps=None if steps is None else _steps(steps),
            routes_only=routes_only,
            counts_only=counts_only,
            coded=coded,
            overwrite=overwrite,
            model=model,
            progress=lambda done, total: advance("converting", done, total),
        )
    for warning in warnings:
        say(f"note: {warning}")
    manifest = written.manifest
    typer.echo(
        f"{target}: {manifest.num_sequences} sequences, {manifest.num_tokens} tokens, {format_bytes(size_of(target))}"
    )


def _steps(given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",")]
    whole = all(part.isascii() and part.isdigit() for part in parts)
    require(whole, f"--steps {given!r} must be whole numbers with commas between them.")
    return [int(part) for part in parts]


@app.command()
def synth(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SYNTHETIC.names)}.", show_default=False)],
    target: TargetPath,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="Option of the generator, e.g. num_steps=4; repeat for more.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="MoE layers.")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Experts per MoE layer.")] = None,
    moe_router_topk: Annotated[int | None, typer.Option(help="Experts per token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal traces.")] = None,
    like_trace: Annotated[
        Path | None,
        typer.Option("--like", metavar="<path>", help="Let experts meet in tokens as often as in this trace."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Generate a synthetic trace: sequence-correlated presets, or GRPO groups."""
    given: dict[str, Any] = {
        "num_layers": num_layers,
        "num_experts": num_experts,
        "top_k": moe_router_topk,
        "seed": seed,
    }
    wanted = {key: value for key, value in given.items() if value is not None}
    for text in option or []:
        key, equals, value = text.partition("=")
        require(bool(key and equals), f"--option {text!r} must read name=value.")
        wanted[key] = parse_value(value)
    named = SYNTHETIC[name]
    kinds = get_type_hints(type(named.config))
    for key, value in wanted.items():
        if key in kinds:
            require_kind(key, value, kinds[key])
    require(wanted.get("seed", 0) >= 0, f"seed must be at least 0, got {wanted.get('seed')}.")
    generator = named.with_options(**wanted)
    with progress_bar() as advance:
        if like_trace is not None:
            advance("calibrating", 0, 1)
            generator = generator.like(routes_of_a_step(like_trace))
            fitted = {name: getattr(generator.config, name) for name in ("num_topics", "topic_sigma")}
            wanted |= fitted
        num_steps = int(getattr(generator.config, "num_steps", 1))
        origin = {"generator": name} | wanted
        written = _write_pieces(generator.steps(whole=False), target, num_steps, origin, advance, overwrite=overwrite)
    if like_trace is not None:
        say(f"experts meet as in {like_trace}: {', '.join(f'{key} {value}' for key, value in fitted.items())}")
    typer.echo(
        f"{target}: {written.num_sequences} sequences, {written.num_tokens} tokens, {format_bytes(size_of(target))}"
    )


def _write_pieces(
    pieces: Iterator[RoutingTrace],
    target: Path,
    num_steps: int,
    origin: dict[str, int | float | str | bool],
    advance: Advance,
    *,
    overwrite: bool,
) -> Manifest:
    advance("generating", 0, num_steps)
    first = next(pieces)

    def generated() -> Iterator[RoutingTrace]:
        yield first
        for piece in pieces:
            advance("generating", int(piece.step[0]), num_steps)
            yield piece

    written = write_trace(
        generated(),
        target,
        num_experts=first.num_experts,
        moe_layer_ids=first.moe_layer_ids,
        top_k=first.top_k,
        origin=origin,
        overwrite=overwrite,
    )
    return written.manifest


def _written(name: str, value: object) -> str:
    if name == "size_bytes":
        return format_bytes(float(str(value)))
    if isinstance(value, list):
        return listed(value) or "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value) or "unknown"
