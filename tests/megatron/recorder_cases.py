"""Cases of test_recorder.py: runs whose routing is recorded, and what their experts really computed."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from replica_cases import occurring

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron import BalancerConfig, RoutingRecorder, attach, merge_recordings
from moe_rl.replay.manifest import Manifest

STEPS = (3, 4)


def shared_folder() -> Path:
    """A folder that all ranks know; the test removes it."""
    name = [tempfile.mkdtemp(prefix="moe_rl-recorder-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


def of_different_sizes(step: int) -> list[torch.Tensor]:
    """Routes of three micro-batches, the second half as long as the others."""
    return [r[: len(r) // 2] if m == 1 else r for m, r in enumerate(occurring(step))]


def recorded(run: tiny_gpt.Run, *, routes_of: Any = occurring, provenance: str = "R3") -> dict[str, Any]:
    """Record two steps of training; rows [step, M, L of this stage, P] are what the EP group computed."""
    folder = shared_folder()
    recorder = RoutingRecorder(run.models, folder, model="tiny", provenance=provenance)
    balancer = attach(run.models, run.optimizer, BalancerConfig(policy="static"))
    curve, rows = tiny_gpt.history(), []
    for step in STEPS:
        balancer.begin_pass(PassSource.replayed([tiny_gpt.held_rows(r) for r in routes_of(step)]))
        with recorder.step(step):
            tiny_gpt.update(run, step, routes_of(step), curve)
        with torch.no_grad():  # outside a step: not recorded, and no micro-batch of the pass
            tiny_gpt.forward_backward(run, 99, routes_of(0), forward_only=True)
        rows.append(balancer.end_pass().actual_rows.tolist())
    recorder.close()
    dist.barrier()
    if dist.get_rank() == 0:
        merge_recordings(folder, folder / "all.moetrace")
    dist.barrier()
    return {
        "folder": str(folder),
        "rows": rows,
        "layers": [state.layer for state in balancer._states],
        "ep_group": parallel_state.get_expert_data_parallel_rank(),
        "ep_size": parallel_state.get_expert_model_parallel_world_size(),
        "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
    }


def replay_in_a_pipeline() -> dict[str, Any]:
    with tiny_gpt.parallel(2, pipeline=2):
        return recorded(
            tiny_gpt.build(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        )


def replay_under_tensor_parallelism() -> dict[str, Any]:
    with tiny_gpt.parallel(4, tensor=2):
        return recorded(tiny_gpt.build())


def live(gpt: Any, routes: torch.Tensor) -> None:
    """Let the routers choose."""
    for layer in gpt.decoder.layers:
        layer.mlp.router.router_replay.clear_router_replay_action()


def live_routing() -> dict[str, Any]:
    with tiny_gpt.parallel(2), patch.object(tiny_gpt, "replay", live):
        return recorded(tiny_gpt.build(), routes_of=of_different_sizes, provenance="live")


class Killed(BaseException):
    """What no code catches."""


def killed() -> dict[str, Any]:
    """Data-parallel rank 1 ends between the shard of its second step and the manifest that names it."""

    def die(*_: Any) -> None:
        raise Killed

    with tiny_gpt.parallel(2):
        folder = shared_folder()
        run = tiny_gpt.build()
        recorder = RoutingRecorder(run.models, folder, model="tiny")
        for step in range(2):
            dying = dist.get_rank() == 1 and step == 1
            write = patch.object(Manifest, "write", die if dying else Manifest.write)
            with contextlib.suppress(Killed), write, recorder.step(step):
                tiny_gpt.forward_backward(run, step, occurring(step), forward_only=True)
        dist.barrier()
        found: dict[str, Any] = {"folder": str(folder)}
        if dist.get_rank() == 0:
            found["steps"] = list(merge_recordings(folder, folder / "all.moetrace").steps)
    return found


def refusals() -> dict[str, str]:
    """What the recorder refuses, in its words."""
    found = {}
    with tiny_gpt.parallel(2):
        folder = shared_folder()
        run = tiny_gpt.build()
        try:
            RoutingRecorder(torch.nn.Linear(1, 1), folder)
        except InvalidInputError as error:
            found["no_moe"] = str(error)
        try:
            with RoutingRecorder(run.models, folder).step(0):
                pass
        except InvalidInputError as error:
            found["no_forward"] = str(error)
        found["left"] = str(sorted(path.name for path in folder.iterdir()))
        found["folder"] = str(folder)
    return found
