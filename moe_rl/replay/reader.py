"""Read `*.moetrace/` directories: memory-mapped, one shard at a time, nothing accepted that was not written whole."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.core.errors import require
from moe_rl.core.trace import RoutingTrace, require_captured_layers
from moe_rl.replay.manifest import Manifest, ShardRecord
from moe_rl.replay.sequences import Trace
from moe_rl.replay.shard import check_shard_bytes, check_shard_file, map_shard
from moe_rl.replay.trace_source import Progress, TraceSource

NATIVE_FORMAT = "moetrace"


class TraceReader(TraceSource):
    """Reader of one trace directory.

    Opening reads the manifest and checks that every shard is there, has its size and declares the right arrays. A
    shard's checksum and the range of its ids are checked the first time it is handed out. Every failure is an
    `InvalidInputError` that names the file.
    """

    steps_apart = True

    def __init__(self, path: Path | str) -> None:
        self.manifest = manifest = Manifest.read(Path(path))
        # What a manifest and a source both say goes by one name.
        shared = [item.name for item in fields(TraceSource) if hasattr(manifest, item.name)]
        facts: dict[str, Any] = {name: getattr(manifest, name) for name in shared}
        super().__init__(path=Path(path), format=NATIVE_FORMAT, **facts)
        self._verified: set[str] = set()
        for shard in manifest.shards:
            check_shard_file(self.path / shard.file, manifest, shard)

    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield the shards of one step (default: of all), mapped when asked for; hold one at a time to save memory."""
        self.require_step(step)
        for shard in self.manifest.shards:
            if step in (None, shard.step):
                yield self._map(shard)

    def validate(self, progress: Progress | None = None) -> None:
        """Read everything and raise at the first damage: checksums, ids, duplicates, a layer that was not captured.

        `progress` gets bytes done and bytes in all.
        """
        manifest = self.manifest
        require(manifest.num_tokens > 0, f"{self.path} is empty: it holds no token.")
        # Every checksum again: a file may have changed since it was first handed out.
        self._verified.clear()
        total, done = sum(shard.size_bytes for shard in manifest.shards), 0
        captured = np.zeros(manifest.num_layers, np.bool_)
        any_route = False
        for shard in manifest.shards:
            part = self._map(shard)
            if isinstance(part, RoutingTrace):
                captured |= part.check_ids()
                any_route |= bool(part.valid.any())
            else:
                captured |= part.tokens_per_expert[:, :, 1:].any(axis=(0, 2))
                any_route |= bool(part.num_valid_tokens.any())
            done += shard.size_bytes
            if progress is not None:
                progress(done, total)
        require(any_route, f"{self.path} is empty: no row holds a route.")
        require_captured_layers(captured, manifest.moe_layer_ids, manifest.num_experts)

    def _map(self, shard: ShardRecord) -> Trace:
        path = self.path / shard.file
        # Again, since hours may lie between opening and reading; the checksum costs a pass and is taken once.
        check_shard_file(path, self.manifest, shard)
        if shard.file not in self._verified:
            check_shard_bytes(path, shard)
        trace = map_shard(path, self.manifest, shard)
        self._verified.add(shard.file)
        return trace
