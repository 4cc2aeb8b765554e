"""Counts equal the reference exactly, add up to the valid pairs, and refuse what they cannot count."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.histogram.op import expert_histogram


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: int
    top_k: int
    num_experts: int
    num_bins: int = 1
    dtype: torch.dtype = torch.int32
    routing: str = "random"
    masked: bool = False

    def __str__(self) -> str:
        return (
            f"T{self.num_tokens}-K{self.top_k}-E{self.num_experts}-B{self.num_bins}-{str(self.dtype)[6:]}"
            f"-{self.routing}-mask{int(self.masked)}"
        )


CASES = [
    Case(num_tokens=0, top_k=2, num_experts=4),
    Case(num_tokens=1, top_k=1, num_experts=1),
    Case(num_tokens=300, top_k=4, num_experts=7, num_bins=3, masked=True),
    Case(num_tokens=129, top_k=1, num_experts=128, dtype=torch.int64),
    Case(num_tokens=100, top_k=8, num_experts=256, dtype=torch.uint8, num_bins=5),
    Case(num_tokens=64, top_k=8, num_experts=8, routing="every_expert", dtype=torch.int16),
    Case(num_tokens=200, top_k=2, num_experts=6, routing="one_expert", masked=True),
    Case(num_tokens=90, top_k=3, num_experts=5, routing="dropped", num_bins=2),
    Case(num_tokens=20, top_k=2, num_experts=5, routing="all_dropped"),
]


def make_ids(case: Case, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (case.num_tokens, case.top_k)
    # The last expert stays empty where there are several.
    ids = torch.randint(0, max(1, case.num_experts - 1), shape, generator=generator)
    if case.routing == "every_expert":
        ids = torch.arange(case.top_k).expand(shape).clone()
    elif case.routing == "one_expert":
        ids.fill_(3)
    elif case.routing == "dropped":
        ids[torch.rand(shape, generator=generator) < 0.5] = -1
    elif case.routing == "all_dropped":
        ids.fill_(-1)
    return ids.to(case.dtype).to(device)


def options(case: Case, device: str) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    valid = torch.rand(case.num_tokens, generator=generator) < 0.7
    # Bin -1 and bin B are out of range and count nothing.
    bins = torch.randint(-1, case.num_bins + 1, (case.num_tokens,), generator=generator, dtype=torch.int32)
    return {
        "valid": valid.to(device) if case.masked else None,
        "bins": bins.to(device) if case.num_bins > 1 else None,
        "num_bins": case.num_bins,
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts_are_those_of_counting_one_by_one(device: str, case: Case) -> None:
    ids, chosen = make_ids(case, device), options(case, device)
    want = [[0] * case.num_experts for _ in range(case.num_bins)]
    bins, valid = chosen["bins"], chosen["valid"]
    for token, experts in enumerate(ids.tolist()):
        bin_of_token = 0 if bins is None else int(bins[token])
        if (valid is not None and not valid[token]) or not 0 <= bin_of_token < case.num_bins:
            continue
        for expert in experts:
            if expert >= 0:
                want[bin_of_token][expert] += 1
    for backend in ("triton", "reference"):
        got = expert_histogram(ids, case.num_experts, **chosen, backend=backend)
        assert got.dtype == torch.int32
        assert got.tolist() == want, backend


def test_ids_beyond_the_last_expert_count_nothing(device: str) -> None:
    ids = torch.tensor([[0, 4], [5, 1]], dtype=torch.int32, device=device)
    for backend in ("triton", "reference"):
        assert expert_histogram(ids, 4, backend=backend).tolist() == [[1, 1, 0, 0]]


def test_strided_ids_are_read_in_place(device: str) -> None:
    ids = torch.randint(0, 5, (60, 3), generator=torch.Generator().manual_seed(2), dtype=torch.int32).to(device)
    strided = ids.t().contiguous().t()
    assert torch.equal(expert_histogram(strided, 5, backend="triton"), expert_histogram(ids, 5, backend="reference"))


def test_bins_add_up_to_the_whole(device: str) -> None:
    ids = torch.randint(0, 9, (100, 2), generator=torch.Generator().manual_seed(3), dtype=torch.int32).to(device)
    bins = (torch.arange(100, dtype=torch.int32) % 4).to(device)
    binned = expert_histogram(ids, 9, bins=bins, num_bins=4, backend="triton")
    assert torch.equal(binned.sum(0), expert_histogram(ids, 9, backend="triton")[0])
    assert int(binned.sum()) == ids.numel()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_op_passes_opcheck(device: str, backend: str) -> None:
    ids = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32, device=device)
    bins = torch.tensor([0, 1], dtype=torch.int32, device=device)
    op = torch.ops.moe_rl.expert_histogram.default
    torch.library.opcheck(op, (ids, 3, torch.ones(2, dtype=torch.bool, device=device), bins, 2, backend))
    torch.library.opcheck(op, (ids, 3, None, None, 1, backend))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: expert_histogram(torch.zeros(2, 2), 4), r"ids must be \[T, K\]"),
        (lambda: expert_histogram(torch.zeros(2, dtype=torch.int32), 4), r"ids must be \[T, K\]"),
        (lambda: expert_histogram(torch.zeros(2, 2, dtype=torch.int32), 0), "num_experts must be at least 1"),
        (lambda: expert_histogram(torch.zeros(2, 2, dtype=torch.int32), 4, num_bins=2), "2 bins need `bins`"),
        (lambda: expert_histogram(torch.zeros(2, 2, dtype=torch.int32), 4, num_bins=0), "num_bins must be at least 1"),
        (
            lambda: expert_histogram(torch.zeros(2, 2, dtype=torch.int32), 4, valid=torch.ones(2)),
            "valid must be torch.bool",
        ),
        (
            lambda: expert_histogram(torch.zeros(2, 2, dtype=torch.int32), 4, bins=torch.zeros(3, dtype=torch.int32)),
            "bins must be torch.int32",
        ),
    ],
)
def test_misuse_gets_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        call()
