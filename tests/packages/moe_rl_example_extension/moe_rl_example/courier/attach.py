"""Balances Courier's updates: what its micro-batches say before a pass, and the two calls around it."""

from collections.abc import Callable, Sequence
from typing import Any

from moe_rl.balancing import PassSource, SequenceRows
from moe_rl.core.model import MoeModelSpec
from moe_rl.frameworks.routes import of_moe_layers

ForwardBackward = Callable[[Sequence[dict[str, Any]]], Any]


def source_of(micro_batches: Sequence[dict[str, Any]], model: MoeModelSpec) -> PassSource:
    """Return what Courier knows: the tokens of every sequence and, if they are replayed, their routes."""
    sequences = [SequenceRows.of_tokens(batch["tokens"]) for batch in micro_batches]
    if any(batch.get("routes") is None for batch in micro_batches):
        return PassSource.expected(sequences)
    return PassSource.replayed([of_moe_layers(batch["routes"], model) for batch in micro_batches], sequences)


def balanced(forward_backward: ForwardBackward, balancer: Any, *, forward_only: bool = False) -> ForwardBackward:
    """Return Courier's function with every call planned; `balancer` is what `moe_rl.megatron.attach` returned."""

    def planned(micro_batches: Sequence[dict[str, Any]]) -> Any:
        balancer.begin_pass(source_of(micro_batches, balancer.model), forward_only=forward_only)
        try:
            losses = forward_backward(micro_batches)
        except BaseException:
            balancer.give_up()  # the other ranks may never come to end_pass, which is a collective
            raise
        balancer.end_pass()
        return losses

    return planned
