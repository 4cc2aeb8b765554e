"""Rollouts with known routes, and each of them as a file of every producer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import producers
import torch
from hypothesis import strategies as st
from replay_traces import distinct_ids

from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import ImportOptions
from moe_rl.routes.writer import RoutesWriter

MODEL_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """True routes of some sequences, `[tokens - 1, layers, K]` each, and what else a producer needs."""

    sequences: list[np.ndarray]
    prompts: list[int]
    num_experts: int
    dense: int = 0
    seed: int = 0

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        return tuple(range(self.dense, self.dense + self.sequences[0].shape[1]))

    @property
    def top_k(self) -> int:
        return int(self.sequences[0].shape[2])

    def options(self, **more: Any) -> ImportOptions:
        return ImportOptions(num_experts=self.num_experts, moe_layer_ids=self.moe_layer_ids, **more)


def make_rollout(
    seed: int = 0,
    lengths: tuple[int, ...] = (5, 2, 9),
    *,
    dense: int = 0,
    num_experts: int = 32,
    layers: int = MODEL_LAYERS,
    top_k: int = 4,
) -> Rollout:
    rng = np.random.default_rng(seed)
    return Rollout(
        sequences=[distinct_ids(rng, length, layers, top_k, num_experts) for length in lengths],
        prompts=[int(rng.integers(1, max(1, length) + 1)) for length in lengths],
        num_experts=num_experts,
        dense=dense,
        seed=seed,
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    top_k = draw(st.integers(2, 4))
    return make_rollout(
        draw(st.integers(0, 1 << 30)),
        tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))),
        dense=draw(st.integers(0, 2)),
        num_experts=draw(st.sampled_from([max(5, top_k), 64, 256, 257, 300])),
        layers=draw(st.integers(1, 3)),
        top_k=top_k,
    )


def save_vllm(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    rng = np.random.default_rng(rollout.seed)
    records = [
        producers.vllm_response(
            ids,
            prompt,
            rollout.num_experts,
            dense=rollout.dense,
            split=bool(rng.integers(2)),
            lists=bool(rng.integers(2)),
        )
        for ids, prompt in zip(rollout.sequences, rollout.prompts, strict=True)
    ]
    producers.write_json_lines(folder / "vllm.jsonl", records)
    return folder / "vllm.jsonl", {}


def save_sglang(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    pairs = zip(rollout.sequences, rollout.prompts, strict=True)
    records = [producers.sglang_response(ids, prompt, dense=rollout.dense) for ids, prompt in pairs]
    (folder / "sglang.json").write_text(json.dumps(records))
    layers = rollout.dense + rollout.sequences[0].shape[1]
    return folder / "sglang.json", {"top_k": rollout.top_k} if rollout.seed % 2 else {"num_layers": layers}


def save_nemo_rl(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    records = []
    for ids in rollout.sequences:
        rows = producers.nemo_rows(producers.with_dense(ids, rollout.dense), len(ids) + 4)
        envelope = producers.nemo_envelope(rows, rollout.num_experts)
        records.append({"routed_experts": envelope, "valid_length": len(ids) + 1})
    producers.write_json_lines(folder / "nemo.jsonl", records)
    return folder / "nemo.jsonl", {}


def save_verl_padded(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    batch = producers.verl_batch(rollout.sequences, rollout.prompts, dense=rollout.dense)
    if rollout.seed % 2:
        np.savez(folder / "verl.npz", **batch)
        return folder / "verl.npz", {}
    torch.save({name: torch.from_numpy(array) for name, array in batch.items()}, folder / "verl.pt")
    return folder / "verl.pt", {}


def save_verl_jagged(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    parts = [torch.from_numpy(producers.with_dense(ids, rollout.dense).astype(np.int16)) for ids in rollout.sequences]
    if rollout.seed % 2:
        padded = [torch.cat([part, torch.zeros(1, *part.shape[1:], dtype=torch.int16)]) for part in parts]
        batch: dict[str, Any] = {"routed_experts": padded}
    else:
        batch = {"routed_experts": parts, "input_ids": [torch.arange(len(part) + 1) for part in parts]}
    torch.save(batch, folder / "verl.pt")
    return folder / "verl.pt", {}


def save_slime(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    as_array = [np.asarray, torch.from_numpy, lambda ids: torch.from_numpy(ids).to(torch.uint16)][rollout.seed % 3]
    samples = producers.slime_samples(rollout.sequences, dense=rollout.dense, as_array=as_array)
    torch.save({"rollout_id": 0, "samples": samples}, folder / "0.pt")
    return folder / "0.pt", {}


def save_prime_samples(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    (folder / "step_0").mkdir()
    samples = [
        producers.prime_sample(
            producers.with_dense(ids, rollout.dense), rollout.num_experts, aligned=bool(rollout.seed % 2)
        )
        for ids in rollout.sequences
    ]
    (folder / "step_0" / "rollouts.bin").write_bytes(producers.msgpack([samples, 0, None]))
    return folder, {}


def save_prime_micro_batch(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    sequences = [producers.with_dense(ids, rollout.dense) for ids in rollout.sequences]
    batch = producers.prime_micro_batch(sequences, rollout.num_experts, padding=rollout.seed % 5)
    (folder / "rank_0.bin").write_bytes(producers.msgpack([batch]))
    return folder / "rank_0.bin", {}


def save_npz(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    sequences = [producers.with_dense(ids, rollout.dense) for ids in rollout.sequences]
    producers.write_npz(folder / "t.npz", sequences, rollout.num_experts)
    return folder / "t.npz", {}


def save_megatron(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    """One micro-batch per step: two equal ones of one step are what activation recompute looks like."""
    records = [
        record
        for step, ids in enumerate(rollout.sequences)
        for record in producers.megatron_records(ids, step=step, rank=0, first_layer=rollout.dense)
    ]
    producers.write_json_lines(folder / "router_trace_rank0.jsonl", records)
    return folder / "router_trace_rank0.jsonl", {}


def save_routes(rollout: Rollout, folder: Path) -> tuple[Path, dict[str, Any]]:
    with RoutesWriter(
        folder / "t.routes",
        num_experts=rollout.num_experts,
        top_k=rollout.top_k,
        layer_ids=rollout.moe_layer_ids,
    ) as writer:
        for key, ids in enumerate(rollout.sequences):
            writer.add(key, ids)
    return folder / "t.routes", {}


SAVERS: dict[str, Callable[[Rollout, Path], tuple[Path, dict[str, Any]]]] = {
    "npz": save_npz,
    "vllm": save_vllm,
    "sglang": save_sglang,
    "nemo-rl": save_nemo_rl,
    "verl padded": save_verl_padded,
    "verl jagged": save_verl_jagged,
    "slime": save_slime,
    "prime-rl samples": save_prime_samples,
    "prime-rl micro-batch": save_prime_micro_batch,
    "megatron": save_megatron,
    "routes": save_routes,
}
"""Writers of what each producer writes; the first word is the format."""
ONLY_ROUTES = ("npz", "megatron", "routes")
"""Formats whose rows all hold a route: the last token of a sequence is not among them."""


def assert_routes(trace: RoutingTrace, rollout: Rollout, *, last_token: bool = True) -> None:
    """All true routes, and (unless the format leaves it out) one row without a route at the end of each sequence."""
    assert trace.sequence_lengths.tolist() == [len(ids) + last_token for ids in rollout.sequences]
    for index, ids in enumerate(rollout.sequences):
        start, stop = trace.cu_seqlens[index : index + 2]
        assert trace.valid[start:stop].tolist() == [True] * len(ids) + [False] * last_token
        np.testing.assert_array_equal(np.sort(trace.routed_experts[start : start + len(ids)]), np.sort(ids))
    assert trace.moe_layer_ids == rollout.moe_layer_ids
    assert trace.num_experts == rollout.num_experts
