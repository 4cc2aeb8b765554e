"""Bad input gets one sentence, runs nothing, allocates nothing on its word, and changes nothing on disk."""

import base64
import contextlib
import json
import os
import pickle
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import producers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_traces import assert_same, random_trace
from rollouts import SAVERS, make_rollout

from moe_rl.core.errors import InvalidInputError
from moe_rl.replay import (
    IMPORTERS,
    ImportOptions,
    TraceReader,
    TraceWriter,
    convert_trace,
    count_sequences,
    open_source,
)
from moe_rl.replay.array_file import CorruptFileError, read_header
from moe_rl.replay.importers.payloads import from_messagepack
from moe_rl.replay.importers.torch_file import Opaque, load_torch_file

pytestmark = pytest.mark.lengthy


def save(name: str, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Write a good file; return (what to open, the file itself, options)."""
    path, more = SAVERS[name](make_rollout(lengths=(3, 2)), folder)
    return path, next(file for file in folder.rglob("*.*") if file.is_file()), more


@pytest.mark.parametrize("name", SAVERS)
@given(data=st.data())
@settings(max_examples=60)
def test_a_damaged_file_is_refused_or_read(name: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, file, more = save(name, Path(folder))
        raw = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.one_of(st.integers(0, min(400, len(raw) - 1)), st.integers(0, len(raw) - 1)))
            raw[position] = data.draw(st.sampled_from([0, 1, 0x22, 0x5B, 0x7F, 0x80, 0xFF, raw[position] ^ 1]))
        if data.draw(st.booleans()):
            raw = raw[: data.draw(st.integers(0, len(raw)))]
        file.write_bytes(raw)
        for format_name in (name.split()[0], None):
            with contextlib.suppress(InvalidInputError):
                open_source(path, format=format_name, options=ImportOptions(num_experts=32, **more)).load()


ODD_VALUES: list[Any] = [None, True, -1, 0, 3, 10**30, 1.5, "", "x", [], [[]], [[[1]]], [[[1, 2], [3]]], [None], {}]
ODD_VALUES += [{"a": 1}, "nrlre1:int8:1x1x1:AA==", [[["a"]]]]


def documents(rng: np.random.Generator) -> dict[str, tuple[str, Any]]:
    """A good document of each producer that writes structured files, by (format, document)."""
    rollout = make_rollout(int(rng.integers(100)), (3, 2))
    ids, prompt = rollout.sequences[0], rollout.prompts[0]
    envelope = producers.nemo_envelope(producers.nemo_rows(ids, 6), 32)
    log = [{"role": "user", "token_ids": [1]}, {"role": "assistant", "routed_experts": envelope}]
    data, shape, dtype = producers.prime_routes(ids, 32)
    prime = {"data": base64.b64encode(data).decode(), "shape": shape, "dtype": dtype, "start": 0}
    return {
        "vllm.json": ("vllm", [producers.vllm_response(ids, prompt, 32, split=bool(rng.integers(2)), lists=True)]),
        "sglang.json": ("sglang", [producers.sglang_response(ids, prompt)]),
        "nemo.json": ("nemo-rl", [{"routed_experts": envelope, "valid_length": 4}, {"message_log": log, "idx": 0}]),
        "prime.json": ("prime-rl", [{"token_ids": [1] * 4, "routed_experts": prime}]),
        "rank_0.bin": ("prime-rl", [producers.prime_micro_batch(rollout.sequences, 32, padding=2)]),
        "rollouts.bin": ("prime-rl", [[producers.prime_sample(ids, 32, aligned=True)], 0, None]),
        "trace.json": ("megatron", producers.megatron_records(ids, step=0, rank=0)),
        "slime.pt": ("slime", {"rollout_id": 0, "samples": producers.slime_samples(rollout.sequences)}),
        "layout.pt": ("slime", producers.slime_train_dump(0, [[0], [1]], [[[0]], [[0]]])),
        "verl.pt": (
            "verl",
            producers.verl_batch(rollout.sequences, rollout.prompts) | {"uid": ["a"], "global_steps": 1},
        ),
        "jagged.pt": ("verl", {"routed_experts": [ids.astype(np.int16)], "input_ids": [[1] * 4]}),
    }


def changed(document: Any, rng: np.random.Generator) -> Any:
    """Replace or remove one value somewhere inside."""
    keys = list(document) if isinstance(document, dict) else list(range(min(3, len(document))))
    key = keys[int(rng.integers(len(keys)))]
    inner = document[key]
    if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
        new = changed(inner, rng)
    else:
        new = ODD_VALUES[int(rng.integers(len(ODD_VALUES)))]
    if isinstance(document, dict):
        return {k: new if k == key else v for k, v in document.items() if k != key or rng.random() < 0.9}
    return [*document[:key], new, *document[key + 1 :]]


@pytest.mark.parametrize("name", sorted(documents(np.random.default_rng(0))))
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60)
def test_odd_values_are_refused_in_a_sentence(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    format_name, document = documents(rng)[name]
    document = changed(document, rng)
    options = ImportOptions(num_experts=32, top_k=4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name.replace("trace.json", "router_trace_rank0.jsonl")
        if path.suffix == ".pt":
            torch.save(document, path)
        elif path.suffix == ".bin":
            path.write_bytes(producers.msgpack(document))
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in document))
        else:
            path.write_text(json.dumps(document))
        if name == "layout.pt":
            options = replace(options, layout_path=path)
            path = Path(folder) / "0.pt"
            torch.save(documents(rng)["slime.pt"][1], path)
        with contextlib.suppress(InvalidInputError):
            open_source(path, format=format_name, options=options).load()


# ---- pickles --------------------------------------------------------------------------------------------------------


class Payload:
    """Runs a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def torch_zip(path: Path, pickled: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in members.items():
            archive.writestr(f"archive/data/{name}", content)
    return path


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    calls = [
        Payload(os.system, f"touch {marker}"),
        Payload(eval, f"open({str(marker)!r}, 'w')"),
        Payload(exec, f"open({str(marker)!r}, 'w')"),
        Payload(subprocess.Popen, ["touch", str(marker)]),
        Payload(Path.touch, marker),
        Payload(__import__, "os"),
    ]
    for call in calls:
        sample = {"tokens": [1, 2], "rollout_routed_experts": call}
        path = torch_zip(tmp_path / "t.pt", pickle.dumps({"rollout_id": 0, "samples": [sample]}, protocol))
        with pytest.raises(InvalidInputError):
            open_source(path)
        np.savez(tmp_path / "t.npz", a=np.array([call, 1], object))
        for format_name in (None, "verl"):
            with pytest.raises(InvalidInputError):
                open_source(tmp_path / "t.npz", format=format_name)
        (tmp_path / "t.npy").write_bytes(producers.npy_bytes(np.zeros((1, 1, 1))).replace(b"<f8", b"|O8"))
        with pytest.raises(InvalidInputError):
            open_source(tmp_path / "t.npy")
    assert not marker.exists()


GLOBAL_ENCODE = b"c_codecs\nencode\n"


@pytest.mark.parametrize(
    "opcodes",
    [
        GLOBAL_ENCODE + b"N}X\x0c\x00\x00\x00__defaults__)s\x86b.",  # set attributes of a stand-in
        b"cposix\nsystem\n" + b"X\x02\x00\x00\x00id\x85R.",
        b"(X\x02\x00\x00\x00idiposix\nsystem\n.",  # INST
        b"(cposix\nsystem\nX\x02\x00\x00\x00ido.",  # OBJ
        b"\x8c\x05posix\x8c\x06system\x93X\x02\x00\x00\x00id\x85R.",  # STACK_GLOBAL
        b"\x82\x01.",  # EXT1
        b"r\xff\xff\xff\xff.",  # LONG_BINPUT far away
        b"]r\xff\xff\xff\x7f.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BINBYTES8 of a huge size
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BYTEARRAY8 of a huge size
        b"Pstorage\n.",
        b"X\x07\x00\x00\x00storageQ.",
        b"",
        b".",
    ],
)
def test_crafted_opcodes_do_no_harm(tmp_path: Path, opcodes: bytes) -> None:
    path = torch_zip(tmp_path / "t.pt", b"\x80\x04" + opcodes)
    try:
        value = load_torch_file(path)
    except InvalidInputError:
        return
    assert isinstance(value, Opaque | list)


def test_cycles_and_shared_lists_are_read_once(tmp_path: Path) -> None:
    cycle: list[Any] = [1, "x"]
    cycle.append(cycle)
    load_torch_file(torch_zip(tmp_path / "cycle.pt", pickle.dumps(cycle, 2)))
    laughs: list[Any] = ["ha"]
    for _ in range(200):
        laughs = [laughs, laughs]
    load_torch_file(torch_zip(tmp_path / "laughs.pt", pickle.dumps(laughs, 2)))


def test_tensors_stay_inside_their_storage(tmp_path: Path) -> None:
    buffer = BytesIO()
    torch.save(torch.arange(6, dtype=torch.int32).reshape(2, 3), buffer)
    with zipfile.ZipFile(buffer) as archive:
        pickled = archive.read("archive/data.pkl")
    good = load_torch_file(torch_zip(tmp_path / "t.pt", pickled, **{"0": np.arange(6, dtype="<i4").tobytes()}))
    np.testing.assert_array_equal(good, np.arange(6).reshape(2, 3))
    with pytest.raises(InvalidInputError, match="leaves its storage"):
        load_torch_file(torch_zip(tmp_path / "short.pt", pickled, **{"0": b"\0" * 20}))
    with pytest.raises(InvalidInputError, match="storage '0' is missing"):
        load_torch_file(torch_zip(tmp_path / "none.pt", pickled))
    huge = pickled.replace(b"K\x02K\x03\x86", b"J\xff\xff\xff\x7fK\x03\x86")
    assert huge != pickled
    with pytest.raises(InvalidInputError, match="leaves its storage"):
        load_torch_file(torch_zip(tmp_path / "huge.pt", huge, **{"0": b"\0" * 24}))


@given(
    shape=st.lists(st.integers(0, 3), min_size=0, max_size=4),
    dtype=st.sampled_from(
        [torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float32, torch.bool]
    ),
    transposed=st.booleans(),
)
def test_tensors_and_arrays_come_back_as_torch_saved_them(
    shape: list[int], dtype: torch.dtype, transposed: bool
) -> None:
    values = (torch.arange(int(np.prod(shape))).reshape(shape) % 2).to(dtype)
    if transposed and values.ndim > 1:
        values = values.transpose(0, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.pt"
        torch.save(
            {"tensor": values, "array": np.asfortranarray(values.numpy()), "big": values.numpy().astype(">i4")}, path
        )
        loaded = load_torch_file(path)
        for name in ("tensor", "array"):
            assert loaded[name].dtype == values.numpy().dtype
            np.testing.assert_array_equal(loaded[name], values.numpy())
        np.testing.assert_array_equal(loaded["big"], values.numpy().astype(np.int32))


def test_files_that_torch_did_not_write_are_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(InvalidInputError, match="is not a zip archive as torch"):
        load_torch_file(tmp_path / "old.pt")
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([1] * 1000, 2))
    with pytest.raises(InvalidInputError, match="is compressed"):
        load_torch_file(tmp_path / "packed.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(InvalidInputError, match=r"holds no data\.pkl"):
        load_torch_file(tmp_path / "other.pt")


def test_objects_of_unknown_classes_do_not_stop_the_rest(tmp_path: Path) -> None:
    document = {"score": Decimal("0.5"), "more": [Fraction(1, 2), {"a": 1}], "routes": np.arange(3)}
    loaded = load_torch_file(torch_zip(tmp_path / "t.pt", pickle.dumps(document, 2)))
    assert isinstance(loaded["score"], Opaque)
    assert loaded["score"].name == "decimal.Decimal"
    assert loaded["more"][1] == {"a": 1}
    assert loaded["routes"].tolist() == [0, 1, 2]


# ---- declared sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [(1 << 40, 4, 4), (1 << 62, 1 << 62, 4), (0, 4, 4), (1, 4, 4)])
def test_an_npz_cannot_claim_a_size(tmp_path: Path, declared: tuple[int, int, int]) -> None:
    producers.zip_bomb_npz(tmp_path / "t.npz", declared)
    with pytest.raises(InvalidInputError, match=r"a\.npy: the \.npy file declares"):
        open_source(tmp_path / "t.npz")


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xdc\xff\xff" * 100,
        b"\x91" * 2000,
        b"\xc1",
        b"\xd4\x01\x00",
        b"\x81\x90\x00",
        b"\xa2\xff\xff",
        b"\x00\x00",
        b"",
    ],
)
def test_messagepack_cannot_claim_a_size(data: bytes) -> None:
    with pytest.raises(InvalidInputError):
        from_messagepack(data)


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=30,
)


@given(value=plain_values)
def test_messagepack_comes_back(value: Any) -> None:
    assert from_messagepack(producers.msgpack(value)) == value


@given(data=st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_messagepack_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidInputError):
        from_messagepack(data)


def test_shard_headers_cannot_claim_a_size(tmp_path: Path) -> None:
    def with_header(header: bytes, body: bytes = b"") -> Path:
        path = tmp_path / "x.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + body)
        return path

    entry = b'{"a":{"dtype":"U8","shape":%s,"data_offsets":[%d,%d]}}'
    assert read_header(with_header(entry % (b"[4]", 0, 4), b"1234"))["a"].shape == (4,)
    for header in (
        entry % (b"[1099511627776]", 0, 1 << 40),
        entry % (b"[4294967296,4294967296]", 0, 0),
        entry % (b"[-1,-4]", 0, 4),
        entry % (b"[true,4]", 0, 4),
        entry % (b"[4]", 4, 8),
        entry % (b"[4]", 4, 0),
        b'{"a":{"dtype":"F64","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":[]}',
        b"[]",
        b"[" * 100_000,
    ):
        with pytest.raises(CorruptFileError):
            read_header(with_header(header, b"1234"))
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 1 << 63) + b"{}")
    with pytest.raises(CorruptFileError):
        read_header(tmp_path / "x.safetensors")


# ---- what to open ---------------------------------------------------------------------------------------------------


def test_formats_are_named_or_recognized(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(3,))
    producers.write_npz(tmp_path / "t.npz", rollout.sequences, 32)
    with pytest.raises(InvalidInputError, match=r"unknown trace format 'sglng'\. Did you mean 'sglang'\?"):
        open_source(tmp_path / "t.npz", format="sglng")
    with pytest.raises(InvalidInputError, match="there is no trace at"):
        open_source(tmp_path / "absent.npz")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InvalidInputError, match=r"is in no known trace format\. Name one with --format: npz"):
        open_source(tmp_path / "notes.txt")
    body = producers.vllm_response(rollout.sequences[0], 2, 32) | {"meta_info": {"note": 1}}
    producers.write_json_lines(tmp_path / "both.jsonl", [body])
    with pytest.raises(InvalidInputError, match=r"could be vllm or sglang: name the format with --format"):
        open_source(tmp_path / "both.jsonl")
    assert open_source(tmp_path / "both.jsonl", format="vllm", options=rollout.options()).num_sequences == 1


@pytest.mark.parametrize("name", IMPORTERS.names)
def test_folders_and_empty_files_are_refused_by_every_format(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    paths = [tmp_path / "folder"]
    for suffix in ("npz", "npy", "json", "jsonl", "pt", "bin"):
        paths.append(tmp_path / f"empty.{suffix}")
        paths[-1].touch()
    for path in paths:
        for format_name in (name, None):
            with pytest.raises(InvalidInputError):
                open_source(path, format=format_name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "is empty: it holds no sequence"),
        ({"a": np.zeros((0, 2, 2), np.uint8)}, "is empty: no row holds a route"),
        ({"a": np.zeros((2, 2), np.uint8)}, r"'a' must be integers \[tokens, layers, top-k\]"),
        ({"a": np.zeros((2, 2, 2), np.float32)}, r"'a' must be integers"),
        ({"a": np.array([[[0, 9]]])}, r"holds expert id 9, outside 0 \.\. 7"),
        ({"a": np.array([[[3, 3]]])}, "names an expert twice"),
        ({"a": np.array([[[3, -7]]])}, "negative expert id -7"),
        ({"a": np.array([[[3, 1], [0, 0]]])}, "MoE layer 1 routes every token to expert 0 only"),
        (
            {"a": np.array([[[3, 1]]]), "b": np.array([[[3, 1], [2, 1]]])},
            "has 2 layers and top-2, the sequences before",
        ),
        ({"a": np.array([[[70_000, 1]]])}, "holds expert id 70000"),
    ],
)
def test_wrong_routes_are_refused(tmp_path: Path, content: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "t.npz", **content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidInputError, match=message):
        convert_trace(open_source(tmp_path / "t.npz", options=ImportOptions(num_experts=8)), tmp_path / "out.moetrace")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1"),
        ({"moe_layer_ids": ()}, "moe_layer_ids must be ascending"),
        ({"moe_layer_ids": (2, 1)}, "moe_layer_ids must be ascending"),
        ({"moe_layer_ids": (1,), "first_k_dense": 1}, "either moe_layer_ids or first_k_dense"),
        ({"first_k_dense": -1}, "must not be negative"),
        ({"provenance": "R7"}, "provenance 'R7' is not one of"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ImportOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_layer_ids": (1, 2, 3, 4)}, "holds 3 layers, which are neither the 4 of moe_layer_ids"),
        ({"moe_layer_ids": (2, 3)}, r"nor include \[3\]"),
        ({"first_k_dense": 3}, "all of them dense"),
        ({"num_experts": 16}, r"outside 0 \.\. 15"),
        ({"num_experts": 70_000}, "num_experts must lie in"),
        ({"prompt_lengths": (1,)}, "more sequences than prompt lengths"),
    ],
)
def test_options_that_contradict_the_file_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    producers.write_npz(tmp_path / "t.npz", make_rollout(lengths=(40, 3)).sequences, 32)
    with pytest.raises(InvalidInputError, match=message):
        open_source(tmp_path / "t.npz", options=ImportOptions(**options)).load()


def test_a_layer_with_routes_is_not_left_out_as_dense(tmp_path: Path) -> None:
    """Where a file holds MoE layers alone, `first_k_dense` of the model would drop real ones."""
    producers.write_npz(tmp_path / "t.npz", make_rollout(lengths=(4,)).sequences, 32)
    with pytest.raises(InvalidInputError, match="holds routes in layer 0, which is dense by first_k_dense = 1"):
        open_source(tmp_path / "t.npz", options=ImportOptions(first_k_dense=1))


def test_an_id_that_no_model_has_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a=np.array([[[1, 10**9]]]))
    with pytest.raises(InvalidInputError, match="expert id 1000000000: no model has so many"):
        open_source(tmp_path / "t.npz")


def test_a_duplicate_names_file_sample_and_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a=np.array([[[1, 2]]]), b=np.array([[[1, 2]], [[3, 3]]]))
    with pytest.raises(InvalidInputError, match=r"t\.npz: row 1 of sample 1 names an expert twice: ids \[3, 3\]"):
        open_source(tmp_path / "t.npz").validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provenance": "R3"}, "has provenance = unknown, not R3"),
        ({"first_k_dense": 1}, "has no use for first_k_dense"),
        ({"mask_capture_holes": True}, "has no use for mask_capture_holes"),
        ({"pipeline_size": 2}, "has no use for pipeline_size"),
    ],
)
def test_options_for_foreign_formats_are_not_ignored(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    producers.write_npz(tmp_path / "t.npz", make_rollout(lengths=(40,)).sequences, 32)
    source = open_source(tmp_path / "t.npz", options=ImportOptions(num_experts=32))
    convert_trace(source, tmp_path / "t.moetrace")
    with pytest.raises(InvalidInputError, match=message):
        open_source(tmp_path / "t.moetrace", options=ImportOptions(**options))


def test_layers_are_picked_or_named(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(4,))
    producers.write_npz(tmp_path / "t.npz", rollout.sequences, 32)
    picked = open_source(tmp_path / "t.npz", options=ImportOptions(num_experts=32, moe_layer_ids=(0, 2))).load()
    np.testing.assert_array_equal(picked.routed_experts, rollout.sequences[0][:, [0, 2]])
    named = open_source(tmp_path / "t.npz", options=ImportOptions(num_experts=32, moe_layer_ids=(5, 6, 9)))
    assert named.moe_layer_ids == (5, 6, 9)
    assert named.load().num_layers == 3


# ---- conversion -----------------------------------------------------------------------------------------------------


def stored(path: Path, seed: int = 0) -> Path:
    trace = random_trace(seed, [4, 3], steps=[0, 1])
    with TraceWriter(path, num_experts=8, moe_layer_ids=(1, 2, 3), top_k=2) as writer:
        writer.append(trace)
    return path


def test_a_stored_trace_is_copied_and_reduced_to_counts(tmp_path: Path) -> None:
    source = open_source(stored(tmp_path / "t"))
    calls: list[tuple[int, int]] = []
    copy = convert_trace(source, tmp_path / "copy", model="named", progress=lambda *args: calls.append(args))
    assert copy.manifest.model == "named"
    assert copy.manifest.origin == {"converted_from": "t", "format": "moetrace"}
    assert calls == [(4, 7), (7, 7)]
    counts = convert_trace(source, tmp_path / "counts", counts_only=True)
    counts.validate()
    assert_same(counts.load(), count_sequences(source.load()))
    with pytest.raises(InvalidInputError, match="holds counts: its routes cannot be brought back"):
        convert_trace(open_source(tmp_path / "counts"), tmp_path / "back")


def test_a_conversion_that_fails_changes_nothing(tmp_path: Path) -> None:
    source = open_source(stored(tmp_path / "t"))
    stored(tmp_path / "old", seed=5)
    before = TraceReader(tmp_path / "old").load()
    (tmp_path / "t" / "shard-000001.safetensors").unlink()
    for overwrite in (False, True):
        with pytest.raises(InvalidInputError, match=r"exists already|cannot be read"):
            convert_trace(source, tmp_path / "old", overwrite=overwrite)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        convert_trace(source, tmp_path / "new")
    assert_same(TraceReader(tmp_path / "old").load(), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "t"]


def test_a_conversion_may_replace_a_trace_but_not_its_source(tmp_path: Path) -> None:
    source = open_source(stored(tmp_path / "t"))
    stored(tmp_path / "old", seed=5)
    convert_trace(source, tmp_path / "old", overwrite=True)
    assert_same(TraceReader(tmp_path / "old").load(), source.load())
    with pytest.raises(InvalidInputError, match="is the source itself"):
        convert_trace(source, tmp_path / "t", overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(InvalidInputError, match="not part of a trace"):
        convert_trace(source, tmp_path / "home", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "old", "t"]


def test_a_stored_trace_contradicts_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has num_experts = 8, not 16"):
        open_source(stored(tmp_path / "t"), options=ImportOptions(num_experts=16))
