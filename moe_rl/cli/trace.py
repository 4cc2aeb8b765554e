"""`moe-rl trace info | validate | convert | synth`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from rich.table import Table

from moe_rl.cli.console import Advance, comma_separated, deliver, json_text, progress_bar, say, say_notes
from moe_rl.cli.help import command, plain_app
from moe_rl.cli.options import with_options
from moe_rl.core.errors import require, require_kind
from moe_rl.core.mappings import attributes, in_words, not_none
from moe_rl.core.outputs import check_outputs, printable
from moe_rl.report.units import format_bytes, listed
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.groups import TraceOptions, parse_value

if TYPE_CHECKING:
    from moe_rl.core.trace import RoutingTrace
    from moe_rl.replay import Manifest, TraceSource

app = plain_app(help="Read, check, convert and generate routing traces.", no_args_is_help=True)


@contextmanager
def _opened(trace: Path, options: TraceOptions) -> "Iterator[tuple[Advance, TraceSource]]":
    """Open a trace under a progress bar; notes are printed at the end."""
    from moe_rl.study.traces import open_for_model

    with progress_bar() as advance, collected_notes() as warnings:
        advance("reading the trace", 0, 1)
        yield advance, open_for_model(trace, options, None)
    say_notes(warnings)


@command(app, "trace info")
@with_options(TraceOptions)
def info(trace: Path, options: TraceOptions, json_path: Path | None = None) -> None:
    """Print the model shape, steps, sequences, tokens and size of a trace."""
    from moe_rl.study.traces import describe_trace

    check_outputs({"--json": json_path}, inputs=(trace,))
    with _opened(trace, options) as (_, source):
        facts = describe_trace(source)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), printable(_written(name, value)))
    deliver({}, partial(json_text, facts), json_path, lambda console: console.print(table))


@command(app, "trace validate")
@with_options(TraceOptions)
def validate(trace: Path, options: TraceOptions) -> None:
    """Check every route; stop at the first wrong checksum, missing layer, or invalid or repeated expert id."""
    with _opened(trace, options) as (advance, source):
        source.validate(partial(advance, "checking"))
    typer.echo(
        f"ok: {source.num_sequences} sequences, {source.num_tokens} tokens, {len(source.moe_layer_ids)} MoE layers, "
        f"{source.num_experts} experts, top-{source.top_k}"
    )


@command(app, "trace convert")
@with_options(TraceOptions)
def convert(
    trace: Path,
    target: Path,
    options: TraceOptions,
    steps: str | None = None,
    routes_only: bool = False,
    counts_only: bool = False,
    coded: bool = False,
    overwrite: bool = False,
    model: str | None = None,
) -> None:
    """Copy a trace of any known format, or some of its steps, to a trace directory, and check every route."""
    from moe_rl.replay import convert_trace
    from moe_rl.study.traces import options_of_model

    with _opened(trace, options_of_model(trace, options, model)) as (advance, source):
        written = convert_trace(
            source,
            target,
            steps=None if steps is None else _steps(steps),
            routes_only=routes_only,
            counts_only=counts_only,
            coded=coded,
            overwrite=overwrite,
            model=model,
            progress=partial(advance, "converting"),
        )
    _say_written(target, written.manifest)
    _say_prompts(written.manifest)


def _steps(text: str) -> list[int]:
    steps = []
    for number in comma_separated(text):
        is_number = number.isascii() and number.isdigit()
        require(is_number, f"--steps must be comma-separated whole numbers, got {text!r}.")
        steps.append(int(number))
    return steps


@command(app, "trace synth")
def synth(
    name: str,
    target: Path,
    option: list[str] | None = None,
    num_layers: int | None = None,
    num_experts: int | None = None,
    moe_router_topk: int | None = None,
    seed: int | None = None,
    like_trace: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Generate a synthetic trace whose sequences prefer different experts, optionally in GRPO groups."""
    from moe_rl.replay import write_trace
    from moe_rl.simulators.registry import SYNTHETIC
    from moe_rl.study.traces import open_trace, routes_of_step

    shape: dict[str, Any] = {"num_layers": num_layers, "num_experts": num_experts, "top_k": moe_router_topk}
    wanted = not_none(shape | {"seed": seed})
    for text in option or []:
        key, equals, value = text.partition("=")
        require(bool(key and equals), f"--option {text!r} must have the form name=value.")
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
            generator = generator.like(routes_of_step(open_trace(like_trace)))
            fitted = attributes(generator.config, ("num_topics", "topic_sigma"))
            wanted |= fitted
        num_steps = int(getattr(generator.config, "num_steps", 1))
        # Piece by piece: a trace of Qwen3-235B with 1.3 M tokens is 1 GB of routes.
        pieces = generator.steps(whole=False)
        advance("generating", 0, num_steps)
        first_piece = next(pieces)

        def generated() -> "Iterator[RoutingTrace]":
            for piece in chain([first_piece], pieces):
                advance("generating", int(piece.step[0]), num_steps)
                yield piece

        written = write_trace(
            generated(),
            target,
            num_experts=first_piece.num_experts,
            moe_layer_ids=first_piece.moe_layer_ids,
            top_k=first_piece.top_k,
            origin={"generator": name} | wanted,
            overwrite=overwrite,
        )
    if like_trace is not None:
        say(f"expert co-activation is fitted to {like_trace}: {in_words(fitted)}")
    _say_written(target, written.manifest)


def _say_written(target: Path, manifest: "Manifest") -> None:
    from moe_rl.study.traces import size_of

    size = format_bytes(size_of(target))
    typer.echo(f"{target}: {manifest.num_sequences} sequences, {manifest.num_tokens} tokens, {size}")


def _say_prompts(manifest: "Manifest") -> None:
    """Print the mean lengths of prompts and responses, which rl-step asks for, if the trace knows them."""
    prompt = float(manifest.origin.get("mean_prompt_tokens", 0))
    if not prompt:
        return
    response = manifest.num_tokens / manifest.num_sequences - prompt
    typer.echo(
        f"mean tokens: prompt {prompt:,.0f}, response {response:,.0f}. For an RL step, give rl-step --prompt-tokens "
        f"{prompt:.0f}."
    )


def _written(name: str, value: object) -> str:
    if name == "size_bytes":
        return format_bytes(float(str(value)))
    if isinstance(value, list):
        return listed(value) or "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value) or "unknown"
