"""Read `*.moetrace/` directories: memory-mapped, one shard at a time, nothing accepted that was not written whole."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from moe_rl.core.errors import require
from moe_rl.core.trace import RoutingTrace, require_captured_layers
from moe_rl.replay.manifest import Manifest, ShardRecord
from moe_rl.replay.sequences import Trace, concatenate
from moe_rl.replay.shard import check_shard_bytes, check_shard_file, map_shard

Progress = Callable[[int, int], None]
"""Called with (done, total), both in the same unit."""


class TraceReader:
    """Reader of one trace directory.

    Opening reads the manifest and checks that every shard is there, has its size and declares the right arrays. A
    shard's checksum and the range of its ids are checked the first time it is handed out. Every failure is an
    `InvalidInputError` that names the file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        self._verified: set[str] = set()
        for shard in self.manifest.shards:
            check_shard_file(self.path / shard.file, self.manifest, shard)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the trace, in recorded order."""
        return self.manifest.steps

    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield the shards of one step (default: of all), mapped when asked for; hold one at a time to save memory."""
        for shard in self._shards(step):
            yield self._map(shard)

    def load(self, step: int | None = None) -> Trace:
        """Return one step (default: the whole trace) as one object: mapped if it is one shard, else copied."""
        return concatenate(list(self.parts(step)))

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

    def _shards(self, step: int | None) -> list[ShardRecord]:
        if step is None:
            return list(self.manifest.shards)
        found = [shard for shard in self.manifest.shards if shard.step == step]
        steps = self.steps
        span = f"steps {min(steps)} .. {max(steps)}" if steps else "no steps"
        require(len(found) > 0, f"{self.path} has no step {step}: it holds {span}.")
        return found

    def _map(self, shard: ShardRecord) -> Trace:
        path = self.path / shard.file
        check_shard_file(path, self.manifest, shard)
        if shard.file not in self._verified:
            check_shard_bytes(path, shard)
        trace = map_shard(path, self.manifest, shard)
        self._verified.add(shard.file)
        return trace
