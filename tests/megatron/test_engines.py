"""Homes and resident copies of a plan under a dispatcher that balances a domain by itself: its own code unchanged.

MoonEP's buffer is a stand-in, and so are HybridEP and the duplication that Megatron-LM's pull request 7450 adds to it,
whose interface is not public beyond its description. Not yet run with one of them.
"""

from typing import Any

import pytest
from curves import relative_difference

CASES = ("moonep_over_alltoall", "duplication_over_hybridep")


def engine_case(case: str) -> Any:
    return pytest.mark.multi_rank(world_size=4, case=f"engine_cases.{case}", launch="standins")


@pytest.mark.parametrize("case", [pytest.param(case, marks=engine_case(case)) for case in CASES])
def test_an_engine_deals_out_moved_homes_and_residents_unchanged(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["over"]["curve"] == rank["alone"]["curve"], "losses and norms differ in bits"
        assert relative_difference(rank["megatron"], rank["over"]["curve"]) <= 1e-5
        assert rank["over"]["residents"] > 0
    dealt, arrived = ([rank[name]["rows"] for rank in outcome] for name in ("over", "alone"))
    for first in (0, 2):  # the two ranks of a domain
        for rows, before in zip(
            zip(*dealt[first : first + 2], strict=True), zip(*arrived[first : first + 2], strict=True), strict=True
        ):
            assert abs(rows[0] - rows[1]) <= 1
            assert sum(rows) == sum(before)
    assert any(abs(a - b) > 8 for a, b in zip(*arrived[:2], strict=True)), "there was nothing to deal out"
