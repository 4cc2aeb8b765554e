"""docs/megatron.md is run as it stands."""

from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")


@pytest.mark.multi_rank(case="docs_cases.page_runs", world_size=2, launch="standins")
def test_the_page_runs_and_its_plan_comes_true(outcome: list[Any]) -> None:
    for found in outcome:
        assert found["blocks"] == 9
        assert found["exported"]
        assert found["misplaced"] == 0
        assert found["actual"] == pytest.approx(found["predicted"])
        assert found["recorded"] == 2 * 2 * 2
