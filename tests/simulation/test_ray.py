"""A sweep on a real Ray cluster of this machine: the same figures, also when a worker is lost in the middle."""

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.simulation.executors import RETRIES, executor_named

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]  # Ray leaves its own files open


@pytest.fixture(scope="module", autouse=True)
def tasks_by_value(ray_cluster: Any) -> Iterator[None]:
    """A worker may find another package `tests` (verl installs one), or none."""
    ray_cluster.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray_cluster.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class DiesOnce:
    """Squares; the worker that gets 3 first is killed."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __call__(self, index: int) -> int:
        if index == 3 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index**2


def refused(index: int) -> int:
    raise InvalidInputError(f"point {index} has no experts.")


def always_dies(index: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return index


def test_a_lost_worker_is_replaced_and_nothing_changes(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    found = sorted(executor_named("ray").run(DiesOnce(marker), range(8)))
    assert marker.exists()
    assert found == [(index, index**2) for index in range(8)]


def test_a_refusal_reaches_the_user_as_it_is() -> None:
    with pytest.raises(InvalidInputError, match="point 0 has no experts"):
        list(executor_named("ray").run(refused, [0]))


def test_a_task_that_kills_every_worker_is_given_up() -> None:
    with pytest.raises(InvalidInputError, match=f"lost {RETRIES + 1} times"):
        list(executor_named("ray").run(always_dies, [0]))


def test_a_task_that_workers_cannot_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def task(index): return index")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInputError, match=r"cannot load the task.* No module named 'only_here'"):
        list(executor_named("ray").run(importlib.import_module("only_here").task, [0]))


def test_a_sweep_on_ray_equals_a_local_one(tmp_path: Path) -> None:
    import moe_rl

    trace = Path(__file__).parents[2] / "configs" / "traces" / "countdown-grpo.moetrace"
    grid = {"expert_model_parallel_size": [8, 16], "moe_token_dispatcher_type": ["flex", "alltoall"]}
    setting = {"ep_group_tokens": 8192, "tokens_per_rank": 4096, "policy": "eplb-oracle,ultraep"}
    local = moe_rl.sweep(trace, grid, jobs=1, **setting)
    assert moe_rl.sweep(trace, grid, executor="ray", **setting) == local
