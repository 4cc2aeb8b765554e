"""Cases of test_give_up.py: an update of verl's engine whose loss raises on all ranks; the worker saves and goes on."""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl_on_cpu
from checkpoint_cases import loading_into_torchs_adam
from verl_cases import MOVES_ARE_FREE, OF_TEST, final_weights, log_probs, moved
from verl_on_cpu import batch, engine, impl, loss

from moe_rl.frameworks.run_settings import settings_from_environment
from moe_rl.frameworks.verl import attach as adapter

SEQUENCES, LIMIT, SMALLER = 8, 120, 80
"""Tokens of a micro-batch at most, and in the yardstick: plain verl, whose sums are taken otherwise."""
BROKEN, AFTER = 2, 3


class OfTheUserError(Exception):
    """What a user's loss raises."""


@dataclass(frozen=True, kw_only=True)
class Break:
    """Where an update breaks off, and what kind of run it is of."""

    call: int
    """Of the loss in the update: which one raises, from 0 on."""
    error: type[BaseException] = OfTheUserError
    told: dict[str, str] = field(default_factory=dict)
    """Variables of the balanced run."""
    build: dict[str, Any] = field(default_factory=dict)


def data_of(step: int, *, limit: int, replayed: bool) -> Any:
    sizes = tuple(np.random.default_rng(step).integers(20, 60, SEQUENCES).tolist())
    budget = {"use_dynamic_bsz": True, "max_token_len_per_gpu": limit, "enable_routing_replay": replayed}
    return batch(step, sizes, routes=replayed, **budget)


def raising_at(call: int, error: type[BaseException]) -> Callable[..., Any]:
    """verl's loss function, which raises when it is called for the `call`-th micro-batch."""
    calls = iter(range(1000))

    def raising(*given: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise error("in the user's loss")
        return loss(*given, **named)

    return raising


def run_through(built: Any, broken: Break, folder: str, *, limit: int = LIMIT) -> dict[str, Any]:
    """Steps of a log-prob pass and an update, one of which breaks off; then verl's own checkpoint, and more steps."""
    replayed = broken.build.get("mode", "disabled") != "disabled"
    curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    found: dict[str, Any] = {"metrics": []}

    def step_of(step: int, with_loss: Callable[..., Any]) -> None:
        data = data_of(step, limit=limit, replayed=replayed)
        log_probs(built, data)
        with built.train_mode():
            output = built.train_batch(data, with_loss)["metrics"]
        for name, values in curve.items():
            values.append(float(np.sum(output[name])))
        run = adapter.run_of(built)
        if run is not None:
            found["metrics"].append(run.last_metrics)

    for step in range(BROKEN):
        step_of(step, loss)
    before = {name: values.copy() for name, values in curve.items()}
    try:
        step_of(BROKEN, raising_at(broken.call, broken.error))
    except broken.error as error:
        found["raised"] = str(error)
    found["moved"] = moved(built).get("moved", 0)
    built.save_checkpoint(folder, global_step=BROKEN)
    found["exported"] = len([name for name in final_weights(built) if name.startswith("exported")])
    for values in curve.values():
        values[:] = []
    for step in range(BROKEN, BROKEN + AFTER):
        step_of(step, loss)
    return {"before": before, "after": {name: values.copy() for name, values in curve.items()}, **found}


def after_a_break(broken: Break, *, checked: bool = True) -> dict[str, Any]:
    """Plain verl, the balanced run and the yardstick, each after the same error; and a plain run of the checkpoint."""
    shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(shared)
    folder = Path(shared[0])
    build = {"mode": "disabled", "ep_size": 2, "lr": 1e-6, "common": 1.0} | broken.build

    def made() -> Any:
        built = engine(**build)
        built.checkpoint_mananager.use_dist_checkpointing = True
        return built

    told = {"MOE_RL": "moe-rl", "MOE_RL_PACK": "false", "MOE_RL_RANKS_PER_NODE": "1"} | MOVES_ARE_FREE | broken.told
    found: dict[str, Any] = {}
    with verl_on_cpu.verl_on_cpu():
        found["plain"] = run_through(made(), broken, str(folder / "plain"))
        found["yardstick"] = run_through(made(), broken, str(folder / "yardstick"), limit=SMALLER)
        uninstall = adapter.install(impl, settings=settings_from_environment(OF_TEST | told))
        try:
            found["ours"] = run_through(made(), broken, str(folder / "ours"))
        finally:
            uninstall()
        if checked:
            found["loaded"] = loaded(made(), broken, str(folder / "ours"))
    return found


def loaded(built: Any, broken: Break, folder: str) -> dict[str, list[float]]:
    """What plain verl trains from a checkpoint."""
    replayed = broken.build.get("mode", "disabled") != "disabled"
    curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    with built.train_mode():
        built.train_batch(data_of(0, limit=LIMIT, replayed=replayed), loss)  # Adam has no state before a step
    with loading_into_torchs_adam(built.optimizer):
        built.load_checkpoint(folder, del_local_after_load=False)
    for step in range(BROKEN, BROKEN + AFTER):
        with built.train_mode():
            output = built.train_batch(data_of(step, limit=LIMIT, replayed=replayed), loss)["metrics"]
        for name, values in curve.items():
            values.append(float(np.sum(output[name])))
    return curve


second_loss = functools.partial(after_a_break, Break(call=1))
