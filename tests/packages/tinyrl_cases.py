"""Cases of test_tinyrl.py: a framework that moe_rl does not know, with and without its adapter, on two ranks."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tinyrl import Episodes, Trainer
from tinyrl.trainer import policy_gradient
from tinyrl_moe_rl.attach import attach

from moe_rl.balancing import BalancerConfig
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron.on_cpu import cpu_megatron

VOCABULARY, EXPERTS, LAYERS, TOP_K = 48, 8, 3, 2
EPISODES, LONGEST, MICRO_BATCHES = 4, 24, 4
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
    """Every gradient of three updates, experts at home with two replica slots a rank."""
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
            for micro_batches in map(rollout, range(3)):
                trainer.score(micro_batches)
                losses[kind].append(trainer.update(micro_batches)["loss"])
    plain, ours = gradients["plain"], gradients["balanced"]
    return {
        "losses": losses,
        "largest": min(max(float(each.abs().max()) for each in step.values()) for step in plain),
        "apart": max(farthest(a, b) for a, b in zip(plain, ours, strict=True)),
        "metrics": metrics[1::2],
    }


def lived(config: BalancerConfig | None, folder: Path, breaks: Callable[[Trainer], None] | None = None) -> Any:
    """What a run of two rollouts with two updates each did: scored, validated, saved and published in between."""
    trainer, metrics = Trainer(), []
    balancer = attach(trainer, config, on_metrics=metrics.append) if config else None
    curve: dict[str, list[float]] = {"loss": [], "grad_norm": [], "validation": [], "score": []}
    moved = []
    for step in range(2):
        micro_batches = rollout(step)
        trainer.score(micro_batches)
        curve["score"] += [float(each.old_log_probs.mean()) for each in micro_batches]
        for update in range(2):
            if breaks is not None and (step, update) == (1, 0):
                breaks(trainer)
            for name, value in trainer.update(micro_batches).items():
                curve[name].append(value)
        curve["validation"].append(trainer.validate(rollout(100 + step, recorded=False)))
        if balancer is not None:
            moved.append(int((balancer.placement.home_rank != balancer.megatron_placement.home_rank).sum()))
    trainer.save(folder)
    weights = published(trainer)
    return trainer, curve, weights, metrics, moved


def a_whole_run() -> dict[str, Any]:
    with ranks():
        folders = [shared_folder(), shared_folder()]
        _, plain, weights, _, _ = lived(None, folders[0])
        trainer, ours, own_weights, metrics, moved = lived(MOVE, folders[1])
        going_on = trainer.update(rollout(7))
        resumed = Trainer()
        resumed.load(folders[1])  # plain tinyrl reads what the balanced run wrote
        after = resumed.update(rollout(7))
        again = Trainer()
        balancer = attach(again, MOVE)
        again.load(folders[1])
        homes = int((balancer.placement.home_rank != balancer.megatron_placement.home_rank).sum())
        from_balanced = again.update(rollout(7))
    return {
        "plain": plain,
        "ours": ours,
        "weights": farthest(weights, own_weights),
        "metrics": metrics,
        "moved": moved,
        "homes": homes,
        "next": [going_on, after, from_balanced],
    }


def a_loss_raises() -> dict[str, Any]:
    """In the third micro-batch of an update; the run saves, validates and updates anew, as plain tinyrl does."""
    caught = []

    def breaks(trainer: Trainer) -> None:
        calls = [0]

        def raising(log_probs: torch.Tensor, episodes: Episodes) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 3:
                raise OfTheUserError
            return policy_gradient(log_probs, episodes)

        trainer.loss = raising
        try:
            trainer.update(rollout(1))
        except OfTheUserError:
            caught.append(True)
        trainer.loss = policy_gradient
        trainer.save(shared_folder())
        trainer.validate(rollout(50, recorded=False))

    with ranks():
        _, plain, weights, _, _ = lived(None, shared_folder(), breaks)
        _, ours, own_weights, metrics, moved = lived(MOVE, shared_folder(), breaks)
    return {
        "caught": len(caught),
        "plain": plain,
        "ours": ours,
        "weights": farthest(weights, own_weights),
        "metrics": metrics,
        "moved": moved,
    }


def one_rank_has_routes_of_another_model() -> dict[str, Any]:
    """All ranks hear of it, none waits, and the run goes on."""
    said = ""
    with ranks():
        trainer = Trainer()
        attach(trainer, MOVE)
        micro_batches = rollout(0)
        if dist.get_rank() == 1:
            micro_batches[2].picked_experts = [ids[:1] for ids in micro_batches[2].picked_experts or ()]
        try:
            trainer.update(micro_batches)
        except InvalidInputError as error:
            said = str(error)
        loss = trainer.update(rollout(0))["loss"]
        return {"said": said, "loss": loss, "plain": Trainer().update(rollout(0))["loss"]}
