"""Traces wherever they are: a path, a trace that is open already, or one in memory."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import LoadedModel, bundled_traces, load_model
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.mappings import attributes
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.outputs import encodable
from moe_rl.core.trace import RoutingTrace, SequenceCounts
from moe_rl.replay import Trace, TraceSource, concatenate, open_source
from moe_rl.replay.manifest import MANIFEST_NAME
from moe_rl.replay.source import require_agreement
from moe_rl.replay.traces import NATIVE_FORMAT, Progress
from moe_rl.study.groups import TraceOptions
from moe_rl.study.options import merge_options

IN_MEMORY = "memory"
SAYS_ITS_SHAPE = (NATIVE_FORMAT, IN_MEMORY)  # Formats that hold the number of experts.

TraceLike = str | Path | TraceSource | Trace | Sequence[NDArray[np.integer]]


def open_trace(trace: TraceLike, **options: Any) -> TraceSource:
    """Open a trace directory, a file in any known format, a `RoutingTrace`, or a list of arrays [tokens, layers, topk].

    `options` are those of `moe-rl trace info` in Python spelling: `format`, `num_experts`, `moe_router_topk`, ...
    Raises `InvalidInputError` where nothing is there, no format fits, or the contents are wrong.

    >>> trace = open_trace("rollout.pt", format="slime", num_experts=128)  # doctest: +SKIP
    >>> trace.num_tokens, trace.steps  # doctest: +SKIP
    (131072, (0, 1))
    >>> trace.save("rollout.moetrace")  # doctest: +SKIP
    """
    return open_for_model(trace, merge_options(TraceOptions, options), None)


def open_for_model(trace: TraceLike, options: TraceOptions, model: LoadedModel | None) -> TraceSource:
    """Open the trace; a foreign format is told the shape of the model, which it may not hold itself."""
    if _are_arrays(trace):
        trace = _trace_of_arrays(trace, options, model)
    if isinstance(trace, RoutingTrace | SequenceCounts):
        trace = TraceInMemory.take(trace)
    if not isinstance(trace, str | Path):
        if not isinstance(trace, TraceSource):
            raise InvalidInputError(
                "a trace must be a path, an open trace, a RoutingTrace or a list of arrays [tokens, layers, topk], "
                f"got {type(trace).__name__}."
            )
        require(
            options.format in (None, trace.format),
            f"{trace.path} was opened in format {trace.format}, but format is set to {options.format}.",
        )
        require_agreement(trace, options.import_options())
        return trace
    trace = located_trace(trace)
    shape = {} if model is None or is_native(trace) else _shape(model.spec)
    try:
        return open_source(trace, format=options.format, options=options.import_options(**shape))
    except InvalidInputError as error:
        if model is None or not shape or not Path(trace).exists():
            raise
        # The file may be right and the model the wrong one: the sentence names both.
        spec = model.spec
        raise InvalidInputError(
            f"{error} (Expected for model {spec.name!r}: {spec.num_moe_layers} MoE layers, {spec.num_experts} experts, "
            f"top-{spec.top_k}.)"
        ) from error


def _are_arrays(trace: object) -> TypeGuard[Sequence[NDArray[np.integer]]]:
    return isinstance(trace, list | tuple) and len(trace) > 0 and all(isinstance(item, np.ndarray) for item in trace)


def _trace_of_arrays(
    arrays: Sequence[NDArray[np.integer]], options: TraceOptions, model: LoadedModel | None
) -> RoutingTrace:
    """Return the trace of one array [tokens, layers, topk] per sequence.

    Example: `[np.array([[[0, 3]], [[1, 3]]])]` with 4 experts is one sequence of two tokens in one layer, top-2.
    """
    num_experts = options.num_experts or (None if model is None else model.spec.num_experts)
    require(num_experts is not None, "a list of arrays does not contain the number of experts: give num_experts.")
    shapes = {array.shape[1:] for array in arrays}
    require(
        len(shapes) == 1 and len(next(iter(shapes))) == 2,
        "all arrays of a trace must have shape [tokens, layers, topk], with the same number of layers and the same "
        f"topk, got shapes {', '.join(sorted({str(array.shape) for array in arrays})[:3])}.",
    )
    return RoutingTrace.from_sequences(
        arrays,
        num_experts=int(num_experts or 0),
        moe_layer_ids=options.moe_layer_ids,
        provenance=options.provenance or "unknown",
    )


def routes_of_step(source: TraceSource, step: int | None = None) -> RoutingTrace:
    """Return the routes of a step of a trace, by default the first; raise where it holds counts alone."""
    routes = concatenate(tuple(source.parts(source.steps[0] if step is None else step)))
    if not isinstance(routes, RoutingTrace):
        raise InvalidInputError(f"{source.path} contains only counts, but the routes of individual tokens are needed.")
    return routes


def options_of_model(trace: str | Path, options: TraceOptions, model: str | None) -> TraceOptions:
    """Return the options with the shape of the model of that name, where a foreign file is not told its experts."""
    if model is None or options.num_experts is not None or is_native(trace):
        return options
    try:
        shape = _shape(load_model(model).spec)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error} For an unknown model, give --num-experts.") from error
    shape["moe_router_topk"] = shape.pop("top_k")
    return options.with_words(**{**shape, **options.stated_words()})


def located_trace(trace: str | Path) -> Path:
    """Return the path of a trace, which may be the name of a bundled one."""
    path = Path(trace)
    return path if path.exists() else bundled_traces().get(str(trace), path)


def is_native(trace: str | Path) -> bool:
    """Return whether it is a trace directory of ours, which says its own shape."""
    return (Path(trace) / MANIFEST_NAME).is_file()


def _shape(spec: MoeModelSpec) -> dict[str, object]:
    """Return the shape of a model as options for readers of foreign formats."""
    shape: dict[str, object] = {"num_experts": spec.num_experts, "top_k": spec.top_k, "num_layers": spec.num_layers}
    return shape | ({"moe_layer_ids": list(spec.moe_layer_ids)} if spec.num_moe_layers < spec.num_layers else {})


def describe_trace(source: TraceSource) -> dict[str, object]:
    """Return the facts of a trace as JSON values."""
    counts = ("counts_only", "num_experts", "top_k", "num_sequences", "num_tokens")
    return {
        "path": encodable(str(source.path)),
        "format": source.format,
        "model": encodable(source.model),
        "provenance": source.provenance,
        **attributes(source, counts),
        "num_moe_layers": len(source.moe_layer_ids),
        "moe_layer_ids": list(source.moe_layer_ids),
        "steps": list(source.steps),
        "size_bytes": size_of(source.path),
        "inferred": list(source.inferred_fields),
    }


def size_of(path: Path) -> int:
    """Return the bytes of a trace's files."""
    return sum(file.stat().st_size for file in _files_of(path))


def _files_of(path: Path) -> list[Path]:
    """Return a trace's files: itself, or those of its folder."""
    if not path.is_dir():
        return [path]
    return [file for file in path.rglob("*") if file.is_file()]


def digest_of(trace: TraceLike) -> str:
    """Return a digest of the names and contents of the trace's files, wherever it lies, or of its arrays."""
    if isinstance(trace, TraceInMemory):
        trace = trace.trace
    digest = hashlib.sha256()
    if _are_arrays(trace):
        for array in trace:
            digest.update(f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}\n".encode())
        return digest.hexdigest()
    if isinstance(trace, RoutingTrace | SequenceCounts):
        for item in fields(trace):
            value = getattr(trace, item.name)
            content = np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            digest.update(f"{item.name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
        return digest.hexdigest()
    path = trace.path if isinstance(trace, TraceSource) else located_trace(str(trace))
    for file_path in sorted(_files_of(path)):
        name = file_path.relative_to(path) if path.is_dir() else file_path.suffix
        # The path from the folder, not the folder's own: a trace may move between two runs of a sweep.
        with file_path.open("rb") as file:
            digest.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInMemory(TraceSource):
    """Routes or counts that a program holds, as a source."""

    trace: Trace

    @classmethod
    def take(cls, trace: Trace) -> Self:
        """Take in a trace; every id is checked."""
        if isinstance(trace, RoutingTrace):
            trace.check_routes()
        return cls(
            path=Path("trace in memory"), format=IN_MEMORY, num_experts=trace.num_experts, top_k=trace.top_k,
            moe_layer_ids=trace.moe_layer_ids, model=trace.model, provenance=trace.provenance,
            steps=tuple(dict.fromkeys(trace.step.tolist())), num_sequences=trace.num_sequences,
            num_tokens=int(trace.sequence_lengths.sum()), counts_only=isinstance(trace, SequenceCounts), trace=trace,
        )  # fmt: skip

    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield the sequences of one step (default: of all)."""
        self.require_step(step)
        if step is None or len(self.steps) == 1:
            yield self.trace
        else:
            yield self.trace.select(np.flatnonzero(self.trace.step == step))

    def validate(self, progress: Progress | None = None) -> None:
        """Do nothing: the ids were read when the trace was taken in."""
