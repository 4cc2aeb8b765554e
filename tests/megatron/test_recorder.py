"""A recorded Megatron run is a trace of what its experts computed."""

import json
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from thread_ranks import ThreadRanks
from typer.testing import CliRunner

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import cluster_topology
from moe_rl.cli.commands import application
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.reduce import reduce_load
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron.recorder import RoutingRecorder


def recorder_case(world_size: int, case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"recorder_cases.{case}")


@pytest.fixture
def recorded(outcome: list[Any]) -> Iterator[list[Any]]:
    """The outcome, whose folder goes after the test."""
    yield outcome
    shutil.rmtree(outcome[0]["folder"])


def load_of(trace: RoutingTrace, rank: dict[str, Any], *, world_size: int, pipeline: int) -> StepLoad:
    ranks = world_size // pipeline
    topology = cluster_topology(
        BalancerConfig(),
        ep_size=rank["ep_size"],
        num_ep_groups=ranks // rank["ep_size"],
        slices_per_dp_rank=rank["tp_size"],
    )
    layout = BatchLayout.recorded(trace.micro_batch, trace.dp_rank, num_dp_ranks=topology.num_dp_ranks)
    return reduce_load([trace], layout=layout, topology=topology)


@pytest.mark.parametrize(
    ("case", "pipeline"),
    [
        pytest.param("live_routing", 1, marks=recorder_case(2, "live_routing"), id="live"),
        pytest.param("replay_in_a_pipeline", 2, marks=recorder_case(4, "replay_in_a_pipeline"), id="pipeline"),
        pytest.param(
            "replay_under_tensor_parallelism",
            1,
            marks=recorder_case(4, "replay_under_tensor_parallelism"),
            id="tensor-parallel",
        ),
    ],
)
def test_loads_of_the_recorded_trace_are_the_rows_that_ran(case: str, pipeline: int, recorded: list[Any]) -> None:
    reader = TraceReader(Path(recorded[0]["folder"]) / "all.moetrace")
    reader.validate()
    assert reader.steps == (3, 4)
    for rank in recorded:
        for index, step in enumerate(reader.steps):
            trace = reader.load(step)
            assert isinstance(trace, RoutingTrace)
            assert trace.valid.all()
            load = load_of(trace, rank, world_size=len(recorded), pipeline=pipeline)
            per_rank = load.per_expert().reshape(*load.pairs.shape[:3], rank["ep_size"], -1).sum(axis=4)
            expected = per_rank[rank["ep_group"]][:, rank["layers"]]
            assert expected.tolist() == rank["rows"][index]
    check_simulation(reader.path, recorded[0])


def check_simulation(path: Path, rank: dict[str, Any]) -> None:
    """`moe-rl simulate` takes the recorded layout as it is."""
    out = path.parent / "figures.json"
    command = [
        "simulate",
        str(path),
        "--ep",
        str(rank["ep_size"]),
        "--tensor-model-parallel-size",
        str(rank["tp_size"]),
    ]
    command += ["--policy", "static,ultraep", "--objective", "imbalance", "--cluster", "h100", "--json", str(out)]
    result = CliRunner().invoke(application(), command)
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    assert figures["setting"]["num_micro_batches"] == 3
    assert figures["policies"]["ultraep"]["imbalance"] < figures["policies"]["static"]["imbalance"]


@recorder_case(2, "killed")
def test_a_killed_writer_leaves_what_was_complete(recorded: list[Any]) -> None:
    folder = Path(recorded[0]["folder"])
    assert recorded[0]["steps"] == [0]
    assert TraceReader(folder / "dp00000.moetrace").steps == (0, 1)
    survivor = TraceReader(folder / "dp00001.moetrace")
    survivor.validate()
    assert survivor.steps == (0,)
    assert set(np.asarray(survivor.load().dp_rank).tolist()) == {1}


@recorder_case(2, "refusals")
def test_what_cannot_be_recorded_is_said_and_leaves_nothing(recorded: list[Any]) -> None:
    for rank in recorded:
        assert "no MoELayer" in rank["no_moe"]
        assert "ran no forward" in rank["no_forward"]
        assert rank["left"] == "[]"


def test_when_a_recorder_is_closed_on_any_rank_the_files_of_all_are_whole() -> None:
    """Ranks are threads: the one that has least to close comes first, and may read what the others wrote."""
    ranks, whole = ThreadRanks(3), [False] * 3

    def step(rank: int) -> list[bool]:
        recorder = object.__new__(RoutingRecorder)
        removed: list[str] = []

        def close() -> None:
            time.sleep(0.05 * rank)
            whole[rank] = True

        recorder._handles = [SimpleNamespace(remove=lambda: removed.append("hook"))]
        recorder._writer = SimpleNamespace(close=close)  # type: ignore[assignment]
        recorder._group = "the ranks with the same sequences"  # type: ignore[assignment]
        recorder.close()
        assert removed == ["hook"]
        return list(whole)

    destroyed: list[Any] = []
    with patch.object(dist, "barrier", ranks.barrier), patch.object(dist, "destroy_process_group", destroyed.append):
        found = ranks.run(step)
    assert found == [[True] * 3] * 3
    assert destroyed == ["the ranks with the same sequences"] * 3
