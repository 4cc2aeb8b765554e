"""How fast a routing trace is read, checked and reduced to loads, and what memory that takes. CPU only.

    pytest benchmarks/bench_replay.py                      pytest-benchmark suite, a minute
    pytest benchmarks/bench_replay.py -m slow              10 million tokens stay under 2 GB
    python benchmarks/bench_replay.py --json               a table, then one line of JSON; --out FILE writes it as well

The shape is Qwen3-30B-A3B's: 48 MoE layers, 128 experts, top-8, one byte per id. Reduction is timed in memory. The
stages of the large trace run in one process each, so that the peak resident memory is that stage's own.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.hardware import record_hardware
from benchmarks.memory import peak_resident_bytes
from moe_rl.config import load_cluster
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.native import VARIABLE, native_core
from moe_rl.core.reduce import reduce_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceReader, convert_trace
from moe_rl.replay.importers import ImportOptions
from moe_rl.replay.source import open_source
from moe_rl.simulators.synthetic import SequenceModel, synthetic_trace

LARGE_TOKENS = 10_000_000
LARGE_LIMIT_BYTES = 2_000_000_000
STAGES = ("make", "convert", "inspect", "reduce")
MODEL = SequenceModel(
    num_layers=48,
    num_experts=128,
    top_k=8,
    num_sequences=16,
    mean_length=1000,
    expert_sigma=0.6,
    domain_sigma=0.6,
    sequence_sigma=0.9,
    token_persistence=0.3,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result."""

    name: str
    num_tokens: int
    seconds: float
    cpu_seconds: float
    """Of all threads together; says what the code needs where other work shares the machine."""
    peak_resident_bytes: int | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all layers together, per second."""
        return self.num_tokens / self.seconds


def repeated(seed: NDArray[np.uint8], num_tokens: int, sequence_tokens: int) -> Iterator[NDArray[np.uint8]]:
    """Yield sequences of `sequence_tokens` rows of real-looking ids, each with its experts renamed by a shift."""
    done = 0
    while done < num_tokens:
        size = min(sequence_tokens, num_tokens - done)
        start = (done * 7) % (len(seed) - size)
        yield (seed[start : start + size] + np.uint8(done // sequence_tokens % 128)) % np.uint8(128)
        done += size


def seed_routes() -> NDArray[np.uint8]:
    """Return about 16 thousand rows of the synthetic model."""
    routes: NDArray[np.uint8] = synthetic_trace(MODEL).routed_experts  # type: ignore[assignment]  # one byte: E <= 256
    return routes


def in_memory(num_tokens: int) -> RoutingTrace:
    """Return a trace of sequences of 1000 tokens."""
    return RoutingTrace.from_sequences(
        list(repeated(seed_routes(), num_tokens, 1000)), num_experts=128, provenance="synthetic"
    )


def topology() -> ClusterTopology:
    """Return EP16 with a data-parallel rank on each."""
    return ClusterTopology(hardware=load_cluster("h100"), ep_size=16)


def layout_of(lengths: NDArray[np.int64]) -> BatchLayout:
    """Return micro-batches of 16384 tokens per data-parallel rank."""
    return BatchLayout.in_order(lengths, num_dp_ranks=16, token_budget=16_384)


def reduction(trace: RoutingTrace, num_threads: int | None = None) -> Callable[[], StepLoad]:
    """Return the reduction of a trace in memory as a call without arguments."""
    layout, ranks = layout_of(trace.sequence_lengths), topology()
    return lambda: reduce_load([trace], layout=layout, topology=ranks, num_threads=num_threads)


@contextmanager
def counting_in(name: str) -> Iterator[None]:
    """Count in "native" or "numpy" as long as this lasts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(int(name == "native"))
    yield
    del os.environ[VARIABLE]
    if before is not None:
        os.environ[VARIABLE] = before


# --- the large trace, stage by stage --------------------------------------------------------------------------------


def make(directory: Path, num_tokens: int) -> None:
    """Write the trace as the plainest of foreign formats: an .npz of one array per sequence."""
    seed = seed_routes()
    with zipfile.ZipFile(directory / "trace.npz", "w", zipfile.ZIP_STORED) as archive:
        for index, routes in enumerate(repeated(seed, num_tokens, 4000)):
            with archive.open(f"sequence{index:05d}.npy", "w", force_zip64=True) as member:
                np.save(member, routes)


def convert(directory: Path, num_tokens: int) -> None:
    """Convert it to the trace format; every id is checked."""
    source = open_source(directory / "trace.npz", options=ImportOptions(num_experts=128))
    assert source.num_tokens == num_tokens
    convert_trace(source, directory / "trace.moetrace")


def inspect(directory: Path, num_tokens: int) -> None:
    """Read it all, as `moe-rl trace validate` does."""
    reader = TraceReader(directory / "trace.moetrace")
    reader.validate()
    assert reader.manifest.num_tokens == num_tokens


def reduce(directory: Path, num_tokens: int) -> None:
    """Reduce the mapped shards to the load of one step."""
    parts = list(TraceReader(directory / "trace.moetrace").parts())
    lengths = np.concatenate([part.sequence_lengths for part in parts])
    load = reduce_load(parts, layout=layout_of(lengths), topology=topology())
    assert int(load.pairs.sum(dtype=np.int64)) == num_tokens * 48 * 8


def run_stage(stage: str, directory: Path, num_tokens: int) -> Row:
    """Run one stage in a process of its own."""
    command = [sys.executable, __file__, "--stage", stage, "--directory", str(directory), "--tokens", str(num_tokens)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Row(**json.loads(result.stdout.splitlines()[-1]))


def stage_in_this_process(stage: str, directory: Path, num_tokens: int) -> Row:
    """Run one stage here and report its time and the peak of this process."""
    start, cpu_start = time.perf_counter(), time.process_time()
    {"make": make, "convert": convert, "inspect": inspect, "reduce": reduce}[stage](directory, num_tokens)
    return Row(
        name=f"{stage}, {num_tokens} tokens on disk",
        num_tokens=num_tokens,
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu_start,
        peak_resident_bytes=peak_resident_bytes(),
    )


# --- pytest ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    """Return a trace in memory."""
    return in_memory(200_000)


@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_reduce(benchmark: Any, trace: RoutingTrace, backend: str) -> None:
    """Time the reduction in memory; the result is compared with numpy's first."""
    if backend == "native" and native_core() is None:
        pytest.skip("moe_rl._native is not built")
    few = reduction(trace.select(np.arange(3)))
    with counting_in("numpy"):
        expected = few()
    with counting_in(backend):
        assert np.array_equal(few().pairs, expected.pairs)
        benchmark(reduction(trace))
    benchmark.extra_info["tokens_per_s"] = trace.num_tokens / benchmark.stats["median"]


@pytest.mark.parametrize("stage", STAGES[1:])
def test_stage(benchmark: Any, tmp_path: Path, stage: str) -> None:
    """Time a stage of a trace on disk."""
    num_tokens = 50_000
    for before in STAGES[: STAGES.index(stage)]:
        stage_in_this_process(before, tmp_path, num_tokens)
    call = {"convert": convert, "inspect": inspect, "reduce": reduce}[stage]

    def again() -> tuple[tuple[Path, int], dict[str, Any]]:
        if stage == "convert":
            shutil.rmtree(tmp_path / "trace.moetrace", ignore_errors=True)
        return (tmp_path, num_tokens), {}

    benchmark.pedantic(call, setup=again, rounds=3)
    benchmark.extra_info["tokens_per_s"] = num_tokens / benchmark.stats["median"]


@pytest.mark.slow
def test_ten_million_tokens_stay_under_two_gigabytes(tmp_path: Path) -> None:
    """Run every stage in a process of its own and look at its peak resident memory."""
    rows = [run_stage(stage, tmp_path, LARGE_TOKENS) for stage in STAGES]
    for row in rows:
        assert row.peak_resident_bytes is not None
        assert row.peak_resident_bytes < LARGE_LIMIT_BYTES, row


# --- command line ---------------------------------------------------------------------------------------------------


def best_of(name: str, num_tokens: int, call: Callable[[], object], repeats: int) -> Row:
    """Return the shortest times of `repeats` calls, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - start, time.process_time() - cpu_start))
    seconds, cpu_seconds = np.min(times[1:], axis=0).tolist()
    return Row(name=f"reduce in memory, {name}", num_tokens=num_tokens, seconds=seconds, cpu_seconds=cpu_seconds)


def in_memory_rows(num_tokens: int) -> Iterator[Row]:
    """Time the reduction in memory: C++ on all cores and on one, numpy."""
    trace = in_memory(num_tokens)
    if native_core() is not None:
        yield best_of(f"native, {os.cpu_count()} threads", num_tokens, reduction(trace), 20)
        yield best_of("native, 1 thread", num_tokens, reduction(trace, 1), 20)
    with counting_in("numpy"):
        row = best_of("numpy", num_tokens, reduction(trace), 5)
    yield row


def as_text(row: Row) -> str:
    """Return one line of the table."""
    memory = f"{row.peak_resident_bytes / 1e9:8.2f}" if row.peak_resident_bytes else " " * 8
    return f"{row.name:44s} {row.seconds:9.2f} {row.cpu_seconds:9.2f} {row.tokens_per_s / 1e6:10.2f} {memory}"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--out", type=Path, help="write the JSON to this file")
    parser.add_argument("--tokens", type=int, default=LARGE_TOKENS, help="tokens of the trace on disk")
    parser.add_argument("--directory", type=Path, help="where the trace on disk goes (default: a temporary folder)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        print(json.dumps(asdict(stage_in_this_process(arguments.stage, arguments.directory, arguments.tokens))))
        return
    print(f"{'':44s} {'seconds':>9s} {'CPU s':>9s} {'Mtokens/s':>10s} {'peak GB':>8s}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for stage in STAGES:  # first, while this process is small: a child inherits its parent's peak
            rows.append(run_stage(stage, Path(directory), arguments.tokens))
            print(as_text(rows[-1]), flush=True)
    for row in in_memory_rows(1_000_000):
        rows.append(row)
        print(as_text(row), flush=True)
    document = {
        "benchmark": "replay",
        "command": f"python benchmarks/bench_replay.py --json --tokens {arguments.tokens}",
        "machine": record_hardware(Path(__file__).parent) | {"native": native_core() is not None},
        "rows": [asdict(row) | {"tokens_per_s": round(row.tokens_per_s)} for row in rows],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(document))


if __name__ == "__main__":
    main()
