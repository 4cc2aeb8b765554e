"""Cases of test_resume.py: verl's own checkpoints, saved while experts are elsewhere, and who goes on from them."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl_on_cpu
from break_cases import LIMIT, SMALLER, Setting, data_of
from checkpoint_cases import loading_into_torchs_adam
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


def made() -> Any:
    built = engine(mode="disabled", ep_size=2, lr=1e-6, common=1.0)
    built.checkpoint_mananager.use_dist_checkpointing = True
    return built


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


def resumed(folder: str, *, by_us: bool) -> dict[str, Any]:
    """What a new engine trains from a checkpoint."""
    with balanced(by_us):
        built = made()
        trained(built, 7, 8)  # without Apex and TE Megatron's optimizer loads only over state that is there
        with loading_into_torchs_adam(built.optimizer):
            built.load_checkpoint(folder, del_local_after_load=False)
        found = {"curve": trained(built, SAVED, SAVED + AFTER), "moved": moved(built).get("moved", 0)}
        run = adapter.run_of(built)
        return found | {"imbalance": None if run is None else run.last_metrics["moe_rl/imbalance"]}


def saved(folder: Path) -> dict[str, Any]:
    """Plain and balanced runs that save at the same update, and the plain run with other micro-batches."""
    found: dict[str, Any] = {}
    for name, by_us, limit in (("plain", False, LIMIT), ("ours", True, LIMIT), ("yardstick", False, SMALLER)):
        with balanced(by_us):
            built = made()
            trained(built, 0, SAVED, limit=limit)
            found[f"{name} moved"] = moved(built).get("moved", 0)
            if name != "yardstick":
                built.save_checkpoint(str(folder / name), global_step=SAVED)
            found[name] = trained(built, SAVED, SAVED + AFTER, limit=limit)
    return found


def shared_folder() -> Path:
    shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(shared)
    return Path(shared[0])


def four_combinations() -> dict[str, Any]:
    """Plain and balanced runs, each from a checkpoint of either.

    State by parameter is not tried: plain verl 0.9.1 cannot
    load its own (dist_ckpt_optim_fully_reshardable, "not in model_sharded_state_dict")."""
    folder = shared_folder()
    with verl_on_cpu.verl_on_cpu():
        found = saved(folder)
        found["resumed"] = {
            f"{who} from {source}": resumed(str(folder / source), by_us=who == "ours")
            for who in ("plain", "ours")
            for source in ("plain", "ours")
        }
    return found


def killed() -> dict[str, Any]:
    """Rank 1 is killed in an update of a balanced run; the others say so."""
    with verl_on_cpu.verl_on_cpu(), balanced(True):
        built = made()
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
