"""Damaged and crafted input gets one sentence, and no memory on its word."""

import base64
import contextlib
import json
import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import producers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import SAVERS, make_rollout

from moe_rl.core.errors import InvalidInputError
from moe_rl.replay import ImportOptions, open_source
from moe_rl.replay.array_file import CorruptFileError, read_header
from moe_rl.replay.importers.payloads import from_messagepack

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
    """Replace or remove one value somewhere inside, or all values behind it."""
    keys = list(document) if isinstance(document, dict) else list(range(min(3, len(document))))
    key = keys[int(rng.integers(len(keys)))]
    inner = document[key]
    if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
        new = changed(inner, rng)
    else:
        new = ODD_VALUES[int(rng.integers(len(ODD_VALUES)))]
    if isinstance(document, dict):
        return {k: new if k == key else v for k, v in document.items() if k != key or rng.random() < 0.9}
    return document[:key] if rng.random() < 0.1 else [*document[:key], new, *document[key + 1 :]]


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


@pytest.mark.parametrize("declared", [(1 << 40, 4, 4), (1 << 62, 1 << 62, 4), (0, 4, 4), (1, 4, 4)])
def test_an_npz_cannot_claim_a_size(tmp_path: Path, declared: tuple[int, int, int]) -> None:
    producers.zip_bomb_npz(tmp_path / "t.npz", declared)
    with pytest.raises(InvalidInputError, match=r"a\.npy: the header of the \.npy file declares"):
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
