"""Routing traces on disk: the `*.moetrace/` format and readers for what engines and trainers write."""

from moe_rl.replay.imported import ImportedTrace
from moe_rl.replay.importers import IMPORTERS, Importer, ImportOptions, RecordedSequence
from moe_rl.replay.manifest import SCHEMA, Manifest, ShardRecord
from moe_rl.replay.sequences import Trace, concatenate, count_sequences
from moe_rl.replay.source import open_source, recorded_sequences
from moe_rl.replay.traces import TraceReader, TraceSource, convert_trace, write_trace
from moe_rl.replay.writer import MAX_SHARD_BYTES, TraceWriter

__all__ = [
    "open_source", "convert_trace", "write_trace", "TraceSource", "ImportedTrace", "ImportOptions",
    "TraceReader", "TraceWriter", "Manifest", "ShardRecord", "SCHEMA", "MAX_SHARD_BYTES", "Trace", "concatenate",
    "count_sequences", "IMPORTERS", "Importer", "RecordedSequence", "recorded_sequences",
]  # fmt: skip
