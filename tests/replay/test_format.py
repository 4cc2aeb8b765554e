"""The trace directory: what is written comes back, and nothing else does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_traces import assert_same, random_trace, traces
from safetensors.numpy import load_file

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceReader
from moe_rl.replay.manifest import Manifest
from moe_rl.replay.sequences import concatenate, count_sequences
from moe_rl.replay.shard import write_shard
from moe_rl.replay.writer import TraceWriter

pytestmark = pytest.mark.lengthy


def writer_for(path: Path, trace: RoutingTrace, **options: object) -> TraceWriter:
    shape = {"num_experts": trace.num_experts, "moe_layer_ids": trace.moe_layer_ids, "top_k": trace.top_k}
    return TraceWriter(path, **shape, **options)


def write(path: Path, trace: RoutingTrace, **options: object) -> Path:
    with writer_for(path, trace, **options) as writer:
        writer.append(trace)
    return path


def in_step_order(trace: RoutingTrace) -> RoutingTrace:
    """Sequences by the first appearance of their step, order within a step kept: how a trace is stored."""
    seen = list(dict.fromkeys(trace.step.tolist()))
    return trace.select(np.argsort([seen.index(step) for step in trace.step.tolist()], kind="stable"))


@given(trace=traces(), max_shard_bytes=st.sampled_from([1, 100, 1 << 20]))
def test_a_written_trace_comes_back_unchanged(trace: RoutingTrace, max_shard_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        reader = TraceReader(write(Path(folder) / "t", trace, max_shard_bytes=max_shard_bytes))
        stored = in_step_order(trace)
        assert_same(reader.load(), stored)
        assert reader.steps == tuple(dict.fromkeys(trace.step.tolist()))
        for step in reader.steps:
            assert_same(reader.load(step), stored.select(np.flatnonzero(stored.step == step)))
        for shard in reader.manifest.shards:
            assert shard.num_sequences == 1 or shard.num_tokens * trace.num_layers * trace.top_k <= max_shard_bytes


@given(trace=traces())
def test_counts_come_back_unchanged_and_equal_the_routes(trace: RoutingTrace) -> None:
    counts = count_sequences(trace)
    for index in range(trace.num_sequences):
        start, stop = trace.cu_seqlens[index : index + 2]
        for layer in range(trace.num_layers):
            ids = trace.routed_experts[start:stop, layer][trace.valid[start:stop]]
            for expert in range(trace.num_experts):
                assert counts.tokens_per_expert[index, layer, expert] == (ids == expert).sum()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        with writer_for(path, trace, counts_only=True) as writer:
            writer.append(counts)
        stored = np.argsort([TraceReader(path).steps.index(s) for s in trace.step.tolist()], kind="stable")
        assert_same(TraceReader(path).load(), counts.select(stored))
        assert TraceReader(path).manifest.counts_only


def test_appending_continues_the_trace(tmp_path: Path) -> None:
    first, second = (random_trace(seed, [3, 4], steps=[seed, seed]) for seed in (1, 2))
    path = write(tmp_path / "t", first)
    write(path, second, append=True)
    reader = TraceReader(path)
    assert reader.steps == (1, 2)
    assert_same(reader.load(1), first)
    assert_same(reader.load(2), second)
    assert_same(reader.load(), concatenate([first, second]))
    assert [shard.first_sequence for shard in reader.manifest.shards] == [0, 2]


def test_the_safetensors_library_reads_a_shard(tmp_path: Path) -> None:
    trace = random_trace(0, [5, 2], optional=True)
    arrays = load_file(write(tmp_path / "t", trace) / "shard-000000.safetensors")
    np.testing.assert_array_equal(arrays["routed_experts"], trace.routed_experts)
    np.testing.assert_array_equal(arrays["router_logprobs"], trace.router_logprobs)
    assert arrays["valid"].tolist() == trace.valid.tolist()


def test_arrays_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    part = next(TraceReader(write(tmp_path / "t", random_trace(0, [5, 2]))).parts())
    assert not part.routed_experts.flags.owndata
    assert not part.routed_experts.flags.writeable
    assert part.cu_seqlens.flags.aligned


def test_a_trace_is_not_written_over_by_accident(tmp_path: Path) -> None:
    trace, other = random_trace(0, [5, 2]), random_trace(1, [4])
    path = write(tmp_path / "t", trace)
    with pytest.raises(InvalidInputError, match="already exists"):
        writer_for(path, other)
    assert_same(TraceReader(path).load(), trace)
    write(path, other, overwrite=True)
    assert_same(TraceReader(path).load(), other)
    assert len(list(path.iterdir())) == 2


@pytest.mark.parametrize("options", [{}, {"append": True}, {"overwrite": True}])
def test_a_directory_with_other_files_is_left_alone(tmp_path: Path, options: dict[str, bool]) -> None:
    (tmp_path / "thesis.tex").write_text("do not lose")
    with pytest.raises(InvalidInputError, match=r"contains thesis\.tex, which does not belong to a trace"):
        writer_for(tmp_path, random_trace(0, [3]), **options)
    assert (tmp_path / "thesis.tex").read_text() == "do not lose"


def test_overwriting_keeps_the_old_trace_until_the_first_new_shard(tmp_path: Path) -> None:
    trace = random_trace(0, [5, 2])
    path = write(tmp_path / "t", trace)
    bad = random_trace(1, [4])
    bad.routed_experts[0] = 7
    with pytest.raises(InvalidInputError, match="twice"):
        write(path, bad, overwrite=True)
    assert_same(TraceReader(path).load(), trace)


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    bad = random_trace(0, [4], num_experts=8)
    bad.routed_experts[1, 0, 0] = 8
    with pytest.raises(InvalidInputError, match="expert ids must be 0 to"):
        write(tmp_path / "t", bad)
    assert not (tmp_path / "t").exists()


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    trace = random_trace(0, [3])
    with writer_for(tmp_path / "t", trace) as writer:
        writer.append(trace)
        with pytest.raises(InvalidInputError, match="another process is writing to"):
            writer_for(tmp_path / "t", trace, append=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 9}, "num_experts"),
        ({"top_k": 3}, "top_k"),
        ({"layers": 4}, "moe_layer_ids"),
        ({"optional": True}, "optional columns"),
    ],
)
def test_a_trace_of_another_model_is_not_appended(tmp_path: Path, change: dict[str, int], message: str) -> None:
    trace = random_trace(0, [3])
    with writer_for(tmp_path / "t", trace) as writer:
        writer.append(trace)
        with pytest.raises(InvalidInputError, match=message):
            writer.append(random_trace(0, [3], **change))
    if message != "optional columns":
        with pytest.raises(InvalidInputError, match=message):
            writer_for(tmp_path / "t", random_trace(0, [3], **change), append=True)
    assert_same(TraceReader(tmp_path / "t").load(), trace)


def test_a_failed_write_leaves_the_completed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(0, [3])
    with writer_for(tmp_path / "t", trace) as writer:
        writer.append(trace)

        def disk_full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", disk_full)
        with pytest.raises(OSError, match="No space left"):
            writer.append(trace)
    assert_same(TraceReader(tmp_path / "t").load(), trace)
    assert len(list((tmp_path / "t").iterdir())) == 2


KILLED_WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from replay_traces import random_trace
from moe_rl.replay.writer import TraceWriter
with TraceWriter(sys.argv[1], num_experts=8, moe_layer_ids=(1, 2, 3), top_k=2) as writer:
    for step in range(100_000):
        writer.append(random_trace(step, [40, 7], steps=[step, step]))
        print(step, flush=True)
"""


@pytest.mark.parametrize("steps_before", [0, 1, 4, 9])
def test_a_killed_writer_leaves_all_completed_shards(
    tmp_path: Path, steps_before: int, rng: np.random.Generator
) -> None:
    path = tmp_path / "t"
    command = [sys.executable, "-c", KILLED_WRITER, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(steps_before + 1):
            reported = int(process.stdout.readline())
        # Somewhere in the middle of the steps that follow.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=float(rng.uniform(0, 0.02)))
        process.send_signal(signal.SIGKILL)
    reader = TraceReader(path)
    reader.validate()
    assert len(reader.steps) > reported
    for step in reader.steps:
        assert_same(reader.load(step), random_trace(step, [40, 7], steps=[step, step]))
    # The next writer clears what was left half-written.
    write(path, random_trace(7, [2], steps=[-5]), append=True)
    assert {entry.name for entry in path.iterdir()} == {s.file for s in TraceReader(path).manifest.shards} | {
        "manifest.json"
    }


@pytest.fixture(scope="module", params=["routes", "counts"])
def intact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trace of two shards that nobody changes."""
    trace = random_trace(0, [5, 2, 3], steps=[0, 0, 1], optional=request.param == "routes")
    path = tmp_path_factory.mktemp("intact") / "t"
    with writer_for(path, trace, counts_only=request.param == "counts") as writer:
        writer.append(count_sequences(trace) if request.param == "counts" else trace)
    return path


@given(data=st.data())
@settings(max_examples=200)
def test_a_changed_byte_is_noticed_or_changes_nothing(intact: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(intact, copy)
        victim = copy / data.draw(st.sampled_from(sorted(entry.name for entry in copy.iterdir())))
        raw = bytearray(victim.read_bytes())
        # Half of the changes hit the first bytes: lengths, headers, the schema.
        position = data.draw(st.one_of(st.integers(0, min(600, len(raw) - 1)), st.integers(0, len(raw) - 1)))
        raw[position] ^= data.draw(st.integers(1, 255))
        victim.write_bytes(raw)
        try:
            reader = TraceReader(copy)
            got = reader.load()
            reader.validate()
        except InvalidInputError:
            return
        assert_same(got, TraceReader(intact).load())


@given(cut=st.integers(0, 1_000), name=st.sampled_from(["manifest.json", "shard-000000.safetensors"]))
def test_a_truncated_file_is_refused_on_open(cut: int, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        victim = write(Path(folder) / "t", random_trace(0, [50, 20])) / name
        raw = victim.read_bytes()
        victim.write_bytes(raw[: cut % len(raw)])
        with pytest.raises(InvalidInputError, match=r"corrupt|truncated|it has no schema"):
            TraceReader(victim.parent)


def reseal(path: Path, **changes: object) -> None:
    """Rewrite the manifest with a right checksum, as a foreign writer could have made it."""
    document = json.loads((path / "manifest.json").read_text()) | changes
    document.pop("crc32")
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    document["crc32"] = f"{zlib.crc32(canonical):08x}"
    (path / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schema": "moe_rl.trace/3"},
            r"schema .moe_rl\.trace/3., but this version of moe_rl reads only moe_rl\.trace/1 and moe_rl\.trace/2",
        ),
        ({"schema": 1}, "it has no schema"),
        ({"num_experts": "8"}, "num_experts: Input should be a valid integer"),
        ({"num_experts": True}, "num_experts: Input should be a valid integer"),
        ({"num_experts": 10**30}, "num_experts must be 1 to"),
        ({"top_k": 0}, "top_k must be 1 to"),
        ({"moe_layer_ids": []}, "moe_layer_ids must be ascending"),
        ({"moe_layer_ids": [1, 1, 2]}, "moe_layer_ids must be ascending"),
        ({"moe_layer_ids": [1, 2, 3, 4]}, "its arrays do not match"),
        ({"moe_layer_ids": {"a": 1}}, "moe_layer_ids: Input should be a valid array"),
        ({"provenance": "R9"}, "provenance 'R9' is unknown"),
        ({"optional_columns": [["x"]]}, "malformed"),
        ({"optional_columns": ["router_logprobs"]}, "its arrays do not match"),
        ({"dtype": "uint16"}, "cannot have the dtype 'uint16'"),
        ({"origin": []}, "origin: Input should be an object"),
        ({"origin": {"a": None}}, "origin.a.*: Input should be"),
        ({"shards": [1]}, "shards.0: Input should be an object"),
        ({"shards": None}, "shards: Input should be a valid array"),
        ({"shards": [{"file": "../../etc/passwd"}]}, "malformed"),
        ({"invented": 1}, "malformed"),
    ],
)
def test_a_manifest_of_another_make_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write(tmp_path / "t", random_trace(0, [3]))
    reseal(path, **changes)
    with pytest.raises(InvalidInputError, match=message):
        TraceReader(path)


def test_a_shard_name_cannot_leave_the_directory(tmp_path: Path) -> None:
    path = write(tmp_path / "t", random_trace(0, [3]))
    shards = json.loads((path / "manifest.json").read_text())["shards"]
    reseal(path, shards=[shards[0] | {"file": "../t/shard-000000.safetensors"}])
    with pytest.raises(InvalidInputError, match="the file name of a shard must be shard-"):
        TraceReader(path)


def test_what_is_not_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"is not a trace: there is no such directory"):
        TraceReader(tmp_path / "absent")
    with pytest.raises(InvalidInputError, match=r"is not a trace: it has no manifest\.json"):
        TraceReader(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    with pytest.raises(InvalidInputError, match="it has no schema"):
        TraceReader(tmp_path)
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(InvalidInputError, match="it is not JSON"):
        TraceReader(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t", random_trace(0, [3, 3], steps=[0, 1]))
    (path / "shard-000001.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"shard-000001\.safetensors cannot be read: No such file"):
        TraceReader(path)


def test_an_unknown_step_is_refused(tmp_path: Path) -> None:
    reader = TraceReader(write(tmp_path / "t", random_trace(0, [3, 3], steps=[4, 6])))
    with pytest.raises(InvalidInputError, match=r"does not have step 5: it has steps 4 to 6"):
        reader.load(5)


def foreign_shard(path: Path, change: RoutingTrace) -> None:
    """Replace the only shard by one whose size and checksum are right but which no `TraceWriter` would write."""
    manifest = Manifest.read(path)
    size, crc = write_shard(path / manifest.shards[0].file, change, manifest)
    shards = json.loads((path / "manifest.json").read_text())["shards"]
    reseal(path, shards=[shards[0] | {"size_bytes": size, "crc32": f"{crc:08x}"}])


def test_ids_out_of_range_are_refused_even_when_sealed(tmp_path: Path) -> None:
    trace = random_trace(0, [5])
    path = write(tmp_path / "t", trace)
    trace.routed_experts[2, 1, 1] = 200
    foreign_shard(path, trace)
    with pytest.raises(InvalidInputError, match=r"token 2 has an expert id outside 0 to 7"):
        TraceReader(path).load()


def test_ids_of_filler_rows_do_not_matter(tmp_path: Path) -> None:
    trace = random_trace(0, [5])
    trace.routed_experts[4] = 255
    reader = TraceReader(write(tmp_path / "t", trace))
    reader.validate()
    assert_same(reader.load(), trace)


@pytest.mark.parametrize(
    ("value", "message"), [(3, "is routed to one expert twice"), (0, "in MoE layer 2, every token is routed")]
)
def test_validate_reads_every_row(tmp_path: Path, value: int, message: str) -> None:
    trace = random_trace(0, [5])
    path = write(tmp_path / "t", trace)
    trace.routed_experts[:, 1] = value
    foreign_shard(path, trace)
    with pytest.raises(InvalidInputError, match=message):
        TraceReader(path).validate()


def test_validate_sees_a_layer_that_no_shard_captured(tmp_path: Path) -> None:
    trace = random_trace(0, [4, 4], top_k=1, steps=[0, 1])
    trace.routed_experts[:4, 1] = 0
    path = write(tmp_path / "t", trace)
    TraceReader(path).validate()
    trace.routed_experts[:, 1] = 0
    path = write(tmp_path / "u", trace)
    with pytest.raises(InvalidInputError, match="in MoE layer 2, every token is routed to expert 0 only"):
        TraceReader(path).validate()


def test_validate_refuses_an_empty_trace_and_reports_progress(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="it has no tokens"):
        TraceReader(write(tmp_path / "t", random_trace(0, [0, 0]))).validate()
    unrouted = random_trace(0, [3])
    unrouted.valid[:] = False
    with pytest.raises(InvalidInputError, match="no token has a recorded route"):
        TraceReader(write(tmp_path / "u", unrouted)).validate()
    calls: list[tuple[int, int]] = []
    reader = TraceReader(write(tmp_path / "v", random_trace(0, [3, 3], steps=[0, 1])))
    reader.validate(lambda done, total: calls.append((done, total)))
    total = sum(shard.size_bytes for shard in reader.manifest.shards)
    assert [done for done, _ in calls][-1] == total
    assert {of for _, of in calls} == {total}
