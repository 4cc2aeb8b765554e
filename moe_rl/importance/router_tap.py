"""Router statistics taken from a model's forward passes, as they run: what the router shift needs, and no more.

    tap = RouterTap(model)                      # Transformers or Megatron; finds the routers
    with tap.old_pass() as old:                 # the pass that gives the old log-probabilities
        for micro_batch in batch:
            model(micro_batch)
    with tap.update_pass(old) as update:        # the pass that is differentiated
        for micro_batch in batch:
            model(micro_batch)
            gamma = update.finish()             # of the last forward; [T] in the router's order of tokens

The old pass keeps one 16-bit word per layer and expert of a token, id and log-probability together; the update pass
keeps two [T] vectors and drops each layer's logits at once. What activation recomputation runs again in the backward
pass is passed over.

Row t of a router belongs to the input token t, whose output predicts token t + 1: a loss whose log-probabilities stand
at the tokens themselves needs `shift_to_predicted`. Tokens are those that the router saw, flattened: [B * S] in
Transformers, [S * B] in Megatron; under sequence parallelism this rank's, to be gathered like any activation; under
context parallelism this rank's, as the loss has them. Pipeline stages hold their own layers: `finish` takes their sum.

T tokens, L layers, K experts per token, E experts.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.registry import Registry
from moe_rl.importance.context_parallel import SumReducer
from moe_rl.importance.diagnostics import router_agreement
from moe_rl.importance.router_shift import (
    DEFAULT_FLOOR,
    RouterShift,
    RouterShiftAccumulator,
    ScoreFunction,
    router_log_probs,
)
from moe_rl.importance.router_storage import StoredRouterLogProbs, store_router_log_probs


class RouterKind(Protocol):
    """How a framework's routers are found and read; one entry of `ROUTER_KINDS` each."""

    name: ClassVar[str]

    @staticmethod
    def matches(module: nn.Module) -> bool:
        """True for a router of this framework."""

    @staticmethod
    def score_function(module: nn.Module) -> ScoreFunction:
        """What the router makes of its logits."""

    @staticmethod
    def read(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
        """Return (logits [T, E], ids [T, K] of the experts that were used, -1 where there is no route)."""


class TransformersRouter:
    """Qwen3-MoE, OLMoE, Mixtral, gpt-oss, DeepSeek-V3 and their kin: a forward returns (logits, weights, ids)."""

    name: ClassVar[str] = "transformers"

    @staticmethod
    def matches(module: nn.Module) -> bool:
        """True for the `...TopKRouter` classes of Transformers 5."""
        return type(module).__name__.lower().endswith("topkrouter") and hasattr(module, "hidden_dim")

    @staticmethod
    def score_function(module: nn.Module) -> ScoreFunction:
        """Return sigmoid for routers with a correction bias (DeepSeek-V3), else softmax."""
        return "sigmoid" if hasattr(module, "e_score_correction_bias") else "softmax"

    @staticmethod
    def read(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
        """Return logits and ids as the forward gave them."""
        logits, _, ids = output
        return logits, ids


class MegatronRouter:
    """megatron-core's `TopKRouter`: a forward returns (probs [T, E], routing_map [T, E]), replayed or its own."""

    name: ClassVar[str] = "megatron"

    @staticmethod
    def matches(module: nn.Module) -> bool:
        """True for a module with megatron-core's `gating` and `topk`."""
        return type(module).__name__ == "TopKRouter" and hasattr(module, "gating") and hasattr(module, "topk")

    @staticmethod
    def score_function(module: nn.Module) -> ScoreFunction:
        """Return the router's own, `softmax` or `sigmoid`."""
        found: ScoreFunction = "sigmoid" if getattr(module, "score_function", "softmax") == "sigmoid" else "softmax"
        return found

    @staticmethod
    def read(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
        """Return the logits of a second run of the small gate, since the output has none, and the used experts."""
        gate: Any = module
        logits = gate.gating(args[0].detach())
        routing_map = output[1]
        # Stable, so that the ids of a token come in rising order whatever it is sorted by.
        chosen = routing_map.to(torch.int8).sort(dim=1, descending=True, stable=True)
        ids = torch.where(chosen.values[:, : gate.topk] > 0, chosen.indices[:, : gate.topk], -1)
        return logits.reshape(-1, logits.shape[-1]), ids


ROUTER_KINDS: Registry[type[RouterKind]] = Registry("router kind", [TransformersRouter, MegatronRouter])

LogProbs = Callable[..., Tensor]
"""(logits [T, E], ids [T, K], score_function=...) -> [T, K]: `router_log_probs`, or a kernel in its place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldRouters:
    """The old policy's routers: for each router of this rank one entry per forward of the old pass."""

    forwards: list[list[StoredRouterLogProbs]] = field(default_factory=list)
    agreement: list[Tensor] = field(default_factory=list)
    """Per forward [T]: the share of the used experts that the router itself likes best, mean over this rank's routers.
    Below 1 where they were replayed. Filled with `agreement=True`."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(stored.num_bytes for router in self.forwards for stored in router)


class UpdatePass:
    """The shift of every forward of an update, summed over this rank's routers as they run."""

    agreement: list[Tensor]
    """Per forward [T]: the share of the old policy's experts that the router now likes best, mean over this rank's
    routers. Filled with `agreement=True`."""

    def __init__(self, old: OldRouters, order: Sequence[int]) -> None:
        self._old, self._order = old, order
        self._seen = [0] * len(old.forwards)
        self._sums: dict[int, RouterShiftAccumulator] = {}
        self.agreement = []

    def add(self, router: int, logits: Tensor, log_probs: LogProbs, score_function: ScoreFunction) -> Tensor:
        """Add a router's logits [T, E] of its next forward; return the old policy's ids [T, K] there."""
        forward = self._seen[router]
        require(
            forward < len(self._order),
            f"the update pass has {len(self._order)} forward(s) of the old pass to compare with, and this is one more.",
        )
        stored = self._old.forwards[router][self._order[forward]]
        ids = stored.expert_ids
        require(
            logits.shape[0] == ids.shape[0],
            f"forward {forward} has {logits.shape[0]} tokens, but forward {self._order[forward]} of the old pass had "
            f"{ids.shape[0]}: hand the same micro-batches over, or their order as `forwards`.",
        )
        if forward not in self._sums:
            self._sums[forward] = RouterShiftAccumulator(logits.shape[0], device=logits.device)
        found = log_probs(logits, ids, score_function=score_function)
        self._sums[forward].add_layer(stored.rounded(found), stored.log_probs, valid=ids >= 0, layer=router)
        self._seen[router] += 1
        return ids

    def seen(self, router: int) -> int:
        """Forwards that a router has run."""
        return self._seen[router]

    def finish(
        self,
        forward: int = -1,
        *,
        floor: float = DEFAULT_FLOOR,
        noise: float | Tensor = 0.0,
        sum_over_ranks: SumReducer | None = None,
    ) -> RouterShift:
        """Return the router shift of a forward (the last one unless given), and forget it.

        `sum_over_ranks` sums over pipeline stages, a collective: call it where all stages have run that forward.
        """
        known = sorted(self._sums)
        require(bool(known), "the update pass has seen no forward yet.")
        number = known[forward] if forward < 0 else forward
        if number not in self._sums:
            raise InvalidInputError(f"forward {forward} is not waiting; these are: {', '.join(map(str, known))}.")
        return self._sums.pop(number).finish(floor=floor, noise=noise, sum_over_ranks=sum_over_ranks)


def _fused_on_a_gpu(logits: Tensor, ids: Tensor, *, score_function: ScoreFunction) -> Tensor:
    if not logits.is_cuda:
        return router_log_probs(logits, ids, score_function=score_function)
    # By name: this package is plain torch, and kernels come with Triton.
    kernels = importlib.import_module("moe_rl.kernels")
    found: Tensor = kernels.gather_logprobs(logits, ids, score_function=score_function)
    return found


class RouterTap:
    """Reads the routers of a model (or of a pipeline stage's chunks) during its forward passes."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        log_probs: LogProbs | None = None,
        word: torch.dtype = torch.int16,
        agreement: bool = False,
    ) -> None:
        """Find the routers, in the order of `modules()`.

        `log_probs`: None takes the fused kernel of `moe_rl.kernels` on a GPU, the plain function on a CPU. `word` of
        what the old pass stores: 16 bits, or torch.int32 for log-probabilities exact to 1e-6. `agreement`: measure,
        in both passes, how many of the experts the router itself would choose; one top-k per router and forward.
        """
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        modules = [module for chunk in chunks for module in chunk.modules()]
        found = [(module, kind) for module in modules for kind in ROUTER_KINDS if kind.matches(module)]
        require(bool(found), f"no router of a known kind ({', '.join(ROUTER_KINDS.names)}) in the model.")
        self._routers = found
        self._log_probs, self._word, self._agreement = log_probs or _fused_on_a_gpu, word, agreement

    def __len__(self) -> int:
        """Routers found."""
        return len(self._routers)

    @contextmanager
    def old_pass(self) -> Iterator[OldRouters]:
        """Store the experts that each forward uses, and their log-probabilities."""
        old = OldRouters(forwards=[[] for _ in self._routers])

        def keep(router: int, logits: Tensor, ids: Tensor, score_function: ScoreFunction) -> None:
            found = self._log_probs(logits, ids, score_function=score_function)
            stored = store_router_log_probs(ids, found, num_experts=logits.shape[1], word=self._word)
            old.forwards[router].append(stored)
            self._agree(old.agreement, len(old.forwards[router]), logits, ids)

        with self._hooked(keep):
            yield old

    @contextmanager
    def update_pass(self, old: OldRouters, forwards: Sequence[int] | None = None) -> Iterator[UpdatePass]:
        """Compare each forward with one of the old pass: the same one, or `forwards[n]` for the n-th."""
        require(
            len(old.forwards) == len(self._routers),
            f"the old pass was of {len(old.forwards)} routers, the model has {len(self._routers)}.",
        )
        order = range(len(old.forwards[0])) if forwards is None else forwards
        update = UpdatePass(old, order)

        def compare(router: int, logits: Tensor, ids: Tensor, score_function: ScoreFunction) -> None:
            old_ids = update.add(router, logits, self._log_probs, score_function)
            self._agree(update.agreement, update.seen(router), logits, old_ids)

        with self._hooked(compare):
            yield update

    def _agree(self, sums: list[Tensor], forward: int, logits: Tensor, ids: Tensor) -> None:
        """Add a router's share of agreement in its `forward`-th forward, counted from 1."""
        if not self._agreement:
            return
        if len(sums) < forward:
            sums.append(torch.zeros(logits.shape[0], device=logits.device))
        own = logits.topk(ids.shape[1], dim=1).indices
        sums[forward - 1] += router_agreement(ids[:, None], own[:, None]) / len(self)

    @contextmanager
    def _hooked(self, take: Callable[[int, Tensor, Tensor, ScoreFunction], None]) -> Iterator[None]:
        handles = [
            module.register_forward_hook(self._hook(number, kind, take))
            for number, (module, kind) in enumerate(self._routers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(
        self, number: int, kind: type[RouterKind], take: Callable[[int, Tensor, Tensor, ScoreFunction], None]
    ) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # inside a backward pass: activation recomputation runs a forward again that was seen already
            logits, ids = kind.read(module, args, output)
            take(number, logits, ids, kind.score_function(module))

        return hook


def shift_to_predicted(values: Tensor, *, fill: float = 1.0, cu_seqlens: Tensor | None = None) -> Tensor:
    """Move each value from the token that predicts to the token that is predicted: [B, S], or packed [T].

    The first token of a sequence is predicted by nothing and gets `fill`.
    """
    moved = torch.full_like(values, fill)
    moved[..., 1:] = values[..., :-1]
    if cu_seqlens is not None:
        places = torch.arange(values.shape[0], device=values.device)
        moved = torch.where(torch.isin(places, cu_seqlens.to(places)), torch.full_like(moved, fill), moved)
    return moved
