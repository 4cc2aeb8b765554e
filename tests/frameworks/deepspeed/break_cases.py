"""Cases of test_give_up.py: a cycle of DeepSpeed that breaks off, and how the run goes on; which, is drawn every day.

Plain is DeepSpeed's own layers, less the replay (`ds_cases.plainly`), after the same break.
"""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import drawn
import torch
import torch.distributed as dist
from ds_cases import CONFIG, MOVING, STATIC, OfTheUserError, adapter, auto_ep_layer, built, model_of, moved, plainly
from tiny_hf import MICRO_BATCHES, NUM_LAYERS, micro_batches, tokens

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.pass_source import PassSource

FOLDER = "MOE_RL_TEST_CHECKPOINTS"
"""Environment variable with a folder that outlives the launch."""
ERRORS: dict[str, type[BaseException]] = {
    "loss": OfTheUserError,
    "memory": torch.OutOfMemoryError,
    "Ctrl-C": KeyboardInterrupt,
}
BROKEN, CYCLES = 1, 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What kind of run breaks off."""

    config: BalancerConfig
    moves: bool = False
    checkpoints: bool = False
    """Whether layers run again in backward."""

    def engine(self, stage: int) -> Any:
        model = model_of()
        if self.checkpoints:
            model.gradient_checkpointing_enable()
        return built(model, stage=stage)


SETTINGS = {
    "replicas": Setting(config=CONFIG),
    "moved": Setting(config=MOVING, moves=True),
    "recomputed": Setting(config=MOVING, moves=True, checkpoints=True),
}
AXES: dict[str, Any] = {
    "error": tuple(ERRORS),
    "micro_batch": tuple(range(MICRO_BATCHES)),
    "place": ("loss", "dispatch"),
    "setting": tuple(SETTINGS),
    "stage": (1, 2),
}
DRAWN = drawn.combinations(AXES, 6, of="DeepSpeed")


@contextlib.contextmanager
def last_layer_raising(error: type[BaseException]) -> Iterator[None]:
    """In forward of the last MoE layer, when the weights of its copies are on their way."""
    permute, calls = auto_ep_layer.permute_by_local_expert, iter(range(1, 1000))

    def raising(*given: Any) -> Any:
        if next(calls) == NUM_LAYERS:
            raise error("in a layer")
        return permute(*given)

    with patch.object(auto_ep_layer, "permute_by_local_expert", raising):
        yield


class Run:
    """An engine in accumulation cycles, each a pass."""

    def __init__(self, setting: Setting, config: BalancerConfig, *, stage: int) -> None:
        self.engine, plain = setting.engine(stage), config is STATIC
        self.balancer = adapter.attach(self.engine, config)
        self.curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self.metrics: list[dict[str, float]] = []
        if plain:
            plainly(self.engine)
        elif setting.moves:
            self.balancer.reorder(moved(self.balancer, 3))

    def cycle(self, step: int, *, begin: int = 0, broken: Mapping[str, Any] | None = None) -> None:
        """Train the micro-batches from `begin` on; one of them breaks off."""
        self.balancer.begin_pass(PassSource.replayed(micro_batches(step, unknown=False)[begin:]))
        for micro_batch in range(begin, MICRO_BATCHES):
            breaks = broken is not None and broken["micro_batch"] == micro_batch
            self._train(step, micro_batch, broken if breaks else None)
        self.curve["grad_norm"].append(float(self.engine.get_global_grad_norm()))
        self.metrics.append(self.balancer.end_pass().as_dict())

    def _train(self, step: int, micro_batch: int, broken: Mapping[str, Any] | None) -> None:
        ids, guard = tokens(step, micro_batch), contextlib.nullcontext()
        if broken is not None and broken["place"] == "dispatch":
            guard = last_layer_raising(ERRORS[broken["error"]])  # type: ignore[assignment]
        with guard:
            loss = self.engine(input_ids=ids, labels=ids).loss
        if broken is not None:
            raise ERRORS[broken["error"]]("in the user's loss")
        self.engine.backward(loss)
        self.curve["loss"].append(loss.item())
        self.engine.step()

    def broken_off(self, combination: Mapping[str, Any], folder: str) -> dict[str, Any]:
        """Break off in the second cycle, save, take the rest of the cycle as another pass, go on."""
        raised = ""
        self.cycle(0)
        try:
            self.cycle(BROKEN, broken=combination)
        except ERRORS[combination["error"]] as error:
            raised = str(error)
            self.balancer.give_up()
        self.engine.save_checkpoint(folder, tag="one")
        self.cycle(BROKEN, begin=combination["micro_batch"])
        for step in range(BROKEN + 1, CYCLES):
            self.cycle(step)
        return {"raised": raised, "curve": self.curve, "metrics": self.metrics}


def shared_folder() -> str:
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    return str(shared[0])


def drawn_case(number: int) -> dict[str, Any]:
    """Plain DeepSpeed and the balanced run after a break; plain DeepSpeed that loads what was saved, or never broke."""
    combination, folder = DRAWN[number], shared_folder()
    setting, stage = SETTINGS[combination["setting"]], combination["stage"]
    found: dict[str, Any] = {"combination": combination}
    for name, config in (("plain", STATIC), ("ours", setting.config)):
        found[name] = Run(setting, config, stage=stage).broken_off(combination, f"{folder}/{name}")
    unbroken, loads = Run(setting, STATIC, stage=stage), Run(setting, STATIC, stage=stage)
    unbroken.cycle(0)
    dist.barrier()
    loads.engine.load_checkpoint(f"{folder}/ours", tag="one")
    for name, run in (("unbroken", unbroken), ("loaded", loads)):
        run.curve = {"loss": [], "grad_norm": []}
        for step in range(BROKEN, CYCLES):
            run.cycle(step)
        found[name] = run.curve
    return found


for _number in range(len(DRAWN)):
    globals()[f"drawn_{_number}"] = functools.partial(drawn_case, _number)


def raises_alone(*, balanced: bool) -> None:
    """Rank 1's loss raises. It saves at once what it holds, and ends; then the other one waits for it no more."""
    setting = SETTINGS[DRAWN[0]["setting"]]
    run = Run(setting, setting.config if balanced else STATIC, stage=1)
    run.cycle(0)
    if dist.get_rank() == 0:
        try:
            run.cycle(1)
        except RuntimeError as error:
            raise RuntimeError(f"rank 0 was told: {error}") from error
    try:
        run.cycle(1, broken={"error": "loss", "micro_batch": 1, "place": "loss"})
    except OfTheUserError:
        run.balancer.give_up()
        weights = {name: value.detach() for name, value in run.engine.module.named_parameters()}
        torch.save(
            {"weights": weights, "homes": run.balancer.placement.home_rank}, f"{os.environ[FOLDER]}/of_rank_1.pt"
        )
        raise


alone_in_deepspeed = functools.partial(raises_alone, balanced=False)
alone_balanced = functools.partial(raises_alone, balanced=True)
