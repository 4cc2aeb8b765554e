"""Balances a tinyrl trainer. B episodes of S tokens, L MoE layers, K choices, N = S * B rows in Megatron's order.

balancer = attach(trainer, BalancerConfig(reorders=True))
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from tinyrl import Episodes, Trainer

from moe_rl.balancing import BalancerConfig, PassSource, SequenceRows
from moe_rl.balancing.exchange import agreed
from moe_rl.core.model import MoeModelSpec
from moe_rl.frameworks.routes import of_moe_layers, with_missing_last_rows
from moe_rl.megatron import Balancer, RowSlice, padded_rows, restore_placement, save_placement
from moe_rl.megatron import attach as attach_to_megatron
from tinyrl_moe_rl.contract import FRAMEWORK

Metrics = Callable[[dict[str, float]], object]


def attach(trainer: Trainer, config: BalancerConfig, *, on_metrics: Metrics = lambda metrics: None) -> Balancer:
    """Balance every pass of the trainer, and bring experts home for all that reads or writes weights; a collective."""
    agreed(FRAMEWORK.check)
    balancer = attach_to_megatron([trainer.model], trainer.optimizer, config)
    trainer.run_micro_batches = _planned(trainer.run_micro_batches, balancer, on_metrics)  # type: ignore[method-assign]
    save, load = trainer.save, trainer.load

    def saved(folder: Path) -> None:
        with balancer.canonical():
            save(folder)
        save_placement(balancer, folder)

    def loaded(folder: Path) -> None:
        with balancer.canonical():
            load(folder)
        restore_placement(balancer, folder)

    trainer.save, trainer.load = saved, loaded  # type: ignore[method-assign]
    at_home = functools.partial(balancer.canonical, weights_only=True)
    trainer.publish = _inside(at_home, trainer.publish)  # type: ignore[method-assign]
    return balancer


def source_of(micro_batches: Sequence[Episodes], model: MoeModelSpec, *, replays: bool) -> PassSource:
    """Return what tinyrl knows before a pass: its episodes and, if they are replayed, their routes."""
    sequences = [_sequence_rows(episodes) for episodes in micro_batches]
    if not replays or any(episodes.picked_experts is None for episodes in micro_batches):
        return PassSource.expected(sequences)
    return PassSource.replayed([_routes(episodes, model) for episodes in micro_batches], sequences)


def _routes(episodes: Episodes, model: MoeModelSpec) -> Any:
    """Return [N, L, K]; the last token of an episode, and what fills it up, tinyrl sends to experts 0 .. K-1.

    With -1 there the plan would lack these rows, a quarter of all, and -1 is what the pages ask for.
    """
    length = episodes.token_grid.shape[1]
    by_token = [np.moveaxis(picked, 0, 1) for picked in episodes.picked_experts or ()]
    padded = np.stack([with_missing_last_rows(of_moe_layers(ids, model), length) for ids in by_token])
    filled = np.where(padded < 0, np.arange(model.top_k), padded)
    return padded_rows(filled, where=RowSlice.current())


def _sequence_rows(episodes: Episodes) -> SequenceRows:
    """Return which episode every row is of: row s * B + b is token s of episode b."""
    num_tokens, length = np.array(episodes.num_tokens), episodes.token_grid.shape[1]
    tokens = [row[:count] for row, count in zip(episodes.token_grid, num_tokens, strict=True)]
    is_token = np.arange(length)[:, None] < num_tokens
    return SequenceRows.of_tokens(tokens, np.where(is_token, np.arange(len(tokens)), -1))


def _planned(run: Callable[..., Any], balancer: Balancer, on_metrics: Metrics) -> Callable[..., Any]:
    @functools.wraps(run)
    def planned(micro_batches: Sequence[Episodes], *, trains: bool, replays: bool = True) -> Any:
        # A rank that cannot read its routes must not leave the others waiting in begin_pass.
        source = agreed(lambda: source_of(micro_batches, balancer.model, replays=replays))
        balancer.begin_pass(source, forward_only=not trains)
        try:
            results = run(micro_batches, trains=trains, replays=replays)
        except BaseException:
            balancer.give_up()
            raise
        on_metrics(balancer.end_pass().as_dict())
        return results

    return planned


def _inside(context: Callable[[], AbstractContextManager[None]], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*given: Any, **named: Any) -> Any:
        with context():
            return function(*given, **named)

    return inside
