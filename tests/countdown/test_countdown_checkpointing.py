"""Checkpoints are whole or not there; the other files of a run are cut back to one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.countdown.checkpointing import cut_metrics, cut_trace, last_checkpoint, save_checkpoint
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceReader, TraceWriter


def save(folder: Path, step: int, *, fail: bool = False) -> None:
    def barrier() -> None:
        if fail:
            raise RuntimeError("killed")

    state = {"value": torch.full((3,), float(step))}
    save_checkpoint(folder, step=step, rank=0, state=state, metrics_bytes=10 * step, barrier=barrier)


def test_the_last_whole_checkpoint_counts_and_two_are_kept(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    for step in (1, 2, 3):
        save(tmp_path, step)
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.metrics_bytes) == (3, 30)
    assert torch.equal(found.load(0)["value"], torch.full((3,), 3.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_one_that_was_not_finished_does_not_count_and_is_written_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(RuntimeError, match="killed"):
        save(tmp_path, 2, fail=True)
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    save(tmp_path, 2)
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 2


def test_metrics_are_cut_back_and_never_filled_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cut_metrics(path, 0)
    assert not path.exists()
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "half')
    cut_metrics(path, len('{"step": 1}\n'))
    assert path.read_text() == '{"step": 1}\n'
    with pytest.raises(InvalidInputError, match="shorter than when the checkpoint was written"):
        cut_metrics(path, 100)


def trace_of(step: int) -> RoutingTrace:
    return RoutingTrace.from_sequences(
        [np.array([[[0, 1]], [[2, 3]]])], num_experts=4, provenance="R3", step=np.array([step], np.int32)
    )


def test_a_trace_loses_the_steps_after_the_checkpoint_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.moetrace"
    shape = {"num_experts": 4, "moe_layer_ids": (0,), "top_k": 2}
    cut_trace(path, 3)
    with TraceWriter(path, **shape) as writer:
        for step in (1, 2, 3):
            writer.append(trace_of(step))
    cut_trace(path, 3)
    assert TraceReader(path).manifest.steps == (1, 2, 3)
    cut_trace(path, 1)
    assert TraceReader(path).manifest.steps == (1,)
    with TraceWriter(path, append=True, **shape) as writer:
        writer.append(trace_of(2))
    assert TraceReader(path).manifest.steps == (1, 2)
    assert len(list(path.glob("shard-*"))) == 2
    cut_trace(path, 0)
    assert not path.exists()


def test_a_trace_whose_first_step_was_cut_short_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "trace.moetrace"
    path.mkdir()
    (path / ".shard-000000.safetensors.tmp").write_bytes(b"half")
    cut_trace(path, 5)
    assert not path.exists()
