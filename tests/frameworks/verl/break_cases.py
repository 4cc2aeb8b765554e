"""Cases of test_give_up.py: an update of verl's engine whose loss raises on all ranks; the worker saves and goes on.

Which exception, at which micro-batch and in what kind of run is drawn anew every day.
"""

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import drawn
import numpy as np
import torch
import verl_on_cpu
from checkpoint_cases import loading_into_torchs_adam
from fault_cases import FOLDER, told
from give_up_cases import FULL, OfTheUserError
from megatron.core import parallel_state
from verl_cases import MOVES_ARE_FREE, OF_TEST, final_weights, log_probs, moved
from verl_on_cpu import batch, engine, impl, loss

from moe_rl.frameworks.run_settings import settings_from_environment
from moe_rl.frameworks.verl import attach as adapter

SEQUENCES, LIMIT, SMALLER = 8, 120, 80
"""Tokens of a micro-batch at most, and in the yardstick: plain verl, whose sums are taken otherwise."""
BROKEN, AFTER = 2, 3
NODES_OF_ONE_RANK = {"MOE_RL_RANKS_PER_NODE": "1"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What kind of run breaks off."""

    variables: dict[str, str] = field(default_factory=dict)
    """Variables of the balanced run, beside those of every one."""
    build: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> contextlib.AbstractContextManager[None]:
        """What a run is inside of: verl puts parameters away only where it sees a device."""
        if self.build.get("param_offload"):
            return verl_on_cpu.host_beside_device()
        return contextlib.nullcontext()

    @property
    def replayed(self) -> bool:
        return "mode" in self.build

    @property
    def stages(self) -> int:
        return int(self.build.get("pipeline_model_parallel_size", 1))


SETTINGS = {
    "everything": Setting(variables=NODES_OF_ONE_RANK),
    "inside a node": Setting(variables={"MOE_RL_RANKS_PER_NODE": "2"}),
    "residents": Setting(variables=NODES_OF_ONE_RANK | {"MOE_RL_CROSS_NODE_SLOTS": "0", "MOE_RL_REPLICA_SLOTS": "0"}),
    "across nodes": Setting(variables=NODES_OF_ONE_RANK | {"MOE_RL_RESIDENT_SLOTS": "0"}),
    "recomputed": Setting(variables=NODES_OF_ONE_RANK, build={"transformer": FULL}),
    "replayed": Setting(variables=NODES_OF_ONE_RANK, build={"mode": "R3"}),
    # The exception leaves verl's `train_mode`, which puts parameters away: weights of copies may be on their way.
    "offloaded": Setting(variables=NODES_OF_ONE_RANK, build={"param_offload": True, "optimizer_offload": True}),
}
STAGES = Setting(variables=NODES_OF_ONE_RANK, build={"pipeline_model_parallel_size": 2, "num_layers": 4})
ERRORS: dict[str, type[BaseException]] = {
    "loss": OfTheUserError,
    "memory": torch.OutOfMemoryError,
    "Ctrl-C": KeyboardInterrupt,
}
AXES: dict[str, Any] = {"error": tuple(ERRORS), "call": (0, 1, 2), "setting": tuple(SETTINGS)}
DRAWN = drawn.combinations(AXES, 5, of="verl")
OF_STAGES = drawn.combinations({"error": tuple(ERRORS), "call": (0, 1)}, 1, of="verl's stages")
ALONE = drawn.combinations({"setting": tuple(SETTINGS)}, 1, of="verl, one rank alone")


def data_of(step: int, *, limit: int, setting: Setting) -> Any:
    sizes = tuple(np.random.default_rng(step).integers(20, 60, SEQUENCES).tolist())
    budget = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": limit,
        "enable_routing_replay": setting.replayed,
        "num_layers": setting.build.get("num_layers", verl_on_cpu.NUM_LAYERS),
    }
    return batch(step, sizes, routes=setting.replayed, **budget)


def raising_at(call: int, error: type[BaseException]) -> Callable[..., Any]:
    """verl's loss function, which raises when it is called for the `call`-th micro-batch."""
    calls = iter(range(1000))

    def raising(*given: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise error("in the user's loss")
        return loss(*given, **named)

    return raising


@contextlib.contextmanager
def first_stages_raising_at(call: int, error: type[BaseException]) -> Iterator[None]:
    """A first stage has no loss: under 1F1B it raises in the step after `call`, when the next stage has its share."""
    step, calls = impl.MegatronEngineWithLMHead.forward_step, iter(range(1000))

    def raising(*given: Any, **named: Any) -> Any:
        if next(calls) == call + 1:
            raise error("in the user's loss")
        return step(*given, **named)

    with contextlib.ExitStack() as stack:
        if not parallel_state.is_pipeline_last_stage():
            stack.enter_context(patch.object(impl.MegatronEngineWithLMHead, "forward_step", raising))
        yield


class Run:
    """An engine in steps of a log-prob pass and an update."""

    def __init__(self, built: Any, setting: Setting, *, limit: int = LIMIT) -> None:
        self.built, self._setting, self._limit = built, setting, limit
        self.curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self.metrics: list[dict[str, float]] = []

    def log_probs(self, step: int) -> None:
        log_probs(self.built, data_of(step, limit=self._limit, setting=self._setting))

    def update(self, step: int, with_loss: Callable[..., Any] = loss) -> None:
        data = data_of(step, limit=self._limit, setting=self._setting)
        with self.built.train_mode():
            output = self.built.train_batch(data, with_loss).get("metrics", {})  # of the last stage
        for name, values in self.curve.items():
            values += [float(np.sum(output[name]))] if name in output else []
        run = adapter.run_of(self.built)
        if run is not None:
            self.metrics.append(run.last_metrics)

    def forget(self) -> None:
        self.curve = {"loss": [], "grad_norm": []}

    def broken_off(self, call: int, error: type[BaseException], folder: str) -> dict[str, Any]:
        """Steps, one of which breaks off; then verl's own checkpoint and export, and more steps."""
        found: dict[str, Any] = {}
        for step in range(BROKEN + 1):
            self.log_probs(step)
            if step < BROKEN:
                self.update(step)
        try:
            with first_stages_raising_at(call, error):
                self.update(BROKEN, raising_at(call, error))
        except error as caught:
            found["raised"] = str(caught)
        found["moved"] = sum(moved(self.built).values())
        self.built.save_checkpoint(folder, global_step=BROKEN)
        found["exported"] = len([name for name in final_weights(self.built) if name.startswith("exported")])
        self.forget()
        for step in range(BROKEN, BROKEN + AFTER):
            self.log_probs(step)
            self.update(step)
        return found | {"after": self.curve, "metrics": self.metrics}


def made(setting: Setting) -> Any:
    built = engine(**({"mode": "disabled", "ep_size": 2, "lr": 1e-6, "common": 1.0} | setting.build))
    built.checkpoint_mananager.use_dist_checkpointing = True
    return built


@contextlib.contextmanager
def balancing(setting: Setting) -> Iterator[None]:
    variables = {"MOE_RL": "moe-rl", "MOE_RL_PACK": "false"} | MOVES_ARE_FREE | setting.variables
    uninstall = adapter.install(impl, settings=settings_from_environment(OF_TEST | variables))
    try:
        yield
    finally:
        uninstall()


def shared_folder() -> Path:
    shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(shared)
    return Path(shared[0])


def after_a_break(combination: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """Plain verl, the balanced run and the yardstick, each after the same error; and a plain run of the checkpoint."""
    folder, break_ = shared_folder(), (combination["call"], ERRORS[combination["error"]])
    found: dict[str, Any] = {"combination": dict(combination)}
    with verl_on_cpu.verl_on_cpu(), setting.device:
        found["plain"] = Run(made(setting), setting).broken_off(*break_, str(folder / "plain"))
        smaller = Run(made(setting), setting, limit=SMALLER)
        found["yardstick"] = smaller.broken_off(*break_, str(folder / "yardstick"))
        with balancing(setting):
            found["ours"] = Run(made(setting), setting).broken_off(*break_, str(folder / "ours"))
        found["loaded"] = loaded(setting, str(folder / "ours"))
    return found


def loaded(setting: Setting, folder: str) -> dict[str, list[float]]:
    """What plain verl trains from a checkpoint."""
    run = Run(made(setting), setting)
    run.update(0)  # Adam has no state before a step
    with loading_into_torchs_adam(run.built.optimizer):
        run.built.load_checkpoint(folder, del_local_after_load=False)
    run.forget()
    for step in range(BROKEN, BROKEN + AFTER):
        run.update(step)
    return run.curve


def drawn_case(number: int) -> dict[str, Any]:
    return after_a_break(DRAWN[number], SETTINGS[DRAWN[number]["setting"]])


for _number in range(len(DRAWN)):
    globals()[f"drawn_{_number}"] = functools.partial(drawn_case, _number)
two_stages = functools.partial(after_a_break, OF_STAGES[0], STAGES)


def raises_alone(*, balanced: bool) -> None:
    """Rank 1's loss raises. It saves at once what it holds, and ends; then the other one waits for it no more."""
    setting = SETTINGS[ALONE[0]["setting"]]
    with verl_on_cpu.verl_on_cpu(), setting.device, balancing(setting) if balanced else contextlib.nullcontext():
        run = Run(made(setting), setting)
        for step in (0, 1):
            run.log_probs(step)
            if step == 0:
                run.update(step)
        if torch.distributed.get_rank() == 0:
            with told():
                run.update(1)
            return
        try:
            run.update(1, raising_at(1, OfTheUserError))
        except OfTheUserError:
            # Not by a checkpoint, and not with experts at home: both ask the other rank.
            weights = {name: value.detach() for name, value in run.built.module[0].named_parameters()}
            attached = adapter.run_of(run.built)
            homes = attached.balancer.placement.home_rank if attached is not None else None
            torch.save({"weights": weights, "homes": homes}, Path(os.environ[FOLDER]) / "of_rank_1.pt")
            raise


alone_in_verl = functools.partial(raises_alone, balanced=False)
alone_balanced = functools.partial(raises_alone, balanced=True)
