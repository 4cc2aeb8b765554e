"""Cases of test_tinyrl.py: a framework that moe_rl does not know, with and without its adapter, on two ranks."""

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tinyrl import Episodes, Trainer
from tinyrl.trainer import policy_gradient
from tinyrl_moe_rl.attach import attach, attach_from_environment

from moe_rl.balancing import BalancerConfig
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron import Balancer
from moe_rl.megatron.on_cpu import cpu_megatron

VOCABULARY, EXPERTS, LAYERS, TOP_K = 48, 8, 3, 2
EPISODES, LONGEST, MICRO_BATCHES = 4, 16, 3
STAY = BalancerConfig(objective="imbalance", replica_slots=2)
MOVE = BalancerConfig(objective="imbalance", replica_slots=1, reorders=True)


class OfTheUserError(Exception):
    """What a user's loss raises."""


@contextlib.contextmanager
def ranks() -> Iterator[None]:
    with cpu_megatron():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        yield


def rollout(step: int, *, recorded: bool = True) -> list[Episodes]:
    """Episodes of this rank; a few experts take most of the tokens, other ones in every micro-batch and layer."""
    shared = np.random.default_rng(step)
    own = np.random.default_rng([step, dist.get_rank()])
    micro_batches = []
    for _ in range(MICRO_BATCHES):
        liking = shared.random((LAYERS, EXPERTS)) ** 4
        lengths = own.integers(LONGEST // 2, LONGEST + 1, EPISODES).tolist()
        noise = own.random((EPISODES, LAYERS, LONGEST, EXPERTS)) * 0.3
        order = np.argsort(-(liking[:, None] + noise), axis=-1)[..., :TOP_K].astype(np.uint8)
        order[:, 0] = 250  # a dense layer's rows hold what memory held before
        tokens = torch.from_numpy(own.integers(1, VOCABULARY, (EPISODES, LONGEST)))
        tokens[torch.arange(LONGEST)[None] >= torch.tensor(lengths)[:, None]] = 0
        picked = [ids[:, : length - 1] for ids, length in zip(order, lengths, strict=True)]
        micro_batches.append(
            Episodes(
                token_grid=tokens,
                num_tokens=lengths,
                advantage=torch.from_numpy(own.standard_normal(EPISODES)).float(),
                picked_experts=picked if recorded else None,
            )
        )
    return micro_batches


def shared_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def published(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The weights of all ranks, as the rollout engine gets them."""
    sent: dict[str, torch.Tensor] = {}
    trainer.publish(lambda name, weights: sent.__setitem__(name, weights.clone()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sent)
    return {name: weights for of_rank in everyone for name, weights in of_rank.items()}


def farthest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def gradients_are_equal() -> dict[str, Any]:
    """Every gradient of two updates, experts at home with two replica slots a rank."""
    gradients: dict[str, list[dict[str, torch.Tensor]]] = {"plain": [], "balanced": []}
    losses: dict[str, list[float]] = {"plain": [], "balanced": []}
    metrics: list[dict[str, float]] = []
    with ranks():
        for kind in gradients:
            trainer = Trainer()

            def keep(trainer: Trainer = trainer, kind: str = kind) -> None:
                named = trainer.policy.named_parameters()
                gradients[kind].append({name: parameter.main_grad.clone() for name, parameter in named})

            trainer.before_step.append(keep)
            if kind == "balanced":
                attach(trainer, STAY, on_metrics=metrics.append)
            for micro_batches in map(rollout, range(2)):
                trainer.score(micro_batches)
                losses[kind].append(trainer.update(micro_batches)["loss"])
    plain, ours = gradients["plain"], gradients["balanced"]
    return {
        "losses": losses,
        "largest": min(max(float(each.abs().max()) for each in step.values()) for step in plain),
        "apart": max(farthest(a, b) for a, b in zip(plain, ours, strict=True)),
        "metrics": metrics[1::2],
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of two rollouts with two updates each left behind."""

    trainer: Trainer
    curve: dict[str, list[float]]
    published: dict[str, torch.Tensor]
    updates: list[dict[str, float]]
    """The balancer's metrics of every update."""
    moved: list[int]
    """How many experts were away from home after each rollout."""


def break_an_update(trainer: Trainer) -> None:
    """Let the loss raise in the second micro-batch; then save and validate, as plain tinyrl can."""
    calls = itertools.count(1)

    def raising(log_probs: torch.Tensor, episodes: Episodes) -> torch.Tensor:
        if next(calls) == 2:
            raise OfTheUserError
        return policy_gradient(log_probs, episodes)

    trainer.loss = raising
    with pytest.raises(OfTheUserError):
        trainer.update(rollout(1))
    trainer.loss = policy_gradient
    trainer.save(shared_folder())
    trainer.validate(rollout(50, recorded=False))


def run_of_two_rollouts(config: BalancerConfig | None, folder: Path) -> Run:
    """Score, update, validate, save and publish; the loss raises once between the rollouts."""
    trainer, metrics, updates = Trainer(), [], []
    balancer = attach(trainer, config, on_metrics=metrics.append) if config else None
    curve: dict[str, list[float]] = {"loss": [], "grad_norm": [], "validation": [], "score": []}
    moved = []
    for step in range(2):
        micro_batches = rollout(step)
        trainer.score(micro_batches)
        curve["score"] += [float(episodes.old_log_probs.mean()) for episodes in micro_batches]
        if step == 1:
            break_an_update(trainer)
        for _ in range(2):
            for name, value in trainer.update(micro_batches).items():
                curve[name].append(value)
            updates += metrics[-1:]
        curve["validation"].append(trainer.validate(rollout(100 + step, recorded=False)))
        if balancer is not None:
            moved.append(away_from_home(balancer))
    trainer.save(folder)
    return Run(trainer=trainer, curve=curve, published=published(trainer), updates=updates, moved=moved)


def away_from_home(balancer: Balancer) -> int:
    return int((balancer.placement.home_rank != balancer.megatron_placement.home_rank).sum())


def a_whole_run() -> dict[str, Any]:
    with ranks():
        plain = run_of_two_rollouts(None, shared_folder())
        folder = shared_folder()
        balanced = run_of_two_rollouts(MOVE, folder)
        going_on = balanced.trainer.update(rollout(7))
        resumed = Trainer()
        resumed.load(folder)  # plain tinyrl reads what the balanced run wrote
        after = resumed.update(rollout(7))
        again = Trainer()
        balancer = attach(again, MOVE)
        again.load(folder)
        homes = away_from_home(balancer)
        from_balanced = again.update(rollout(7))
    return {
        "plain": plain.curve,
        "balanced": balanced.curve,
        "weights": farthest(plain.published, balanced.published),
        "updates": balanced.updates,
        "moved": balanced.moved,
        "homes": homes,
        "next": [going_on, after, from_balanced],
    }


def one_rank_has_routes_of_another_model() -> dict[str, Any]:
    """All ranks raise, none waits, and the run goes on."""
    message = ""
    with ranks():
        trainer = Trainer()
        attach(trainer, MOVE)
        micro_batches = rollout(0)
        if dist.get_rank() == 1:
            micro_batches[2].picked_experts = [ids[:1] for ids in micro_batches[2].picked_experts or ()]
        try:
            trainer.update(micro_batches)
        except InvalidInputError as error:
            message = str(error)
        loss = trainer.update(rollout(0))["loss"]
        return {"message": message, "loss": loss, "plain": Trainer().update(rollout(0))["loss"]}


def switched_on_from_outside() -> dict[str, Any]:
    """By variables alone, for one of two updates."""
    words = {"MOE_RL": "moe-rl", "MOE_RL_OBJECTIVE": "imbalance", "MOE_RL_STRICT": "1", "MOE_RL_UNTIL": "1"}
    with ranks(), pytest.MonkeyPatch.context() as patch:
        losses: dict[str, list[float]] = {"plain": [], "balanced": []}
        metrics = []
        trainer = Trainer()
        without_variable = attach_from_environment(trainer)
        losses["plain"] = [trainer.update(rollout(step))["loss"] for step in range(2)]
        for name, value in words.items():
            patch.setenv(name, value)
        trainer = Trainer()
        megatron_run = attach_from_environment(trainer)
        assert megatron_run is not None
        for step in range(2):
            losses["balanced"].append(trainer.update(rollout(step))["loss"])
            metrics.append(megatron_run.last_metrics)
        megatron_run.detach()
    return {"losses": losses, "metrics": metrics, "nothing": without_variable is None}
