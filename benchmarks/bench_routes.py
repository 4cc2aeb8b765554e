"""What coded routes weigh, how fast they are read, what a whole data path takes, and what the check finds. CPU only.

    python -m benchmarks.bench_routes size [--trace FILE]       bytes beside the index of the combination
    python -m benchmarks.bench_routes decode                    MB of ids per second and core
    python -m benchmarks.bench_routes sequences [--trace FILE]  the same sequence by sequence, and coding them
    python -m benchmarks.bench_routes turns                     bytes of a turn beside its new tokens
    python -m benchmarks.bench_routes memory [--trace FILE]     host peak of slime's data path, scaled down, and its law
    python -m benchmarks.bench_routes faults                    seeded faults in every producer's format x 5 families
    python -m benchmarks.bench_routes recorded [--trace FILE]   faults and false alarms in recorded routes
    python -m benchmarks.bench_routes clean [--batches N]       false alarms in clean batches (10,000 by default)
    python -m benchmarks.bench_routes online                    host time of the online check beside a step's

`--trace` takes a trace of any format; the default is the bundled one. Times are CPU times of one process.
"""

import argparse
import io
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import CONFIGS
from moe_rl.replay import ImportOptions, recorded_sequences
from moe_rl.routes import CheckedSequence, RoutesReader, RoutesWriter, check_routes
from moe_rl.routes.coded import CodedRoutes
from moe_rl.routes.sets import check_shape

SHAPES = {"gpt-oss": (32, 4), "Qwen3": (128, 8), "DeepSeek-V3": (256, 8), "ESFT": (64, 6), "Qwen3-Next": (512, 10)}
GB = 1e9
# slime #2384: prompts x samples, tokens, layers, top-k; int32 ids in each of 8 actors of a host
CASE = {"samples": 96 * 16, "tokens": 32_768, "layers": 47, "top_k": 4, "actors": 8}


def random_routes(rng: np.random.Generator, rows: int, layers: int, experts: int, top_k: int) -> NDArray[Any]:
    """Draw sets of K of E."""
    scores = rng.random((rows, layers, experts), np.float32)
    return np.argpartition(-scores, top_k - 1, axis=2)[:, :, :top_k].astype(np.uint8 if experts <= 256 else np.uint16)


def stream(sequences: list[NDArray[Any]], experts: int) -> bytes:
    """Code sequences as one stream."""
    sink = io.BytesIO()
    layers, top_k = sequences[0].shape[1:]
    with RoutesWriter(sink, num_experts=experts, top_k=top_k, layer_ids=range(layers)) as writer:
        for key, ids in enumerate(sequences):
            writer.add(key, ids)
    return sink.getvalue()


def recorded(path: Path | None, most: int = 1 << 62) -> tuple[list[NDArray[Any]], int]:
    """Return sequences of a trace, about `most` rows, and the experts."""
    path = path or next((CONFIGS / "traces").glob("*.moetrace"))
    rows, found, highest = 0, [], 0
    for record in recorded_sequences(path, options=ImportOptions()):
        ids = record.routes if record.valid is None else record.routes[record.valid]
        found.append(np.asarray(ids))
        rows, highest = rows + len(ids), max(highest, int(ids.max(initial=0)))
        if rows >= most:
            break
    return found, 1 << highest.bit_length()


def measure_size(trace: Path | None) -> dict[str, Any]:
    """Bytes of random routes and of a trace beside the index."""
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {"random": {}}
    for name, (experts, top_k) in SHAPES.items():
        ids = random_routes(rng, 40_000, 2, experts, top_k)
        index = check_shape(experts, top_k).index_bits
        size = len(stream([ids], experts))
        result["random"][name] = {
            "bits": 8 * size / (40_000 * 2),
            "index_bits": index,
            "ratio": 8 * size / 80_000 / index,
        }
    sequences, experts = recorded(trace)
    layers, top_k = sequences[0].shape[1:]
    index = check_shape(experts, top_k).index_bits
    bits = 8 * len(stream(sequences, experts)) / (sum(map(len, sequences)) * layers)
    return result | {"trace": {"bits": bits, "index_bits": index, "ratio": bits / index}}


def measure_decode(trace: Path | None) -> dict[str, Any]:
    """Ids decoded per second of CPU time, the best of many readings."""
    rng = np.random.default_rng(1)
    cases = {
        name: ([random_routes(rng, 16_384, 4, *SHAPES[name])], SHAPES[name][0])
        for name in ("gpt-oss", "Qwen3", "DeepSeek-V3")
    }
    cases["trace"] = recorded(trace, 200_000)
    result = {}
    for name, (sequences, experts) in cases.items():
        if name == "trace":  # one sequence: what a sequence costs by itself is not decoding
            sequences = [np.concatenate(sequences)]
        reader = RoutesReader(stream(sequences, experts))
        out = np.zeros(sequences[0].shape, sequences[0].dtype)
        times = []
        while len(times) < 20 or sum(times) < 4:  # the best of many: a shared machine is quiet now and then
            begin = time.process_time()
            reader.ids(0, out=out)
            times.append(time.process_time() - begin)
        result[name] = {
            "ids_mb_per_s": out.size / min(times) / 1e6,
            "int32_mb_per_s": 4 * out.size / min(times) / 1e6,
        }
    return result


# Rows of the sequences that recorded ones are cut into beside their own lengths.
CUT_TO = (300, 1000, 2000)


def measure_sequences(trace: Path | None, rounds: int = 5) -> dict[str, Any]:
    """Ids per second of CPU time: coded, and read sequence by sequence in order and shuffled; bits of a set."""
    sequences, experts = recorded(trace, 200_000)
    result: dict[str, Any] = {"own": _rates(sequences, experts, rounds)}
    rows = np.concatenate(sequences)
    for length in CUT_TO:
        if len(rows) >= length:
            pieces = [rows[begin : begin + length] for begin in range(0, len(rows) - length + 1, length)]
            result[f"{length}_rows"] = _rates(pieces, experts, rounds)
    return result


def _rates(sequences: list[NDArray[Any]], experts: int, rounds: int) -> dict[str, Any]:
    ids, layers = sum(each.size for each in sequences), sequences[0].shape[1]

    def rate(work: Callable[[], object]) -> float:
        times = []
        for _ in range(rounds):  # the best of some: a shared machine is quiet now and then
            begin = time.process_time()
            work()
            times.append(time.process_time() - begin)
        return ids / min(times) / 1e6

    coded = stream(sequences, experts)
    reader, in_order = RoutesReader(coded), list(range(len(sequences)))
    shuffled = np.random.default_rng(0).permutation(len(sequences)).tolist()
    rows = sum(map(len, sequences))
    return {
        "sequences": len(sequences),
        "mean_rows": rows / len(sequences),
        "bits_per_set": 8 * len(coded) / (rows * layers),
        "encode_ids_mb_per_s": rate(lambda: stream(sequences, experts)),
        "in_order_ids_mb_per_s": rate(lambda: [reader.ids(key) for key in in_order]),
        "shuffled_ids_mb_per_s": rate(lambda: [reader.ids(key) for key in shuffled]),
    }


def measure_turns() -> dict[str, Any]:
    """Bytes of every turn of a conversation."""
    rng = np.random.default_rng(2)
    ids, sent = random_routes(rng, 24_000, 24, 32, 4), []
    writer = RoutesWriter(lambda data: sent.append(len(data)), num_experts=32, top_k=4, layer_ids=range(24))
    ends = [4000, 8000, 10_000, 14_000, 22_000, 24_000]
    for start, end in itertools.pairwise([0, *ends]):
        writer.add(0, ids[start:end], start=start)
        writer.flush()
    new = np.diff([0, *ends])
    per_token = np.array(sent) / new
    return {
        "new_tokens": new.tolist(),
        "bytes": sent,
        "spread_of_bytes_per_token": float(per_token.max() / per_token.min()),
    }


def resident_bytes(pids: list[int]) -> int:
    """Proportional resident bytes: what processes share counts once."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def like_the_trace(sequences: list[NDArray[Any]], rng: np.random.Generator, tokens: int) -> NDArray[Any]:
    """One sample of slime's case: runs of recorded tokens, the recorded layers over and over."""
    lengths = np.array([len(each) for each in sequences])
    chosen = rng.integers(0, len(sequences), 2 * tokens // int(lengths.mean()) + 8)
    parts = [sequences[each] for each in chosen[: int(np.searchsorted(np.cumsum(lengths[chosen]), tokens)) + 1]]
    layers = np.arange(CASE["layers"]) % parts[0].shape[1]
    return np.concatenate(parts)[:tokens][:, layers]


def actor(name: str, sizes: list[int], rank: int, asked: Any) -> None:
    """A Megatron rank of 8 pipeline stages: all micro-batches of its layers, forward and backward, one at a time."""
    memory = shared_memory.SharedMemory(name)
    samples, begin = [], 0
    for size in sizes:
        samples.append(CodedRoutes(np.frombuffer(memory.buf, np.uint8, size, begin)))
        begin += size
    asked.recv()
    layers = range(rank, CASE["layers"], CASE["actors"])
    for routes in samples:
        for layer in layers:
            out = np.zeros((len(routes), 1, CASE["top_k"]), routes.dtype)
            routes.read(slice(None), [layer], out)
            out[:, 0].astype(np.int32)
    asked.send("done")
    asked.recv()
    os._exit(0)  # the views of the shared memory go with the process


def peak_of(trace: Path | None, samples: int, tokens: int) -> float:
    """Return the host's peak bytes of the coded data path above what was there before."""
    response(trace, 0, tokens // 8)  # what libraries and tables take is no part of the data path
    context = multiprocessing.get_context("fork")
    pids = [multiprocessing.current_process().pid or 0]
    baseline, peak, stop = resident_bytes(pids), 0, threading.Event()
    # The engine codes a response in a process of its own; the driver holds what arrives.
    with context.Pool(1) as engine:
        held: list[bytes] = [engine.apply(response, (trace, seed, tokens)) for seed in range(samples)]
    sizes = [len(each) for each in held]
    store = shared_memory.SharedMemory(create=True, size=sum(sizes))  # the object store, which actors map

    steady = threading.Lock()  # a reading while processes fork counts what they share once in each

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            with steady:
                peak = max(peak, resident_bytes(pids))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for each in held:  # slime's driver validates a sample as int32, one at a time
        CodedRoutes(each)[:].astype(np.int32)
    pipes = [context.Pipe() for _ in range(CASE["actors"])]
    begin = 0
    for each in held:
        store.buf[begin : begin + len(each)] = each
        begin += len(each)
    actors = [context.Process(target=actor, args=(store.name, sizes, rank, pipe[1])) for rank, pipe in enumerate(pipes)]
    with steady:
        for process in actors:
            process.start()
            pids.append(process.pid or 0)
    for here, _ in pipes:
        here.send("go")
    for here, _ in pipes:
        here.recv()
    stop.set()
    watcher.join()
    for here, _ in pipes:
        here.send("end")
    for process in actors:
        process.join()
    store.close()
    store.unlink()
    return float(peak - baseline)


def response(trace: Path | None, seed: int, tokens: int) -> bytes:
    """Code one response as an engine would."""
    sequences, experts = recorded(trace, 400_000)
    return CodedRoutes.of(
        like_the_trace(sequences, np.random.default_rng(seed), tokens), num_experts=experts
    ).data.tobytes()


def measure_memory(trace: Path | None, counts: tuple[int, ...], tokens: int) -> dict[str, Any]:
    """Peaks of scaled-down runs, their line, and the full case on it."""
    peaks = []
    for count in counts:  # a process each: an allocator keeps what the one before it had
        command = [
            sys.executable,
            "-m",
            "benchmarks.bench_routes",
            "peak",
            "--samples",
            str(count),
            "--tokens",
            str(tokens),
        ]
        command += [] if trace is None else ["--trace", str(trace)]
        peaks.append(
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["peak_bytes"]
        )
    slope, offset = np.polyfit(counts, peaks, 1)
    scale = CASE["samples"] * CASE["tokens"] / tokens
    ids = CASE["samples"] * CASE["tokens"] * CASE["layers"] * CASE["top_k"]
    today = 4.0 * ids * CASE["actors"]
    predicted = float(offset + slope * scale)
    return {
        "samples": counts, "tokens": tokens, "peak_bytes": peaks,
        "bytes_per_sample": float(slope), "offset_bytes": float(offset),
        "full_case_gb": predicted / GB, "today_gb": today / GB, "ratio": today / predicted,
    }  # fmt: skip


def formats() -> dict[str, Callable[[Path, NDArray[Any], int, int], tuple[Path, dict[str, Any]]]]:
    """Writers of one sequence in every producer's format, from tests/replay/producers.py."""
    sys.path.insert(0, "tests")
    from replay import producers

    def lines(name: str, make: Callable[[NDArray[Any], int], dict[str, Any]]) -> Any:
        def write(folder: Path, ids: NDArray[Any], tokens: int, experts: int) -> tuple[Path, dict[str, Any]]:
            path = folder / f"{name}.jsonl"
            path.write_text(json.dumps(make(ids, tokens, experts)))
            return path, {"num_layers": ids.shape[1], "top_k": ids.shape[2]}

        return write

    def sglang(ids: NDArray[Any], tokens: int, experts: int) -> dict[str, Any]:
        body = producers.sglang_response(ids, 5)
        body["meta_info"]["completion_tokens"] = tokens - 5
        return body

    def vllm(ids: NDArray[Any], tokens: int, experts: int) -> dict[str, Any]:
        body = producers.vllm_response(np.maximum(ids, 0), 5, max(experts, 257) if ids.max() > 255 else experts)
        body["choices"][0]["token_ids"] = [9] * (tokens - 5)
        body["usage"]["completion_tokens"] = tokens - 5
        return body

    def slime(folder: Path, ids: NDArray[Any], tokens: int, experts: int) -> tuple[Path, dict[str, Any]]:
        import torch

        path, samples = folder / "slime.pt", producers.slime_samples([ids])
        samples[0]["tokens"] = list(range(tokens))
        torch.save({"rollout_id": 0, "samples": samples}, path)
        return path, {}

    def verl(folder: Path, ids: NDArray[Any], tokens: int, experts: int) -> tuple[Path, dict[str, Any]]:
        import torch

        path = folder / "verl.pt"
        tensors = {"routed_experts": [torch.from_numpy(ids.astype(np.int16))], "input_ids": [torch.arange(tokens)]}
        torch.save(tensors, path)
        return path, {}

    def prime(ids: NDArray[Any], tokens: int, experts: int) -> dict[str, Any]:
        import base64

        data = base64.b64encode(np.ascontiguousarray(ids.astype(np.int16)).tobytes()).decode()
        routes = {"data": data, "shape": list(ids.shape), "dtype": "int16", "start": 0}
        return {"token_ids": list(range(tokens)), "routed_experts": routes}

    def nemo(ids: NDArray[Any], tokens: int, experts: int) -> dict[str, Any]:
        # A producer that lost or doubled rows says so in its valid length.
        rows = producers.nemo_rows(ids, len(ids) + 9) if len(ids) else ids
        return {
            "routed_experts": producers.nemo_envelope(rows, max(experts, int(np.abs(ids).max()) + 1)),
            "valid_length": len(ids) + 1,
        }

    def coded(folder: Path, ids: NDArray[Any], tokens: int, experts: int) -> tuple[Path, dict[str, Any]]:
        path = folder / "stream.routes"
        size = max(experts, int(ids.max()) + 1)
        with RoutesWriter(path, num_experts=size, top_k=ids.shape[2], layer_ids=range(ids.shape[1])) as writer:
            writer.add(0, np.maximum(ids, 0), valid=(ids >= 0).all(axis=(1, 2)))
        return path, {}

    return {
        "sglang": lines("sglang", sglang), "vllm": lines("vllm", vllm), "slime": slime, "verl": verl,
        "prime-rl": lines("prime", prime), "nemo-rl": lines("nemo", nemo), "routes": coded,
    }  # fmt: skip


def measure_faults(rounds: int) -> dict[str, Any]:
    """Seeded faults, written and read in every producer's format."""
    from moe_rl.study.groups import TraceOptions
    from moe_rl.study.replay_check import _checked
    from tests.routes.fault_seeds import FAMILIES, SEEDS, case

    rng = np.random.default_rng(4)
    total = named = faulty = 0
    missed: dict[str, int] = {}
    by_format: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for (family, model), (name, (fault, seed)), (kind, write) in itertools.product(
            FAMILIES.items(), SEEDS.items(), formats().items()
        ):
            for _ in range(rounds):
                drawn = case(rng, model)
                ids = np.asarray(seed(drawn, rng)).astype(np.int64)
                if int(ids.min()) < 0 and kind in ("vllm", "routes"):
                    continue  # these formats have no negative ids
                if kind == "nemo-rl" and len(ids) != len(drawn.reference):
                    continue  # an envelope says how many of its rows are valid: rows that are lost show there
                path, told = write(Path(folder), ids, len(drawn.reference) + 1, model.experts)
                options = TraceOptions(format=kind).import_options(**told)
                record = next(iter(recorded_sequences(path, format=kind, options=options)))
                sequence = _checked(record, (drawn.reference, drawn.margin))
                mate = drawn.checked(drawn.other)  # another sequence of the batch, with its own choices
                mate = type(mate)(routes=drawn.other, num_tokens=len(drawn.other) + 1, reference=drawn.other)
                verdict = check_routes([sequence, mate], num_experts=model.experts)[0]
                total, named, faulty = total + 1, named + (verdict.fault is fault), faulty + (verdict.fault is not None)
                right = by_format.setdefault(kind, [0, 0])
                right[0], right[1] = right[0] + (verdict.fault is fault), right[1] + 1
                if verdict.fault is not fault:
                    key = f"{name} as {verdict.fault}, {kind}, {family}"
                    missed[key] = missed.get(key, 0) + 1
    return {
        "streams": total, "seeds": len(SEEDS), "named_rightly": named / total, "called_faulty": faulty / total,
        "by_format": {kind: right / count for kind, (right, count) in by_format.items()}, "misnamed": missed,
    }  # fmt: skip


@dataclass
class FaultCount:
    """Of one fault, how many sequences the check called faulty, and how many it named rightly."""

    called: int = 0
    named: int = 0
    called_without_reference: int = 0


def checked_faults(
    faults: Sequence[Any], sequences: list[NDArray[Any]], num_experts: int, *, rounds: int, seed: int
) -> dict[str, FaultCount]:
    """Put each of the faults (`tests.routes.recorded_faults`) into `rounds` sequences and check these.

    The capture differs from the reference in 4 % of the sets, as another engine's does, and the batch has one more
    sequence.
    """
    from tests.routes.recorded_faults import flipped

    rng, counts = np.random.default_rng(seed), {}
    long = [each.astype(np.int64) for each in sequences if len(each) >= 96]
    for fault in faults:
        count = counts[fault.name] = FaultCount()
        for _ in range(rounds):
            chosen = int(rng.integers(len(long)))
            right = long[chosen]
            others = [each for place, each in enumerate(long) if place != chosen and len(each) >= len(right)]
            other = others[int(rng.integers(len(others)))] if others else long[chosen - 1]
            other = np.concatenate([other] * (1 + len(right) // len(other)))[: len(right) + 3]
            captured = fault.inject(flipped(right, num_experts, 0.04, rng), other, rng)
            mate = CheckedSequence(routes=other, num_tokens=len(other) + 1, reference=other)
            sequence = CheckedSequence(routes=captured, num_tokens=len(right) + 1, reference=right)
            verdict = check_routes([sequence, mate], num_experts=num_experts)[0]
            alone = check_routes([replace(sequence, reference=None), mate], num_experts=num_experts)[0]
            count.called += verdict.fault is not None
            count.named += verdict.fault in fault.classes
            count.called_without_reference += alone.fault is not None
    return counts


def false_alarms(
    sequences: list[NDArray[Any]], num_experts: int, *, shares: Sequence[float | None], batch: int = 16
) -> list[str]:
    """Return the verdicts on right routes that name a fault; by share of flipped sets, None without reference."""
    from tests.routes.recorded_faults import flipped

    rng, alarms = np.random.default_rng(5), []
    for begin in range(0, len(sequences), batch):
        right = [each.astype(np.int64) for each in sequences[begin : begin + batch]]
        for share in shares:
            checked = [
                CheckedSequence(
                    routes=each if share is None else flipped(each, num_experts, share, rng),
                    num_tokens=len(each) + 1,
                    reference=None if share is None else each,
                )
                for each in right
            ]
            verdicts = check_routes(checked, num_experts=num_experts)
            alarms += [str(verdict) for verdict in verdicts if verdict.fault is not None]
    return alarms


def measure_recorded(trace: Path | None, rounds: int) -> dict[str, Any]:
    """Faults in recorded routes of long sequences, where the trace has any, and false alarms in all of them."""
    from tests.routes.recorded_faults import RECORDED_FAULTS

    sequences, num_experts = recorded(trace)
    shares = (None, 0.0, 0.04, 0.15)
    alarms = false_alarms(sequences, num_experts, shares=shares)
    result: dict[str, Any] = {"sequences": len(sequences), "flipped_sets": shares, "false_alarms": len(alarms)}
    if not any(len(each) >= 96 for each in sequences):
        return result
    counts = checked_faults(RECORDED_FAULTS, sequences, num_experts, rounds=rounds, seed=3)
    total = rounds * len(counts)
    return result | {
        "faults": len(counts), "sequences_per_fault": rounds,
        "called": sum(count.called for count in counts.values()) / total,
        "named_rightly": sum(count.named for count in counts.values()) / total,
        "called_without_reference": sum(count.called_without_reference for count in counts.values()) / total,
        "by_fault": {name: asdict(count) for name, count in counts.items()},
    }  # fmt: skip


def measure_clean(batches: int) -> dict[str, Any]:
    """Alarms of batches in which nothing is wrong."""
    from tests.routes.fault_seeds import FAMILIES, case, choices, in_bf16, margins, scores

    rng, alarms, families = np.random.default_rng(5), [], list(FAMILIES.values())
    for number in range(batches):
        model = families[number % len(families)]
        sequences = []
        for _ in range(2):
            drawn = case(rng, model, int(rng.integers(4, 40)))
            sequences.append(drawn.checked())
        if number % 3 == 0:  # recomputed: the reference is itself of bf16
            values = scores(rng, model, 24)
            one, other = in_bf16(rng, values), in_bf16(rng, values)
            sequences.append(
                type(sequences[0])(
                    routes=choices(one, model),
                    num_tokens=25,
                    reference=choices(other, model),
                    margin=margins(other, model),
                )
            )
        found = check_routes(sequences, num_experts=model.experts)
        alarms += [str(verdict) for verdict in found if verdict.fault is not None]
    return {"batches": batches, "false_alarms": len(alarms), "which": alarms[:5]}


def measure_online() -> dict[str, Any]:
    """CPU time of the online check of a pass."""
    from moe_rl.routes.online import load_metrics, replay_metrics
    from tests.routes.fault_seeds import Family, case

    rng = np.random.default_rng(6)
    model = Family(128, 8, 48)
    drawn = case(rng, model, 128)
    counts = rng.integers(0, 10_000, (48, 128))
    times = []
    for _ in range(20):
        begin = time.process_time()
        replay_metrics(drawn.captured, drawn.reference, drawn.margin, num_experts=128)
        load_metrics(counts, counts)
        times.append(time.process_time() - begin)
    return {"host_ms_per_pass": 1e3 * float(np.median(times)), "share_of_a_step_of_10_s": float(np.median(times)) / 10}


def main() -> None:
    """Run one measurement and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=["size", "decode", "sequences", "turns", "memory", "peak", "faults", "recorded", "clean", "online"],
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--counts", default="4,8,16")
    parser.add_argument("--tokens", type=int, default=CASE["tokens"])
    given = parser.parse_args()
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "size": lambda: measure_size(given.trace),
        "decode": lambda: measure_decode(given.trace),
        "sequences": lambda: measure_sequences(given.trace),
        "turns": measure_turns,
        "memory": lambda: measure_memory(given.trace, tuple(map(int, given.counts.split(","))), given.tokens),
        "peak": lambda: {"peak_bytes": peak_of(given.trace, given.samples, given.tokens)},
        "faults": lambda: measure_faults(given.rounds),
        "recorded": lambda: measure_recorded(given.trace, given.rounds),
        "clean": lambda: measure_clean(given.batches),
        "online": measure_online,
    }
    print(json.dumps(measures[given.what](), indent=1))


if __name__ == "__main__":
    main()
