"""Cases of test_rollouts.py: RL steps of bare Megatron without replay, a log-prob pass before two updates."""

from typing import Any
from unittest.mock import patch

import tiny_gpt
import torch
from feed_cases import live

from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.megatron import BalancerConfig, RowSlice, attach, padded_sequences

ROLLOUTS, MICRO_BATCHES = 3, 4
TOKENS_OF = tiny_gpt.tokens_of
CONFIG = BalancerConfig(objective="imbalance", cross_node_slots=1, ranks_per_node=2, reorders=True)


def held(step: int, micro_batch: int) -> SequenceRows:
    """The rows of this rank: [S, B], of which a tensor-parallel rank has a part."""
    return padded_sequences(tiny_gpt.tokens_of(step, micro_batch)[:, :-1], row_slice=RowSlice.current())


def like_some(gpt: Any) -> None:
    """Let all tokens have something in common that routers like in some experts."""
    with torch.no_grad():
        if hasattr(gpt, "embedding"):
            gpt.embedding.word_embeddings.weight += 0.1
        for layer in gpt.decoder.layers:
            layer.mlp.router.weight += torch.linspace(0.02, -0.02, tiny_gpt.NUM_EXPERTS)[:, None]


def rollouts(**parallel: int) -> dict[str, Any]:
    """Curves with and without a balancer; the log-prob pass runs the micro-batches in another order.

    A third run is only observed: "observed" and "would_be".
    """
    layers = {"num_layers": 4} if parallel.get("pipeline", 1) > 1 else {}
    found: dict[str, Any] = {"metrics": [], "sources": [], "would_be": []}
    ep_size = 4 // parallel.get("pipeline", 1)
    config = CONFIG.with_words(ranks_per_node=ep_size // 2)
    with tiny_gpt.parallel(ep_size, **parallel), patch.object(tiny_gpt, "replay", live):
        for name in ("plain", "balanced", "observed"):
            run = tiny_gpt.build(**layers)
            for model in run.models:
                like_some(tiny_gpt.gpt_of(model))
            run.optimizer.reload_model_params()
            balancer = None
            if name != "plain":
                balancer = attach(run.models, run.optimizer, config.with_words(observe=name == "observed"))
            curve = tiny_gpt.history()
            for step in range(ROLLOUTS):
                routes = [torch.zeros(tiny_gpt.SEQUENCE * tiny_gpt.BATCH, 4, 2)] * MICRO_BATCHES
                passes: list[tuple[bool, list[int]]] = [(True, [2, 0, 3, 1]), (False, [0, 1, 2, 3])]
                for forward_only, order in passes:
                    reordered = patch.object(
                        tiny_gpt, "tokens_of", lambda s, m, length=16, order=order: TOKENS_OF(s, order[m], length)
                    )
                    if balancer is not None:
                        balancer.begin_pass(
                            PassSource.expected([held(step, m) for m in order]), forward_only=forward_only
                        )
                    with reordered:
                        if forward_only:
                            with torch.no_grad():
                                tiny_gpt.forward_backward(run, step, routes, forward_only=True)
                        else:
                            tiny_gpt.update(run, step, routes, curve)
                    if balancer is not None:
                        metrics = balancer.end_pass()
                        if name == "observed":
                            found["would_be"] += [] if forward_only else [metrics.as_dict()]
                        elif not forward_only:
                            found["metrics"].append(metrics.as_dict())
                            found["sources"].append(metrics.source)
            found[name] = curve
            if name == "observed" and balancer is not None:
                found["observed_bytes"] = balancer.buffer_bytes
                found["imagined"] = bool((balancer.placement.home_rank != balancer.megatron_placement.home_rank).any())
                with balancer.canonical():
                    found["names"] = len(run.models[0].state_dict())
                balancer.detach()
            elif balancer is not None:
                away = balancer.placement.home_rank != balancer.megatron_placement.home_rank
                found["moved"] = away.any(axis=1).tolist()
                balancer.reorder(balancer.megatron_placement)
                balancer.detach()
    return found


def one_stage() -> dict[str, Any]:
    return rollouts()


def two_stages() -> dict[str, Any]:
    return rollouts(pipeline=2)


def tensor_parallel() -> dict[str, Any]:
    return rollouts(tensor=2)
