"""One trace from what every data-parallel rank of a run recorded."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_rl.core.errors import require
from moe_rl.replay.sequences import Trace
from moe_rl.replay.traces import TraceReader, write_trace

logger = logging.getLogger(__name__)


def merge_recordings(folder: Path | str, path: Path | str, *, overwrite: bool = False) -> TraceReader:
    """Write what all data-parallel ranks recorded into `folder` as one trace at `path`; return its reader.

    Steps come in the order of rank 0, sequences by data-parallel rank. A step that a killed run left incomplete is left
    out, with a warning. Raises `InvalidInputError` where a rank's recording is missing or of another model.
    """
    folder = Path(folder)
    first_part = folder / "dp00000.moetrace"
    require(first_part.is_dir(), f"{folder} does not contain a recording: the file {first_part.name} is missing.")
    shape = TraceReader(first_part).manifest
    ranks = range(int(shape.origin.get("data_parallel_size", 1)))
    readers = [TraceReader(folder / f"dp{rank:05d}.moetrace") for rank in ranks]
    # In the order of rank 0: all ranks run the steps in one order.
    complete = [step for step in readers[0].steps if _is_complete(readers, step)]
    left_out = sorted({step for reader in readers for step in reader.steps} - set(complete))
    if left_out:
        logger.warning(
            "moe_rl left out steps %s of %s, because not all data-parallel ranks recorded them in full.",
            left_out,
            folder,
        )

    def parts() -> Iterator[Trace]:
        for step in complete:
            for reader in readers:
                yield from reader.parts(step)

    return write_trace(
        parts(),
        path,
        overwrite=overwrite,
        num_experts=shape.num_experts,
        moe_layer_ids=shape.moe_layer_ids,
        top_k=shape.top_k,
        model=shape.model,
        provenance=shape.provenance,
        origin=shape.origin,
    )


def _is_complete(readers: Sequence[TraceReader], step: int) -> bool:
    """Return whether every rank has the step, with as many micro-batches as the others."""
    if not all(step in reader.steps for reader in readers):
        return False
    # Ranks meet in every micro-batch of a step: one that recorded fewer was killed in it.
    last_micro_batches = set()
    for reader in readers:
        last_of_parts = [int(part.micro_batch.max(initial=-1)) for part in reader.parts(step)]
        last_micro_batches.add(max(last_of_parts))
    return len(last_micro_batches) == 1
