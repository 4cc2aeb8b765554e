"""Every expert view trains as plain Megatron does, with replicas and moved homes; one without a case fails here."""

from pathlib import Path
from typing import Any

import pytest
from local_ranks import run_cases

from moe_rl.megatron.expert_views.registry import EXPERT_VIEWS

REGISTRY = EXPERT_VIEWS
CASES = Path(__file__).parents[1] / "megatron"
RELATIVE_LIMIT = 1e-6
"""The contract of the runtime in float32: only the order of sums differs."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases = {name: f"view_cases.{name.replace('-', '_')}" for name in EXPERT_VIEWS.names}
    folder = tmp_path_factory.mktemp("views")
    launch = run_cases(CASES, list(cases.values()), world_size=2, folder=folder, timeout_s=240)
    return {name: launch.of(case) for name, case in cases.items()}


@pytest.mark.multi_rank
@pytest.mark.parametrize("name", EXPERT_VIEWS.names)
def test_a_view_trains_as_its_module_does(name: str, trained: dict[str, list[Any]]) -> None:
    view = EXPERT_VIEWS[name]
    for rank in trained[name]:
        assert rank["class"] == view.module_class
        assert ("megatron" in rank) == view.computes
        assert rank["metrics"]["moe_rl/replicas"] > 0
        for computed in ("megatron", "grouped") if view.computes else ("grouped",):
            for curve, values in rank["plain"].items():
                assert rank[computed][curve] == pytest.approx(values, rel=RELATIVE_LIMIT), (computed, curve)
