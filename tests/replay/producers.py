"""What engines and trainers write, byte for byte, from true routes: independent of the readers that are tested.

Every function takes the true routes of sequences: int64 `[tokens - 1, moe layers, K]`, since the last token of a
sequence is never fed to the model and has no route. `dense` is the number of dense layers before the MoE layers, which
engines record as zeros.
"""

import base64
import json
import struct
import zipfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np


def with_dense(routes: np.ndarray, dense: int) -> np.ndarray:
    """All hidden layers: dense ones hold zeros."""
    return np.concatenate([np.zeros((len(routes), dense, routes.shape[2]), routes.dtype), routes], axis=1)


def npy_bytes(array: np.ndarray) -> bytes:
    """What `np.save` writes."""
    buffer = BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def write_npz(path: Path, sequences: Sequence[np.ndarray], num_experts: int) -> None:
    """`suite|category|status` keys, one uint8 array each, compressed; every row is a route."""
    dtype = np.uint8 if num_experts <= 256 else np.uint16
    np.savez_compressed(path, **{f"suite|c{i}|True_False": ids.astype(dtype) for i, ids in enumerate(sequences)})


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def vllm_response(
    routes: np.ndarray, prompt: int, num_experts: int, *, dense: int = 0, split: bool = False, lists: bool = False
) -> dict[str, Any]:
    """One chat response: P + N - 1 rows; base64 of .npy bytes, or nested lists; prompt rows apart when `split`."""
    dtype = np.uint8 if num_experts <= 256 else np.uint16
    rows = with_dense(routes, dense).astype(dtype)
    encode: Callable[[np.ndarray], Any] = (
        np.ndarray.tolist if lists else lambda a: base64.b64encode(npy_bytes(a)).decode()
    )
    generated = len(rows) + 1 - prompt
    choice = {"index": 0, "message": {"role": "assistant", "content": "..."}, "token_ids": [9] * generated}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "prompt_token_ids": [7] * prompt}
    choice["routed_experts"] = encode(rows[prompt:] if split else rows)
    body["prompt_routed_experts"] = encode(rows[:prompt]) if split else None
    body["usage"] = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return body


# ---- SGLang ---------------------------------------------------------------------------------------------------------


def sglang_response(routes: np.ndarray, prompt: int, *, dense: int = 0, start: int = 0) -> dict[str, Any]:
    """One /generate response: base64 of int32 in C order, rows start .. seqlen - 2, all hidden layers, no shape."""
    raw = np.ascontiguousarray(with_dense(routes, dense)[start:].astype("<i4")).tobytes()
    meta = {"id": "r1", "finish_reason": {"type": "stop"}, "prompt_tokens": prompt}
    meta |= {"completion_tokens": len(routes) + 1 - prompt, "routed_experts": base64.b64encode(raw).decode()}
    if start:
        meta["routed_experts_start_len"] = start
    return {"text": "...", "output_ids": [5] * (len(routes) + 1 - prompt), "meta_info": meta}


# ---- NeMo-RL --------------------------------------------------------------------------------------------------------


def nemo_envelope(rows: np.ndarray, num_experts: int) -> str:
    """`nrlre1:<dtype>:<S>x<L>x<K>:<base64>`, the narrowest signed dtype that also holds -1."""
    name = "int8" if num_experts <= 128 else "int16" if num_experts <= 32_768 else "int32"
    size, layers, top_k = rows.shape
    data = base64.b64encode(np.ascontiguousarray(rows.astype(name)).tobytes()).decode()
    return f"nrlre1:{name}:{size}x{layers}x{top_k}:{data}"


def nemo_rows(routes: np.ndarray, padded_length: int, missing: Sequence[int] = ()) -> np.ndarray:
    """Rows of a padded sequence: routes, then 0 .. K-1 from the last token on; -1 where no route was captured."""
    rows = np.broadcast_to(np.arange(routes.shape[2]), (padded_length, *routes.shape[1:])).copy()
    rows[: len(routes)] = routes
    rows[list(missing)] = -1
    return rows


# ---- verl -----------------------------------------------------------------------------------------------------------


def verl_batch(sequences: Sequence[np.ndarray], prompts: Sequence[int], *, dense: int = 0) -> dict[str, np.ndarray]:
    """[batch, prompt + response] with the prompt left-padded and the response right-padded; zeros where no route is."""
    most_prompt = max(prompts)
    most_response = max(len(ids) + 1 - prompt for ids, prompt in zip(sequences, prompts, strict=True))
    shape = (len(sequences), most_prompt + most_response)
    layers, top_k = sequences[0].shape[1] + dense, sequences[0].shape[2]
    routed_experts = np.zeros((*shape, layers, top_k), np.int16)
    attention_mask = np.zeros(shape, np.int64)
    for index, (ids, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        start = most_prompt - prompt
        routed_experts[index, start : start + len(ids)] = with_dense(ids, dense)
        attention_mask[index, start : start + len(ids) + 1] = 1
    return {"routed_experts": routed_experts, "attention_mask": attention_mask}


# ---- slime and miles ------------------------------------------------------------------------------------------------


def slime_samples(
    sequences: Sequence[np.ndarray], *, dense: int = 0, as_array: Callable[[np.ndarray], Any] = np.asarray
) -> list[dict[str, Any]]:
    """`Sample.to_dict()` of a rollout: int32 `[len(tokens) - 1, layers, K]`."""
    return [
        {
            "group_index": index // 2,
            "index": index,
            "prompt": [{"role": "user", "content": "hi"}],
            "tokens": list(range(len(ids) + 1)),
            "response_length": 1,
            "reward": {"score": 0.5},
            "loss_mask": [1],
            "weight_versions": ["3"],
            "rollout_routed_experts": as_array(with_dense(ids, dense).astype(np.int32)),
            "status": "completed",
            "metadata": {},
        }
        for index, ids in enumerate(sequences)
    ]


def slime_train_dump(
    rollout_id: int, partitions: list[list[int]], micro_batches: list[list[list[int]]]
) -> dict[str, Any]:
    """Format version 2: `partition` per DP rank, `micro_batch_indices` into it, one optimizer step."""
    shards = [
        {
            "rank": rank * 2,
            "data_parallel_rank": rank,
            "sample_indices": partition,
            "partition": partition,
            "micro_batch_indices": batches,
            "num_microbatches": [len(batches)],
            "global_batch_sizes": [sum(map(len, partitions))],
        }
        for rank, (partition, batches) in enumerate(zip(partitions, micro_batches, strict=True))
    ]
    samples = [{"rollout_position": position} for partition in partitions for position in partition]
    return {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": samples, "dp_shards": shards}


# ---- prime-rl -------------------------------------------------------------------------------------------------------


def msgpack(value: Any) -> bytes:
    """MessagePack of None, bool, int, float, str, bytes, list and dict, always in the shortest form (as msgspec)."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int() if 0 <= value < 128:
            return bytes([value])
        case int() if -32 <= value < 0:
            return struct.pack("b", value)
        case int() if value >= 0:
            code, form = next((c, f) for c, f, top in _UINTS if value < top)
            return bytes([code]) + struct.pack(form, value)
        case int():
            return b"\xd3" + struct.pack(">q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            return _sized(value.encode(), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + value.encode()
        case bytes():
            return _sized(value, None, 0, (0xC4, 0xC5, 0xC6)) + value
        case list():
            return _sized(value, 0x90, 16, (None, 0xDC, 0xDD)) + b"".join(map(msgpack, value))
        case dict():
            body = b"".join(msgpack(key) + msgpack(item) for key, item in value.items())
            return _sized(value, 0x80, 16, (None, 0xDE, 0xDF)) + body
    raise TypeError(type(value))


_UINTS = ((0xCC, ">B", 1 << 8), (0xCD, ">H", 1 << 16), (0xCE, ">I", 1 << 32), (0xCF, ">Q", 1 << 64))


def _sized(value: Any, fixed: int | None, below: int, codes: tuple[int | None, int, int]) -> bytes:
    size = len(value)
    if fixed is not None and size < below:
        return bytes([fixed | size])
    for code, form, top in zip(codes, (">B", ">H", ">I"), (1 << 8, 1 << 16, 1 << 32), strict=True):
        if code is not None and size < top:
            return bytes([code]) + struct.pack(form, size)
    raise ValueError(size)


def prime_routes(rows: np.ndarray, num_experts: int) -> list[Any]:
    """`RoutedExperts` as an array-like struct: data, shape, dtype."""
    dtype = "uint8" if num_experts <= 256 else "uint16"
    return [np.ascontiguousarray(rows.astype(dtype)).tobytes(), list(rows.shape), dtype]


def prime_micro_batch(sequences: Sequence[np.ndarray], num_experts: int, *, padding: int = 0) -> list[Any]:
    """One packed `MicroBatch`: zero bytes for the last token of each sequence and for the padding (token id 1)."""
    layers, top_k = sequences[0].shape[1:]
    zero = np.zeros((1, layers, top_k), np.int64)
    rows = [part for ids in sequences for part in (ids, zero)] + [zero] * padding
    lengths = [len(ids) + 1 for ids in sequences]
    token_ids = [token + 2 for length in lengths for token in range(length)] + [1] * padding
    positions = [token for length in lengths for token in range(length)] + list(range(padding))
    count = len(token_ids)
    loss_mask = [True] * sum(lengths) + [False] * padding
    routes = prime_routes(np.concatenate(rows), num_experts)
    floats = [0.0] * count
    return [token_ids, loss_mask, floats, floats, positions, floats, ["math"] * count, None, routes]


def prime_sample(routes: np.ndarray, num_experts: int, *, aligned: bool) -> list[Any]:
    """One `TrainingSample`: one row per token with zero bytes at the end when `aligned`, else one row less."""
    zero = np.zeros((1, *routes.shape[1:]), np.int64)
    rows = np.concatenate([routes, zero]) if aligned else routes
    count = len(routes) + 1
    return [
        list(range(2, count + 2)),
        [True] * count,
        [0.0] * count,
        [1.0] * count,
        "math",
        prime_routes(rows, num_experts),
    ]


# ---- Megatron -------------------------------------------------------------------------------------------------------


def megatron_records(
    routes: np.ndarray, *, step: int, rank: int, first_layer: int = 0, block: str = "decoder"
) -> list[dict[str, Any]]:
    """The records of one forward pass of one micro-batch: one per layer."""
    return [
        {
            "step": step,
            "stage": "pre_dispatch",
            "block": block,
            "layer": first_layer + layer,
            "rank": rank,
            "num_tokens": len(routes),
            "topk": routes.shape[2],
            "top_indices": routes[:, layer].tolist(),
        }
        for layer in range(routes.shape[1])
    ]


def write_json_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def zip_bomb_npz(path: Path, declared: tuple[int, int, int]) -> None:
    """An .npz whose one member declares a huge shape and holds a few bytes."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {declared}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 64)
