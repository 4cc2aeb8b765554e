"""Cases of test_give_up.py: code inside a pass raises on all ranks, the run saves and goes on, as plain Megatron does.

Every run trains two steps, the third of which breaks off somewhere; then it saves, computes log-probabilities, and
trains the third step once more and two others. Plain Megatron breaks off at the same place.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import cross_node_cases
import drawn
import tiny_gpt
import torch
import torch.distributed as dist
from checkpoint_cases import load, save
from matrix_cases import in_another_order
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from reorder_cases import distance, random_placement, random_residents

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron import Balancer, BalancerConfig, attach
from moe_rl.megatron.expert_state import ExpertOptimizerState

MICRO_BATCHES = 3
BROKEN, STEPS = 2, 5
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
KIND = "fully_reshardable"


class OfTheUserError(Exception):
    """What a user's loss raises."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run that breaks off in several places."""

    parallel: dict[str, int]
    config: BalancerConfig
    build: dict[str, Any] = field(default_factory=dict)
    placement: Callable[[Balancer, int], ExpertPlacement] = random_placement
    by_hand: bool = False
    """Whether the plan fills every replica slot."""

    @property
    def num_ranks(self) -> int:
        return self.parallel["ep_size"] * self.parallel.get("pipeline", 1)

    @property
    def num_layers(self) -> int:
        return int(self.build.get("num_layers", tiny_gpt.NUM_LAYERS))

    def routes(self, step: int) -> list[torch.Tensor]:
        return [tiny_gpt.skewed_routes(step, m, num_layers=self.num_layers) for m in range(MICRO_BATCHES)]


STAGES = {"ep_size": 2, "pipeline": 2}
IN_NODE = BalancerConfig(policy="ultraep", objective="imbalance")
RESIDENTS = BalancerConfig(policy="moe-rl", objective="imbalance", resident_slots=2, ranks_per_node=1, replica_slots=0)
SETTINGS = {
    "replicas": Setting(parallel={"ep_size": 2}, config=IN_NODE),
    "recomputed": Setting(parallel={"ep_size": 2}, config=IN_NODE, build=FULL),
    "residents": Setting(parallel={"ep_size": 2}, config=RESIDENTS, placement=random_residents),
    "residents_recomputed": Setting(parallel={"ep_size": 2}, config=RESIDENTS, placement=random_residents, build=FULL),
    "across_nodes": Setting(
        parallel={"ep_size": 4},
        config=cross_node_cases.CONFIG,
        build={"num_layers": cross_node_cases.LAYERS},
        by_hand=True,
    ),
    "across_nodes_recomputed": Setting(
        parallel={"ep_size": 4},
        config=cross_node_cases.CONFIG,
        build={"num_layers": cross_node_cases.LAYERS} | FULL,
        by_hand=True,
    ),
    "two_stages": Setting(parallel=STAGES, config=IN_NODE, build={"num_layers": 4}),
    "two_stages_recomputed": Setting(parallel=STAGES, config=IN_NODE, build={"num_layers": 4} | FULL),
    "two_stages_residents": Setting(
        parallel=STAGES, config=RESIDENTS, build={"num_layers": 4}, placement=random_residents
    ),
}
ALONE = drawn.combinations({"setting": [name for name in SETTINGS if SETTINGS[name].num_ranks == 2]}, 1, of="alone")


# --- where it breaks: on all ranks alike, before one waits for what another will not send -----------------------------
Breaks = Callable[[int, type[BaseException]], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def in_the_loss(at: int, error: type[BaseException]) -> Iterator[None]:
    """In the loss of micro-batch `at`; in a first stage, which has none, in the step that follows it under 1F1B."""
    original, numbers = tiny_gpt.forward_step, iter(range(MICRO_BATCHES))
    no_loss = not parallel_state.is_pipeline_last_stage()

    def step(*given: Any, **how: Any) -> Any:
        number = next(numbers)
        # The second stage has the activations of `at` by now, and will not ask for others.
        if no_loss and number == at + 1:
            raise error("in a first stage")
        output, mean = original(*given, **how)
        return output, functools.partial(raised, error) if number == at and not no_loss else mean

    with patch.object(tiny_gpt, "forward_step", step):
        yield


def raised(error: type[BaseException], *_: Any) -> Any:
    raise error("in the user's loss")


@contextlib.contextmanager
def before_a_dispatch(at: int, error: type[BaseException]) -> Iterator[None]:
    """In forward of the last MoE layer, when the weights of its copies are on their way."""
    dispatch, calls = MoEAlltoAllTokenDispatcher.dispatch_preprocess, [0]

    def counted(self: Any, *given: Any, **how: Any) -> Any:
        calls[0] += 1
        if calls[0] == tiny_gpt.NUM_LAYERS and number_of_forward() == at:
            raise error("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return dispatch(self, *given, **how)

    with (
        forwards_counted(calls) as number_of_forward,
        patch.object(MoEAlltoAllTokenDispatcher, "dispatch_preprocess", counted),
    ):
        yield


@contextlib.contextmanager
def in_backward(at: int, error: type[BaseException]) -> Iterator[None]:
    """In backward of a layer, when the gradients of its copies are on their way home."""
    route = TopKRouter.forward

    def hooked(self: Any, hidden: torch.Tensor, *given: Any, **how: Any) -> Any:
        if hidden.requires_grad and self.layer_number == 1 and number_of_forward() == at:
            hidden.register_hook(functools.partial(raised, error))
        return route(self, hidden, *given, **how)

    with forwards_counted([0]) as number_of_forward, patch.object(TopKRouter, "forward", hooked):
        yield


@contextlib.contextmanager
def after_the_schedule(at: int, error: type[BaseException]) -> Iterator[None]:
    """When Megatron's schedule has run all micro-batches."""
    schedules = tiny_gpt.get_forward_backward_func

    def raising(**given: Any) -> None:
        schedules()(**given)
        raised(error)

    with patch.object(tiny_gpt, "get_forward_backward_func", lambda: raising):
        yield


@contextlib.contextmanager
def forwards_counted(calls: list[int]) -> Iterator[Callable[[], int]]:
    """Yield what returns the number of the micro-batch that runs, without stages; `calls` begins anew in each."""
    original, begun = tiny_gpt.forward_step, [-1]

    def step(*given: Any, **how: Any) -> Any:
        begun[0] += 1
        calls[0] = 0
        return original(*given, **how)

    with patch.object(tiny_gpt, "forward_step", step):
        yield lambda: begun[0]


PLACES: dict[str, tuple[Breaks, int, type[BaseException]]] = {
    "first loss": (in_the_loss, 0, OfTheUserError),
    "second loss": (in_the_loss, 1, OfTheUserError),
    "last loss": (in_the_loss, MICRO_BATCHES - 1, OfTheUserError),
    "Ctrl-C before a dispatch": (before_a_dispatch, 1, KeyboardInterrupt),
    "memory in the last dispatch": (before_a_dispatch, MICRO_BATCHES - 1, torch.OutOfMemoryError),
    "backward": (in_backward, 0, OfTheUserError),
    "last backward": (in_backward, MICRO_BATCHES - 1, OfTheUserError),
    "end": (after_the_schedule, 0, OfTheUserError),
}
OF_STAGES: dict[str, tuple[Breaks, int, type[BaseException]]] = {
    "first loss": (in_the_loss, 0, OfTheUserError),
    "second loss": (in_the_loss, 1, KeyboardInterrupt),
    "end": (after_the_schedule, 0, OfTheUserError),
}
FEW = ("Ctrl-C before a dispatch", "last backward")
"""Where weights of copies are on their way, and where gradients are."""


@dataclass(frozen=True, kw_only=True)
class ExpertTensors:
    """What a checkpoint has of this rank's experts, in slot order."""

    weights: list[torch.Tensor]
    moments: list[torch.Tensor]
    """Adam's two of each weight, this rank's shard."""

    @classmethod
    def of_run(cls, run: tiny_gpt.Run) -> "ExpertTensors":
        experts = [expert for layer in run.gpt.decoder.layers for expert in layer.mlp.experts.local_experts]
        weights = [weight for expert in experts for _, weight in sorted(expert.named_parameters())]
        state = ExpertOptimizerState(run.optimizer)
        moments = [places[0] for weight in weights for places in state.tensors(weight)[:2]]
        return cls(weights=[w.detach().clone() for w in weights], moments=[m.detach().clone() for m in moments])

    def farthest_weight(self, other: "ExpertTensors") -> float:
        """Return the largest absolute difference of a weight."""
        pairs = zip(self.weights, other.weights, strict=True)
        return max(float((own - theirs).abs().max()) for own, theirs in pairs)


# --- the runs ---------------------------------------------------------------------------------------------------------
def run_through(
    setting: Setting, breaks: Breaks, at: int, error: type[BaseException], *, balanced: bool
) -> dict[str, Any]:
    """Train, break off, save, go on; what a plain run says, and of a balanced one more."""
    run, curve = tiny_gpt.build(**setting.build), tiny_gpt.history()
    balancer = attach(run.models, run.optimizer, setting.config) if balanced else None
    if balancer is not None and not setting.by_hand:
        balancer.reorder(setting.placement(balancer, 1))
    found: dict[str, Any] = {"imbalance": []}

    def step_of(step: int, *, forward_only: bool = False) -> None:
        routes = setting.routes(step)
        if balancer is not None:
            source = PassSource.replayed(routes)
            if setting.by_hand:
                source = PassSource.given(cross_node_cases.plan_by_hand(balancer, routes), routes)
            balancer.begin_pass(source, forward_only=forward_only)
        try:
            if forward_only:
                with torch.no_grad():
                    curve["loss"].append(tiny_gpt.forward_backward(run, step, routes, forward_only=True))
                curve["grad_norm"].append(1.0)
            else:
                tiny_gpt.update(run, step, routes, curve)
        except BaseException:
            if balancer is not None:
                balancer.give_up()
            raise
        if balancer is not None:
            found["imbalance"].append(balancer.end_pass().as_dict()["moe_rl/imbalance"])

    for step in range(BROKEN):
        step_of(step)
    with breaks(at, error):
        try:
            step_of(BROKEN)
        except error as caught:
            found["raised"] = str(caught)
    with balancer.canonical() if balancer is not None else contextlib.nullcontext():
        found["saved"] = ExpertTensors.of_run(run)
    step_of(BROKEN, forward_only=True)
    # What does not fit is left out, as a framework does after an error of memory.
    for step in range(BROKEN + (error is torch.OutOfMemoryError), STEPS):
        step_of(step)
    if balancer is not None:
        balancer.reorder(balancer.megatron_placement)
        balancer.detach()
    return {"curve": curve, **found}


def broken_off(name: str, places: dict[str, tuple[Breaks, int, type[BaseException]]]) -> dict[str, Any]:
    """How a balanced run goes on after each break, beside plain Megatron after the same.

    The yardstick of what is saved is plain Megatron with every micro-batch cut in two.
    """
    setting, results = SETTINGS[name], {}
    with tiny_gpt.parallel(**setting.parallel):
        other_order = tiny_gpt.build(**setting.build)
        in_another_order(other_order, BROKEN, {"num_layers": setting.num_layers})
        yardstick = ExpertTensors.of_run(other_order)
        for place, (breaks, at, error) in places.items():
            plain, ours = (run_through(setting, breaks, at, error, balanced=which) for which in (False, True))
            results[place] = {
                "raised": [plain.get("raised"), ours.get("raised")],
                "plain": plain["curve"],
                "ours": ours["curve"],
                "weights": ours["saved"].farthest_weight(plain["saved"]),
                "moments": distance(ours["saved"].moments, plain["saved"].moments),
                "moments_yardstick": distance(yardstick.moments, plain["saved"].moments),
                "imbalance": ours["imbalance"],
            }
    return results


for _name, _setting in SETTINGS.items():
    _places = (
        OF_STAGES if "pipeline" in _setting.parallel else PLACES | {"end": (after_the_schedule, 0, OfTheUserError)}
    )
    globals()[f"{_name}_everywhere"] = functools.partial(broken_off, _name, _places)
    globals()[_name] = functools.partial(broken_off, _name, {each: PLACES[each] for each in FEW})


def skipped_steps() -> dict[str, Any]:
    """Megatron skips two steps for an infinity: weights stay as they are, and copies of them may."""
    results: dict[str, Any] = {}
    for name in ("replicas", "residents"):
        setting = SETTINGS[name]
        with tiny_gpt.parallel(**setting.parallel):
            for balanced in (False, True):
                run, curve = tiny_gpt.build(), tiny_gpt.history()
                balancer = attach(run.models, run.optimizer, setting.config) if balanced else None
                if balancer is not None:
                    balancer.reorder(setting.placement(balancer, 1))
                for step in range(STEPS):
                    infinity = patch.object(type(run.optimizer), "prepare_grads", lambda _: True)
                    if balancer is not None:
                        balancer.begin_pass(PassSource.replayed(setting.routes(step)))
                    run.model.zero_grad_buffer()
                    run.optimizer.zero_grad()
                    curve["loss"].append(tiny_gpt.forward_backward(run, step, setting.routes(step)))
                    with infinity if step in (1, 2) else contextlib.nullcontext():
                        stepped, norm, _ = run.optimizer.step()
                    curve["grad_norm"].append(float(norm) if stepped else 1.0)
                    if balancer is not None:
                        balancer.end_pass()
                results.setdefault(name, []).append(curve)
    return results


def checkpoint_after_a_break() -> dict[str, Any]:
    """Saved by Megatron right after the loss has raised, homes moved; plain Megatron loads it and goes on."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    setting = SETTINGS["replicas"]
    with tiny_gpt.parallel(**setting.parallel):
        curves = {}
        run = tiny_gpt.build()
        curves["plain"] = tiny_gpt.train(run, steps=STEPS, micro_batches=MICRO_BATCHES)
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, setting.config)
        balancer.reorder(random_placement(balancer, 1))
        for step in range(BROKEN):
            balancer.begin_pass(PassSource.replayed(setting.routes(step)))
            tiny_gpt.update(run, step, setting.routes(step), tiny_gpt.history())
            balancer.end_pass()
        balancer.begin_pass(PassSource.replayed(setting.routes(BROKEN)))
        with in_the_loss(1, OfTheUserError), contextlib.suppress(OfTheUserError):
            tiny_gpt.update(run, BROKEN, setting.routes(BROKEN), tiny_gpt.history())
        balancer.give_up()
        with balancer.canonical():
            save(run, shared[0], KIND)
        run, curves["loaded"] = tiny_gpt.build(), tiny_gpt.history()
        tiny_gpt.update(run, 0, setting.routes(0), tiny_gpt.history())  # Adam's state is there only after a step
        load(run, shared[0], KIND)
        for step in range(BROKEN, STEPS):
            tiny_gpt.update(run, step, setting.routes(step), curves["loaded"])
    curves["plain"] = {name: values[BROKEN:] for name, values in curves["plain"].items()}
    return curves
