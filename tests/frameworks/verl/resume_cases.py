"""Cases of test_resume.py: verl's own checkpoints, saved while experts are elsewhere, and who goes on from them."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl_on_cpu
from break_cases import LIMIT, SMALLER, Setting, data_of
from checkpoint_cases import loading_into_torchs_adam
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.base import async_calls
from verl_cases import MOVES_ARE_FREE, OF_TEST, log_probs, moved
from verl_on_cpu import engine, impl, loss

from moe_rl.frameworks.run_settings import settings_from_environment
from moe_rl.frameworks.verl import attach as adapter

SAVED, AFTER = 2, 2
"""Updates before the checkpoint and behind it."""


@contextmanager
def balanced(wanted: bool) -> Iterator[None]:
    """Engines that are built inside are balanced, or plain."""
    if not wanted:
        yield
        return
    told = {"MOE_RL": "moe-rl", "MOE_RL_PACK": "false", "MOE_RL_RANKS_PER_NODE": "1"}
    uninstall = adapter.install(impl, settings=settings_from_environment(OF_TEST | told | MOVES_ARE_FREE))
    try:
        yield
    finally:
        uninstall()


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How verl writes a checkpoint, and on how many expert-parallel ranks."""

    ep_size: int
    sharded: bool
    """Weights in Megatron's shards; else in Hugging Face's format, by mbridge."""
    build: Mapping[str, Any] = field(default_factory=dict)
    """More of `engine`."""

    def made(self) -> Any:
        """An engine that saves and loads so."""
        built = engine(mode="disabled", ep_size=self.ep_size, lr=1e-6, common=1.0, **self.build)
        built.checkpoint_mananager.use_dist_checkpointing = self.sharded
        return built

    def opened(self, built: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, `built` may save and load."""
        return contextlib.nullcontext() if self.sharded else verl_on_cpu.as_hugging_face_has_it(built)


SHARDS = Format(ep_size=2, sharded=True)
BY_PARAMETER = {"dist_ckpt_optim_fully_reshardable": True}
ANY_WIDTH = Format(ep_size=4, sharded=False, build={**BY_PARAMETER, "checkpoint": {"async_save": True}})
HALF_AS_WIDE = Format(ep_size=2, sharded=False, build=BY_PARAMETER)


def trained(built: Any, start: int, stop: int, *, limit: int = LIMIT) -> dict[str, list[float]]:
    curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step in range(start, stop):
        data = data_of(step, limit=limit, setting=Setting())
        log_probs(built, data)
        with built.train_mode():
            output = built.train_batch(data, loss)["metrics"]
        for name, values in curve.items():
            values.append(float(np.sum(output[name])))
    return curve


def resumed(folder: str, *, by_us: bool, how: Format = SHARDS) -> dict[str, Any]:
    """What a new engine trains from a checkpoint."""
    with balanced(by_us):
        built = how.made()
        trained(built, 7, 8)  # without Apex and TE Megatron's optimizer loads only over state that is there
        with loading_into_torchs_adam(built.optimizer), how.opened(built):
            built.load_checkpoint(folder, del_local_after_load=False)
        found = {"curve": trained(built, SAVED, SAVED + AFTER), "moved": moved(built).get("moved", 0)}
        run = adapter.run_of(built)
        return found | {"imbalance": None if run is None else run.last_metrics["moe_rl/imbalance"]}


def saved(folder: Path, how: Format = SHARDS) -> dict[str, Any]:
    """Plain and balanced runs that save at the same update, and the plain run with other micro-batches.

    What is written behind the run is complete when the updates after it are done.
    """
    found: dict[str, Any] = {}
    for name, by_us, limit in (("plain", False, LIMIT), ("ours", True, LIMIT), ("yardstick", False, SMALLER)):
        with balanced(by_us):
            built = how.made()
            trained(built, 0, SAVED, limit=limit)
            found[f"{name} moved"] = moved(built).get("moved", 0)
            if name != "yardstick":
                with how.opened(built):
                    built.save_checkpoint(str(folder / name), global_step=SAVED)
            found[name] = trained(built, SAVED, SAVED + AFTER, limit=limit)
            async_calls.maybe_finalize_async_calls(blocking=True)
    return found


def shared_folder() -> Path:
    shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(shared)
    return Path(shared[0])


def four_combinations() -> dict[str, Any]:
    """Plain and balanced runs, each from a checkpoint of either.

    State by parameter beside Megatron's shards is not tried: plain verl 0.9.1 cannot load its own, since it loads the
    weights over the tensors by whose names the state would be found ("not in model_sharded_state_dict").
    """
    folder = shared_folder()
    with verl_on_cpu.verl_on_cpu():
        found = saved(folder)
        found["resumed"] = {
            f"{who} from {source}": resumed(str(folder / source), by_us=who == "ours")
            for who in ("plain", "ours")
            for source in ("plain", "ours")
        }
    return found


def other_width() -> dict[str, Any]:
    """Runs on four expert-parallel ranks whose checkpoints are in Hugging Face's format, with an optimizer's state by
    parameter, and are written behind the run while experts move on; resumed on two."""
    folder = shared_folder()
    with verl_on_cpu.verl_on_cpu():
        found = saved(folder, ANY_WIDTH)
        parallel_state.destroy_model_parallel()
        found["resumed"] = {
            f"{who} from {source}": resumed(str(folder / source), by_us=who == "ours", how=HALF_AS_WIDE)
            for who in ("plain", "ours")
            for source in ("plain", "ours")
        }
    return found


def killed() -> dict[str, Any]:
    """Rank 1 is killed in an update of a balanced run; the others say so."""
    with verl_on_cpu.verl_on_cpu(), balanced(True):
        built = SHARDS.made()
        trained(built, 0, 1)

        def dying(*given: Any, **named: Any) -> Any:
            if torch.distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss(*given, **named)

        data = data_of(1, limit=LIMIT, setting=Setting())
        try:
            with built.train_mode():
                built.train_batch(data, dying)
        except RuntimeError as error:
            return {"said": str(error)}
        return {"said": ""}
