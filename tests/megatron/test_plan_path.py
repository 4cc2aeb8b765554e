"""What a plan predicts of rows and of copies between nodes is what ranks do, for rows whose routes are replayed."""

from typing import Any

import numpy as np
import pytest


@pytest.mark.multi_rank(world_size=4, case="plan_path_cases.replayed")
def test_predicted_rows_and_copies_between_nodes_are_those_that_ran(outcome: list[Any]) -> None:
    for rank in outcome:
        for step in rank:
            assert step["rows"][0] == step["rows"][1]
            assert step["copies"][0] == step["copies"][1]
            assert np.sum(step["copies"][1]) < step["static"]
            assert step["replicas"] > 0
        assert sum(step["residents"] for step in rank) > 0
        assert sum(step["received"] for rank in outcome for step in rank) > 0
        assert sum(step["across"] for step in rank) > 0
