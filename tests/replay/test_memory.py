"""A trace larger than the memory at hand is written, checked, copied and counted one shard at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lengthy

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from moe_rl.core.trace import RoutingTrace, fill_sequence_fields
from moe_rl.replay import TraceWriter, convert_trace, open_source

LAYERS, TOP_K, SEQUENCES, LENGTH, SHARD_BYTES = 48, 8, 100, 400, 4 << 20

def peak_mib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

rng = np.random.default_rng(0)
ids = np.argsort(rng.random((SEQUENCES * LENGTH, 1, 128), dtype=np.float32), axis=2)[:, :, :TOP_K].astype(np.uint8)
part = RoutingTrace(
    routed_experts=np.repeat(ids, LAYERS, axis=1),
    valid=np.ones(SEQUENCES * LENGTH, np.bool_),
    cu_seqlens=np.arange(SEQUENCES + 1) * LENGTH,
    num_experts=128,
    moe_layer_ids=tuple(range(LAYERS)),
    **fill_sequence_fields(SEQUENCES, {}),
)
shape = {"num_experts": 128, "moe_layer_ids": range(LAYERS), "top_k": TOP_K, "max_shard_bytes": SHARD_BYTES}
folder = Path(sys.argv[1])
with TraceWriter(folder / "a", **shape) as writer:
    for _ in range(12):
        writer.append(part)
before = peak_mib()
source = open_source(folder / "a")
source.validate()
convert_trace(source, folder / "b", max_shard_bytes=SHARD_BYTES).validate()
convert_trace(source, folder / "counts", counts_only=True).validate()
print(source.num_tokens * LAYERS * TOP_K / 2**20, peak_mib() - before)
"""


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    output = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    trace_mib, growth_mib = map(float, output.stdout.split())
    # Twelve parts of 15 MiB; a pass holds a shard of 4 MiB and a few arrays of its size.
    assert trace_mib > 150
    assert growth_mib < 64


def test_replay_loads_no_heavy_package() -> None:
    script = (
        "import sys, moe_rl.replay; print(sorted({'torch', 'triton', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
