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


@pytest.mark.multi_rank(world_size=4, case="plan_path_cases.levers")
def test_every_lever_does_what_was_predicted_of_it(outcome: list[Any]) -> None:
    levers = outcome[0]
    for lever in levers.values():
        assert lever["rows"][0] == lever["rows"][1]
        assert lever["copies"][0] == lever["copies"][1]
        assert lever["bytes"][0] == lever["bytes"][1]
    rows = {name: lever["rows"][1] for name, lever in levers.items()}
    assert rows.pop("none") > max(rows.values())
