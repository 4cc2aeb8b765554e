"""slime and miles: rollout dumps from `--save-debug-rollout-data`, with micro-batches from `--save-debug-train-data`.

A rollout dump is `{"rollout_id", "samples": [Sample.to_dict(), ...]}`. A sample's `rollout_routed_experts` is int32
`[len(tokens) - 1, layers, K]` over all layers, including dense ones (THUDM/slime:slime/utils/types.py,
slime/observability/rollout_data_utils.py). miles may store one surplus row for the last token and rows of -1 where
no route was captured (radixark/miles:miles/utils/replay_base.py). The last token has no route, but the
trainer dispatches a row for it, so the importer adds that row with `valid` False.

In the training data (format version 2), `dp_shards` says which samples each data-parallel rank ran: `partition` holds
positions in the rollout dump, `micro_batch_indices` holds lists of positions in `partition`, and `num_microbatches`
holds the number of micro-batches per optimizer step (THUDM/slime:slime/observability/train_data_utils.py). With several
optimizer steps per rollout, `step = rollout_id * steps_per_rollout + optimizer_step`. Samples that were not trained on
are left out.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.pages import drop_pages
from moe_rl.replay.importers.payloads import as_routes, integer, of_kind
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence, sequence_of_tokens
from moe_rl.replay.importers.torch_file import Opaque, load_torch_file

# Where the trainer ran a sample: `step`, its optimizer step within the rollout, `micro_batch` and `dp_rank`.
Place = dict[str, int]


def _recognizes(path: Path) -> bool:
    files = _dumps(path)
    return bool(files) and isinstance(_samples(load_torch_file(files[0], verify=False)), list)


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    files = _dumps(path)
    require(bool(files), f"{path} does not contain any .pt file.")
    for file in files:
        yield from _read_dump(file, options, _layout_file(options.layout_path, file))


def _dumps(path: Path) -> list[Path]:
    """Return the dump files under a path, by rollout number."""
    if path.is_dir():
        return sorted(path.glob("*.pt"), key=lambda file: (len(file.stem), file.stem))
    if not (path.suffix.lower() in (".pt", ".pth") and path.is_file()):
        return []
    return [path]


def _layout_file(layout: Path | None, dump: Path) -> Path | None:
    """Return the train dump of a rollout dump: the given file, or the one of the same name in the given folder."""
    if layout is None or layout.is_file():
        return layout
    require(layout.is_dir(), f"{layout} does not exist.")
    require(
        (layout / dump.name).is_file(), f"{layout} does not contain {dump.name}, the training data of this rollout."
    )
    return layout / dump.name


def _samples(dump: object) -> object:
    if not (isinstance(dump, dict) and "rollout_id" in dump):
        return None
    return dump.get("samples")


def _read_dump(file: Path, options: ImportOptions, layout_file: Path | None) -> Iterator[RecordedSequence]:
    dump = load_torch_file(file)
    samples = _samples(dump)
    if not isinstance(samples, list):
        raise InvalidInputError(f"{file} is not a rollout dump, because it has no list of samples.")
    if isinstance(dump["rollout_id"], int):
        rollout_id = dump["rollout_id"]
    else:
        rollout_id = 0
    layout: dict[int, Place] = {position: {"step": 0} for position in range(len(samples))}
    steps = 1
    if layout_file is not None:
        layout, steps = _read_layout(layout_file, rollout_id, len(samples))
    for position, sample in enumerate(samples):
        # A sample without a place was not trained: the trainer drops what does not fill a batch.
        if (place := layout.get(position)) is not None:
            with located(f"{file}, sample {position}"):
                yield _sequence(sample, place | {"step": rollout_id * steps + place["step"]})


def _sequence(sample: object, place: Place) -> RecordedSequence:
    fields = of_kind(sample, dict, "it is not a sample.")
    routes = fields.get("rollout_routed_experts")
    require(
        routes is not None,
        "rollout_routed_experts is missing: run with --use-rollout-routing-replay.",
    )
    if isinstance(routes, Opaque):
        raise InvalidInputError(
            f"the dump contains a reference to the routes ({routes.name or 'an unknown object'}), not the routes "
            "themselves."
        )
    ids = as_routes(routes)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list | np.ndarray):
        raise InvalidInputError("the sample has no tokens.")
    group = fields.get("group_index")
    group, name = group if isinstance(group, int) else None, str(fields.get("index", ""))
    recorded = sequence_of_tokens(ids, num_tokens=len(tokens), name=name, group=group, **place)
    # The dump is a mapped file that may be larger than memory: what was read leaves it again.
    drop_pages(ids)
    return recorded


def _read_layout(file: Path, rollout_id: int, num_samples: int) -> tuple[dict[int, Place], int]:
    """Return the place of every trained sample by its position in the rollout dump, and the optimizer steps."""
    dump = load_torch_file(file)
    shards = dump.get("dp_shards") if isinstance(dump, dict) else None
    if not isinstance(shards, list) or not shards:
        raise InvalidInputError(f"{file} is not training data of format version 2, because it has no dp_shards.")
    require(
        dump.get("rollout_id") == rollout_id,
        f"{file} belongs to rollout {dump.get('rollout_id')}, but the samples belong to rollout {rollout_id}.",
    )
    layout: dict[int, Place] = {}
    steps = 1
    for shard in shards:
        with located(file):
            places, steps = _shard_places(shard)
        for position, place in places.items():
            require(
                0 <= position < num_samples and position not in layout,
                f"{file}: sample {position} is not in the rollout dump, or is in two shards.",
            )
            layout[position] = place
    return layout, steps


def _shard_places(shard: object) -> tuple[dict[int, Place], int]:
    fields = of_kind(shard, dict, "a shard of dp_shards is not a dict.")
    partition, batches = fields.get("partition", fields.get("rollout_position")), fields.get("micro_batch_indices")
    counts = fields.get("num_microbatches")
    if not isinstance(partition, list) or not isinstance(batches, list):
        raise InvalidInputError("a shard of dp_shards lacks the list `partition` or `micro_batch_indices`.")
    if batches and isinstance(batches[0], list) and batches[0] and isinstance(batches[0][0], list):
        batches = list(itertools.chain.from_iterable(batches))
    if isinstance(counts, list) and counts:
        per_step = counts
    else:
        per_step = [len(batches)]
    per_step = [integer(count, "num_microbatches") for count in per_step]
    require(
        sum(per_step) == len(batches),
        f"the counts in num_microbatches do not add up to the {len(batches)} micro-batches in micro_batch_indices.",
    )
    numbering = [(step, number) for step, count in enumerate(per_step) for number in range(count)]
    dp_rank = integer(fields.get("data_parallel_rank"), "data_parallel_rank")
    places: dict[int, Place] = {}
    for (step, number), batch in zip(numbering, batches, strict=True):
        require(isinstance(batch, list), "micro_batch_indices must hold lists.")
        for local in batch:
            index = integer(local, "a micro-batch index")
            require(
                0 <= index < len(partition),
                f"micro_batch_indices contains {index}, which is not an index into `partition` ({len(partition)} "
                "entries).",
            )
            position = integer(partition[index], "a position in the partition")
            require(position not in places, f"sample {position} appears in two micro-batches.")
            places[position] = {"step": step, "micro_batch": number, "dp_rank": dp_rank}
    return places, len(per_step)


IMPORTER = Importer(
    name="slime",
    summary="slime or miles rollout dumps (.pt), with the layout of --save-debug-train-data",
    recognizes=_recognizes,
    read=_read,
    reads=("layout_path",),
)
