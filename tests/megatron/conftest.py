"""Runs the cases of `@pytest.mark.multi_rank(case="module.function", world_size=...)` tests: one launch per world size.

A launch runs all cases that the selected tests want; `outcome` is what every rank returned for this test's case. When
a case fails, those after it have no result: select the test alone to see the others.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from moe_rl.testing.launcher import Launch, run_cases

TIMEOUT_S = 240.0
"""Of the start and of every case: far above what one takes on a busy machine."""
FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # the modules beside the tests
_launches: dict[int, Launch] = {}


def _wanted(item: pytest.Item) -> tuple[int, str] | None:
    marker = item.get_closest_marker("multi_rank")
    if marker is None or "case" not in marker.kwargs:
        return None
    return marker.kwargs["world_size"], marker.kwargs["case"]


@pytest.fixture
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What every rank returned for the case of this test."""
    wanted = _wanted(request.node)
    if wanted is None:
        raise ValueError(f"{request.node.nodeid} lacks the multi_rank marker with case and world_size.")
    world_size, case = wanted
    selected = [_wanted(item) for item in request.session.items]
    cases = list(dict.fromkeys(each[1] for each in selected if each and each[0] == world_size))
    if world_size not in _launches:
        _launches[world_size] = run_cases(
            FOLDER,
            cases,
            world_size=world_size,
            folder=tmp_path_factory.mktemp(f"ranks-{world_size}"),
            timeout_s=TIMEOUT_S,
        )
    return _launches[world_size].of(case)
