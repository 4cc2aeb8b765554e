"""Sums over data-parallel ranks equal one process."""

from typing import Any

import pytest
import torch
from data_parallel_cases import OBJECTIVES_UNDER_TEST, WORLD, results, router_gamma

from moe_rl.importance import OBJECTIVES


@pytest.mark.multi_rank(world_size=2, case="data_parallel_cases.shared_rows")
def test_two_ranks_equal_one_process(outcome: list[Any]) -> None:
    assert set(OBJECTIVES_UNDER_TEST) <= set(OBJECTIVES.names)
    alone = results(slice(None), None, 1)
    for name, expected in alone.items():
        for reduction in ("sum", "mean"):
            parts = [torch.tensor(rank[f"{reduction}/{name}"], dtype=expected.dtype) for rank in outcome]
            if name.startswith("rows/"):
                whole = torch.cat(parts)
                scale = WORLD if reduction == "mean" and "/grad/" in name else 1  # the framework averages gradients
                torch.testing.assert_close(whole / scale, expected, rtol=1e-12, atol=1e-14)
            else:
                total = torch.stack(parts).sum(0) / (WORLD if reduction == "mean" else 1)
                torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)
    gamma = router_gamma(range(4), None)
    for rank in outcome:
        torch.testing.assert_close(torch.tensor(rank["gamma"]), gamma)
