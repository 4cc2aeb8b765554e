"""Balances a tinyrl trainer. B episodes of S tokens, L MoE layers, K choices, N = S * B rows in Megatron's order.

balancer = attach(trainer, BalancerConfig(reorders=True))    # or, as MOE_RL and its companions say:
megatron_run = attach_from_environment(trainer)
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tinyrl import Episodes, Trainer

from moe_rl.frameworks import (
    BalancerConfig,
    MegatronRun,
    MoeModelSpec,
    PassSource,
    agreed,
    of_moe_layers,
    settings_from_environment,
    with_missing_last_rows,
)
from moe_rl.megatron import Balancer, RowSlice, padded_rows, padded_sequences, restore_placement, save_placement
from moe_rl.megatron import attach as attach_to_megatron
from tinyrl_moe_rl.contract import FRAMEWORK

Metrics = Callable[[dict[str, float]], object]


def attach(trainer: Trainer, config: BalancerConfig, *, on_metrics: Metrics = lambda metrics: None) -> Balancer:
    """Balance every pass, and bring experts home for all that reads or writes weights; a collective of all ranks."""
    agreed(FRAMEWORK.check)
    balancer = attach_to_megatron([trainer.model], trainer.optimizer, config)
    trainer.run_micro_batches = balanced(trainer.run_micro_batches, balancer, on_metrics)
    save, load, publish = trainer.save, trainer.load, trainer.publish

    def save_from_home(folder: Path) -> None:
        # tinyrl saves torch's Adam inside Megatron's optimizer, which raises nothing while experts are away.
        with balancer.canonical():
            save(folder)
        save_placement(balancer, folder)

    def load_at_home(folder: Path) -> None:
        with balancer.canonical():
            load(folder)
        restore_placement(balancer, folder)

    def publish_from_home(send: Callable[[str, torch.Tensor], Any]) -> None:
        # It reads `named_parameters()`, which raises nothing either. The optimizer's state can stay away.
        with balancer.canonical(weights_only=True):
            publish(send)

    trainer.save, trainer.load, trainer.publish = save_from_home, load_at_home, publish_from_home
    return balancer


def source_of(micro_batches: Sequence[Episodes], model: MoeModelSpec, *, replays: bool) -> PassSource:
    """Return what tinyrl knows before a pass: its episodes and, if they are replayed, their routes."""
    row_slice = RowSlice.current()
    sequences = [
        padded_sequences(episodes.token_grid, row_slice=row_slice, attention_mask=episodes.is_token)
        for episodes in micro_batches
    ]
    if not replays or any(episodes.picked_experts is None for episodes in micro_batches):
        return PassSource.expected(sequences)
    routes = [padded_rows(routes_of(episodes, model), row_slice=row_slice) for episodes in micro_batches]
    return PassSource.replayed(routes, sequences)


def routes_of(episodes: Episodes, model: MoeModelSpec) -> NDArray[np.signedinteger]:
    """Return [B, S, L, K]. The last token of an episode, and padding, have no route: tinyrl runs experts 0 .. K-1.

    These ids are as good as routes, so the plan is exact. If the router decided there, they would stay -1.
    """
    length = episodes.token_grid.shape[1]
    by_token = [np.moveaxis(picked, 0, 1) for picked in episodes.picked_experts or ()]
    padded = np.stack([with_missing_last_rows(of_moe_layers(ids, model), length) for ids in by_token])
    return np.where(padded < 0, np.arange(model.top_k), padded)


def balanced(run: Callable[..., Any], balancer: Balancer, on_metrics: Metrics) -> Callable[..., Any]:
    """Return `run` with every call planned: scoring, validation (forward only) and updates.

    tinyrl zeroes gradients before it calls `run`. Nothing else may touch weights or gradients inside a pass.
    """

    @functools.wraps(run)
    def planned(micro_batches: Sequence[Episodes], *, trains: bool, replays: bool = True) -> Any:
        # `agreed`: if one rank cannot read its routes, all raise. Else the others would wait for it in begin_pass.
        source = agreed(lambda: source_of(micro_batches, balancer.model, replays=replays))
        balancer.begin_pass(source, forward_only=not trains)
        try:
            results = run(micro_batches, trains=trains, replays=replays)
        except BaseException:
            balancer.give_up()  # the other ranks may never come to end_pass, which is a collective
            raise
        on_metrics(balancer.end_pass().as_dict())
        return results

    return planned


def attach_from_environment(trainer: Trainer) -> MegatronRun | None:
    """Balance as MOE_RL, MOE_RL_UNTIL and the other variables say; without MOE_RL nothing changes; a collective.

    Experts stay at home. With `guarded=True` they move, and `attach` above shows what an adapter then has to guard.
    """
    settings = settings_from_environment()
    if settings is None:
        return None
    megatron_run = MegatronRun.attach(FRAMEWORK, [trainer.model], trainer.optimizer, settings)
    run = trainer.run_micro_batches

    def planned(micro_batches: Sequence[Episodes], *, trains: bool, replays: bool = True) -> Any:
        call = functools.partial(run, micro_batches, trains=trains, replays=replays)
        balancer = megatron_run.balancer
        source = None  # nothing to balance, or over by MOE_RL_UNTIL: it still records, checks and measures
        if balancer is not None:
            source = agreed(lambda: source_of(micro_batches, balancer.model, replays=replays))
        return megatron_run.around(call, source, forward_only=not trains)

    trainer.run_micro_batches = planned
    return megatron_run
