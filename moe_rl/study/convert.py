"""A trace converted by several workers; the copy is the one that a single process writes, byte for byte."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.core.errors import require
from moe_rl.replay import TraceReader, TraceWriter, convert_trace, write_trace
from moe_rl.study.executors import Executor
from moe_rl.study.options import TraceOptions
from moe_rl.study.traces import open_for_model


def convert_with(
    executor: Executor,
    trace: Path | str,
    target: Path,
    options: TraceOptions,
    *,
    steps: Sequence[int] | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **kept: Any,
) -> TraceReader:
    """Write the trace to the directory `target` and return its reader; `kept` is what `convert_trace` is told.

    Steps that can be read by themselves are converted side by side, next to `target`, where all workers must see the
    same files; a foreign file is read by one worker, since any of its steps needs all of it. `progress` gets pieces
    done and in all.
    """
    source = open_for_model(trace, options, None)
    wanted = source.steps if steps is None else tuple(steps)
    whole = None if steps is None else list(steps)
    pieces = [[step] for step in source.steps if step in wanted] if source.steps_apart else [whole]
    missing = sorted(set(wanted) - set(source.steps))
    require(not missing, f"{source.path} has no step {', '.join(map(str, missing))}.")
    shape: dict[str, Any] = {
        "num_experts": source.num_experts,
        "moe_layer_ids": source.moe_layer_ids,
        "top_k": source.top_k,
        "counts_only": bool(kept.get("counts_only")),
        "coded": bool(kept.get("coded")) and not kept.get("counts_only"),
    }
    TraceWriter(target, **shape, overwrite=overwrite)  # refuses a path that is taken before anything is computed
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        task = _Piece(str(Path(trace).absolute()), options, str(Path(folder).absolute()), pieces, kept)
        written: dict[int, str] = {}
        with closing(executor.run(task, range(len(pieces)))) as results:
            for index, path in results:
                written[index] = path
                progress(len(written), len(pieces))
        readers = [TraceReader(Path(written[index])) for index in range(len(pieces))]
        first = readers[0].manifest
        return write_trace(
            (part for reader in readers for part in reader.parts()),
            target,
            **shape,
            model=first.model,
            provenance=first.provenance,
            origin=first.origin,
            overwrite=overwrite,
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Converts some steps into a trace of their own, wherever that runs; returns where it lies."""

    trace: str
    options: TraceOptions
    folder: str
    pieces: Sequence[list[int] | None]
    kept: Mapping[str, Any]

    def __call__(self, index: int) -> str:
        target = Path(self.folder) / f"{index:06d}.moetrace"
        source = open_for_model(self.trace, self.options, None)
        # What a lost worker left behind is written anew.
        convert_trace(source, target, steps=self.pieces[index], overwrite=True, **self.kept)
        return str(target)
