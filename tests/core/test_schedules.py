"""Layouts of frameworks: verl's and slime's own functions give the same, where their code is at hand."""

import os
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.config import load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.schedules import FRAMEWORK_LAYOUTS, framework_layout, karmarkar_karp, layout_of_cells

lengths_of = st.lists(st.integers(1, 400), min_size=1, max_size=60)
QWEN = load_model("qwen3-30b-a3b").spec


@given(lengths=lengths_of, ranks=st.sampled_from([1, 2, 4, 8]), multiple=st.sampled_from([1, 2, 4]))
@pytest.mark.parametrize("name", FRAMEWORK_LAYOUTS)
def test_a_layout_keeps_the_budget_and_the_multiple(name: str, lengths: list[int], ranks: int, multiple: int) -> None:
    tokens = np.array(lengths, np.int64)
    layout = framework_layout(name, tokens, num_dp_ranks=ranks, token_budget=500, multiple_of=multiple, model=QWEN)
    layout.check(tokens)
    assert layout.num_dp_ranks == ranks
    assert name == "in-order" or layout.num_micro_batches % multiple == 0


@given(values=st.lists(st.integers(0, 1000), min_size=1, max_size=30), parts=st.integers(1, 9))
def test_a_partition_has_every_index_once_and_no_part_above_the_mean_by_more_than_the_largest(
    values: list[int], parts: int
) -> None:
    found = karmarkar_karp(values, parts)
    assert sorted(index for part in found for index in part) == list(range(len(values)))
    assert len(found) == parts
    sums = [sum(values[index] for index in part) for part in found]
    assert max(sums) - min(sums) <= max(values)


def test_what_cannot_be_laid_out_is_said() -> None:
    with pytest.raises(InvalidInputError, match=r"sequence 1 has 9 tokens, .* the token budget of a micro-batch .8."):
        framework_layout("verl", np.array([1, 9]), num_dp_ranks=1, token_budget=8)
    with pytest.raises(InvalidInputError, match="--layout 'velr' is unknown"):
        framework_layout("velr", np.array([1]), num_dp_ranks=1, token_budget=8)


RECORDED_LENGTHS = [7, 3, 11, 2, 5, 13, 1, 8, 4, 9, 6, 12]
RECORDED = {
    "verl": [[[4, 11, 8], [3, 2, 0]], [[6, 10, 5], [9, 7, 1]]],
    "slime": [[[2, 1], [9, 10, 11]], [[5, 6, 7, 8], [0, 4, 3]]],
}
"""[rank][micro-batch] samples, two ranks of at most 28 tokens; verl 0.9.1 and THUDM/slime at 624b824 returned them."""


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_layouts_come_back(name: str) -> None:
    tokens = np.array(RECORDED_LENGTHS)
    found = framework_layout(name, tokens, num_dp_ranks=2, token_budget=28)  # slime: without balance_data
    assert _same(found, layout_of_cells(RECORDED[name], len(tokens), 28))


def _same(one: BatchLayout, other: BatchLayout) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("micro_batch", "dp_rank", "order"))


def _source(repository: str, path: str) -> str:
    """Return a file of a git repository in the folder FRAMEWORK_CLONES; skip where it is not there."""
    folder = os.environ.get("FRAMEWORK_CLONES")
    if folder is None or not Path(folder, repository).is_dir():
        pytest.skip(f"FRAMEWORK_CLONES has no clone {repository!r}: its own function is not compared")
    shown = subprocess.run(["git", "-C", Path(folder, repository), "show", f"HEAD:{path}"], capture_output=True)
    return shown.stdout.decode()


def _module(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Any:
    for package in ("slime", "slime.utils"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    for name in ("flops_utils", "seqlen_balancing", "dp_schedule"):
        full = f"slime.utils.{name}"
        monkeypatch.setitem(sys.modules, full, _module(full, _source("slime", f"slime/utils/{name}.py")))
    return sys.modules["slime.utils.dp_schedule"]


@pytest.mark.parametrize("seed", range(20))
def test_slime_s_own_schedule_is_the_same(slime: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, multiple, balanced = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2])), bool(rng.integers(2))
    tokens = rng.integers(1, 4097, int(rng.integers(4 * ranks * multiple, 100)))
    args = SimpleNamespace(
        hidden_size=QWEN.hidden_size, num_attention_heads=QWEN.num_attention_heads, kv_channels=QWEN.kv_channels,
        num_query_groups=QWEN.num_query_groups, vocab_size=QWEN.vocab_size, num_layers=QWEN.num_layers,
        ffn_hidden_size=QWEN.dense_ffn_hidden_size, num_experts=QWEN.num_experts, moe_router_topk=QWEN.top_k,
        moe_ffn_hidden_size=QWEN.moe_ffn_hidden_size, use_dynamic_batch_size=True, max_tokens_per_gpu=4096,
        balance_data=balanced, balance_by_flops=False,
    )  # fmt: skip
    config = {"dp_size": ranks, "cp_size": 1, "vpp_size": multiple, "microbatch_group_size_per_vp_stage": multiple}
    partitions, batches, *_ = slime.build_dp_schedule(
        args, config, tokens.tolist(), global_batch_size=len(tokens), rollout_indices=list(range(len(tokens)))
    )
    cells = [[[mine[i] for i in part] for part in parts] for mine, parts in zip(partitions, batches, strict=True)]
    found = framework_layout(
        "slime", tokens, num_dp_ranks=ranks, token_budget=4096, multiple_of=multiple, model=QWEN if balanced else None
    )
    assert _same(found, layout_of_cells(cells, len(tokens), 4096))


@pytest.mark.framework
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000))
def test_verl_s_own_micro_batches_are_the_same(seed: int) -> None:
    torch = pytest.importorskip("torch")
    tensordict = pytest.importorskip("tensordict")
    verl = pytest.importorskip("verl.utils.seqlen_balancing", reason="verl is not installed: make test-integrations")
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([1, 2, 4]))
    tokens = rng.integers(1, 200, ranks * int(rng.integers(4, 20)))
    work = verl.calculate_workload(torch.tensor(tokens))
    # What `RayPPOTrainer._balance_batch` does with a batch, and every rank with its part of it.
    parts = verl.get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)
    mine = []
    for part in parts:
        part.sort(key=lambda sample: (work[sample], sample))
        mine.append(part[::2] + part[1::2][::-1])

    def batches(counts: int) -> list[list[list[int]]]:
        found = []
        for rank in mine:
            rows = torch.zeros((len(rank), 200), dtype=torch.long)
            for row, sample in enumerate(rank):
                rows[row, : tokens[sample]] = 1
            _, cut = verl.rearrange_micro_batches(
                tensordict.TensorDict({"input_ids": rows, "attention_mask": rows}, batch_size=[len(rank)]),
                max_token_len=400,
                min_num_micro_batch=counts,
            )
            found.append([[rank[i] for i in part] for part in cut])
        return found

    most = max(len(cut) for cut in batches(1))  # every rank runs as many as the rank that needs most
    while len({len(cut) for cut in batches(most)}) > 1:
        most += 1
    layout = framework_layout("verl", tokens, num_dp_ranks=ranks, token_budget=400)
    assert _same(layout, layout_of_cells(batches(most), len(tokens), 400))
