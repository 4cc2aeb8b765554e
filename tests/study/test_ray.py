"""Sweeps and studies on a real Ray cluster of this machine: the same bytes, also when a worker is lost."""

import importlib
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.replay import write_trace
from moe_rl.simulators.registry import SYNTHETIC
from moe_rl.study.executors import RETRIES, Executor, Task, executor_named
from moe_rl.study.options import SimulationOptions, merge_options
from moe_rl.study.run_sweep import run_sweep, span_grid

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]  # Ray leaves its own files open


@pytest.fixture(scope="module", autouse=True)
def tasks_by_value(ray_cluster: Any) -> Iterator[None]:
    """A worker may find another package `tests` (verl installs one), or none."""
    ray_cluster.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray_cluster.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class DiesOnce:
    """Does a task; the worker that gets 3 first does it and is killed before it can say so."""

    def __init__(self, marker: Path, task: Task = lambda index: index**2) -> None:
        self.marker, self.task = marker, task

    def __call__(self, index: int) -> Any:
        done = self.task(index)
        if index == 3 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return done


class Losing:
    """A Ray cluster that loses a worker in the middle of whatever runs on it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __call__(self, task: Task, indices: Sequence[int]) -> Generator[tuple[int, Any]]:
        return executor_named("ray")(DiesOnce(self.marker, task), indices)


def refused(index: int) -> int:
    raise InvalidInputError(f"point {index} has no experts.")


def always_dies(index: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return index


def test_a_lost_worker_is_replaced_and_nothing_changes(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    found = sorted(executor_named("ray")(DiesOnce(marker), range(8)))
    assert marker.exists()
    assert found == [(index, index**2) for index in range(8)]


def test_a_refusal_reaches_the_user_as_it_is() -> None:
    with pytest.raises(InvalidInputError, match="point 0 has no experts"):
        list(executor_named("ray")(refused, [0]))


def test_a_task_that_kills_every_worker_is_given_up() -> None:
    with pytest.raises(InvalidInputError, match=rf"lost its Ray worker {RETRIES + 1} times"):
        list(executor_named("ray")(always_dies, [0]))


def test_a_task_that_workers_cannot_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def task(index): return index")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInputError, match=r"cannot load the task.* No module named 'only_here'"):
        list(executor_named("ray")(importlib.import_module("only_here").task, [0]))


def test_a_sweep_on_ray_equals_a_local_one(tmp_path: Path) -> None:
    import moe_rl

    trace = Path(__file__).parents[2] / "configs" / "traces" / "countdown-grpo.moetrace"
    grid = {"expert_model_parallel_size": [8, 16], "moe_token_dispatcher_type": ["flex", "alltoall"]}
    setting = {"ep_group_tokens": 8192, "tokens_per_rank": 4096, "policy": "eplb-oracle,ultraep"}
    local = moe_rl.sweep(trace, grid, jobs=1, **setting)
    assert moe_rl.sweep(trace, grid, executor="ray", **setting) == local


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("steps") / "steps.moetrace"
    steps = list(SYNTHETIC["grpo"].with_options(num_steps=5, num_sequences=32, mean_length=40).steps())
    write_trace(
        steps,
        target,
        num_experts=steps[0].num_experts,
        moe_layer_ids=steps[0].moe_layer_ids,
        top_k=steps[0].top_k,
    )
    return target


def test_a_study_of_several_steps_on_ray_equals_a_local_one_whoever_is_lost(five_steps: Path, tmp_path: Path) -> None:
    options = merge_options(SimulationOptions, {"micro_batch_tokens": 1024, "policy": "eplb-oracle,ultraep"}, None)
    grid = span_grid({"step": [0, 1, 2, 3, 4]}.items(), options)

    def study(name: str, workers: Executor) -> list[str]:
        run_sweep(five_steps, grid, options, tmp_path / name, progress=lambda *done: None, executor=workers)
        text = (tmp_path / name).read_text()
        return re.sub(r'"plan_time_s": [0-9.e-]+', "", text).splitlines()

    assert study("ray.jsonl", Losing(tmp_path / "died")) == study("local.jsonl", executor_named("local", jobs=2))
    assert (tmp_path / "died").exists()
