"""Watch the routers of a Megatron run without waiting for the device: are replayed routes right, which experts work?

At the first forward of a pass each router hands over the experts that 128 rows went to and those that it would choose
itself for them; every forward adds to the counts of its experts. All of it goes to pinned memory behind the pass, and
is read when it has arrived, at the end of a later pass.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from megatron.core.transformer.moe.router import TopKRouter

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.routes.online import load_metrics, nodes_per_token, replay_metrics

logger = logging.getLogger("moe_rl.megatron")

# Of a pass: two pages of a rollout engine's cache, so that what comes from a wrong one shows.
ROWS = 128


class RouterWatch:
    """Hooks on the routers of built model chunks."""

    def __init__(self, chunks: Sequence[torch.nn.Module], *, check: bool, telemetry: bool, ranks_per_node: int) -> None:
        """`check`: compare replayed routes with the routers' own choice; `telemetry`: count every expert's tokens.

        Raises `InvalidInputError` if a router scores by a function that is not read; its forward raises it if the
        router returns anything but Megatron's (probabilities, routing map).
        """
        routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        for router in routers:
            has_margin = router.score_function in ("softmax", "sigmoid")
            require(
                has_margin,
                "the router watch supports softmax and sigmoid routers, but the score function is "
                f"{router.score_function}.",
            )
        self._check, self._telemetry, self._ranks_per_node = check, telemetry, ranks_per_node
        self._samples: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._counts: dict[int, torch.Tensor] = {}
        self._arriving: tuple[list[torch.Tensor], torch.cuda.Event | None] | None = None
        self._previous: Any = None
        self._num_experts = routers[0].config.num_moe_experts if routers else 0
        self._told: set[str] = set()
        self._handles = [
            router.register_forward_hook(self._hook(number, router)) for number, router in enumerate(routers)
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def give_up(self) -> None:
        """Forget what a pass gathered that broke off; no other rank is asked."""
        self._samples, self._counts = {}, {}

    def end_pass(self) -> dict[str, float]:
        """Send off what this pass gathered; return the metrics of an earlier one, {} while they have not arrived.

        With telemetry a collective of the ranks that share this stage's layers, without waiting on a GPU.
        """
        metrics = self._arrived()
        counts = [torch.stack(self._in_order(self._counts))] if self._counts else []
        for count in counts:  # in every pass: which ranks have read the last one differs
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            torch.distributed.all_reduce(count, group=group)
        if self._arriving is None and self._samples:
            columns = [torch.stack(column, dim=1) for column in zip(*self._in_order(self._samples), strict=True)]
            self._arriving = _on_the_way(columns + counts)
        self._samples, self._counts = {}, {}
        return metrics or self._arrived()

    @staticmethod
    def _in_order(by_router: dict[int, Any]) -> list[Any]:
        return [by_router[number] for number in sorted(by_router)]

    def _hook(self, number: int, router: Any) -> Any:
        @torch.no_grad()
        def watch(_: Any, args: tuple[Any, ...], output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # recomputation, of a forward that was seen
            routing_map = _routing_map(output, router.config.num_moe_experts)
            if self._telemetry:
                counts = routing_map.sum(dim=0)
                self._counts[number] = counts + self._counts[number] if number in self._counts else counts
            if number not in self._samples:
                rows = args[0].reshape(-1, args[0].shape[-1])[:ROWS]
                by_choice = routing_map[:ROWS].to(torch.int8).topk(router.topk, dim=1)
                # A row with fewer experts than K was not routed: zeros, as engines write it.
                ids = by_choice.indices * by_choice.values
                own_ids, margin = _own_choice(router, rows) if self._check else (ids, ids.new_zeros(len(ids)))
                self._samples[number] = ids.to(torch.int16), own_ids.to(torch.int16), margin.float()

        return watch

    def _arrived(self) -> dict[str, float]:
        if self._arriving is None:
            return {}
        columns, event = self._arriving
        if event is not None and not event.query():
            return {}
        self._arriving = None
        routes, own_ids, margin, *counts = (column.numpy() for column in columns)
        metrics: dict[str, float] = {}
        if self._check:
            margins = None if (margin < 0).any() else margin
            metrics, verdict = replay_metrics(routes, own_ids, margins, num_experts=self._num_experts)
            if verdict.fault is not None and verdict.fault not in self._told:
                self._told.add(verdict.fault)
                logger.warning("moe_rl: the replayed routes are wrong: %s.", verdict)
        if counts:
            metrics |= load_metrics(counts[0], self._previous)
            self._previous = counts[0]
            size = parallel_state.get_expert_model_parallel_world_size()
            node = np.arange(self._num_experts) * size // self._num_experts // self._ranks_per_node
            own_node = parallel_state.get_expert_model_parallel_rank() // self._ranks_per_node
            metrics["moe_rl/nodes_per_token"] = nodes_per_token(routes, node, own_node)
        return metrics


def _routing_map(output: Any, num_experts: int) -> torch.Tensor:
    """Return the [n, E] routing map of a router's output; raise if there is none.

    Counts of [n, K] expert ids, say, would be numbers too, and the metrics wrong without a word.
    """
    parts = output if isinstance(output, tuple) else (output,)
    routing_map = parts[1] if len(parts) == 2 else None
    if (
        isinstance(routing_map, torch.Tensor)
        and routing_map.dtype == torch.bool
        and routing_map.shape[1:] == (num_experts,)
    ):
        return routing_map
    kinds = [f"{part.dtype} {list(part.shape)}" if isinstance(part, torch.Tensor) else repr(part) for part in parts]
    raise InvalidInputError(
        f"the router watch needs routers that return (probabilities, bool routing map [tokens, {num_experts}]), "
        f"but this one returned ({', '.join(kinds)})."
    )


def _own_choice(router: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([n, K] experts that the router itself chooses, [n] margins over the largest score; -1: not known)."""
    logits, config = router.gating(rows).float(), router.config
    scores = logits.sigmoid() if router.score_function == "sigmoid" else logits
    if router.expert_bias is not None:
        scores = scores + router.expert_bias
    if config.moe_router_num_groups:
        if router.score_function == "softmax" and config.moe_router_pre_softmax:
            scores = scores.softmax(dim=1)
        groups = config.moe_router_num_groups, config.moe_router_group_topk
        return group_limited_topk(scores, router.topk, *scores.shape, *groups)[1], scores.new_full(rows.shape[:1], -1)
    if router.topk == scores.shape[1]:
        return scores.topk(router.topk, dim=1).indices, scores.new_full(rows.shape[:1], -1)
    best_scores = scores.topk(router.topk + 1, dim=1)
    gap = best_scores.values[:, -2] - best_scores.values[:, -1]
    return best_scores.indices[:, :-1], gap / scores.abs().amax(dim=1).clamp_min(1e-9)


def _on_the_way(columns: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
    if not columns[0].is_cuda:
        return columns, None
    host = [torch.empty(column.shape, dtype=column.dtype, pin_memory=True) for column in columns]
    for host_column, column in zip(host, columns, strict=True):
        host_column.copy_(column, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
