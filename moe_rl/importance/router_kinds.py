"""How the routers of every framework are found in a model and read: `ROUTER_KINDS`.

R rows of a forward, K experts per token, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKind:
    """How a framework's routers are found and read; one entry of `ROUTER_KINDS` each."""

    name: str
    matches: Callable[[nn.Module], bool]
    """True for a router of this framework."""
    score_function: Callable[[Any], str]
    """(router) -> what it makes of its logits, a word of `ScoreFunction`."""
    read: Callable[[Any, tuple[Any, ...], Any], tuple[Tensor, Tensor]]
    """(router, arguments, output) -> logits [R, E], and ids [R, K] of the experts that were used, -1 for no route."""


def _is_transformers_router(module: nn.Module) -> bool:
    """True for `...Router` and `...MoEV1Gate` (HunYuan) classes that know how many experts they have."""
    named = type(module).__name__.lower().endswith(("router", "moev1gate")) and not hasattr(module, "gating")
    return named and (hasattr(module, "top_k") or hasattr(module, "hidden_dim") or hasattr(module, "config"))


def _transformers_scores(module: Any) -> str:
    """Return what the router says of itself; sigmoid with a correction bias (DeepSeek-V3) or in Llama-4."""
    score_fn = getattr(module, "score_fn", None)  # DeepSeek-V4
    if score_fn is not None:
        sample_logits = torch.tensor([-2.0, 0.3, 1.7])
        scores_by_function = {
            "sigmoid": sample_logits.sigmoid(),
            "sqrtsoftplus": nn.functional.softplus(sample_logits).sqrt(),
        }
        return next(
            (name for name, f in scores_by_function.items() if torch.allclose(score_fn(sample_logits), f)),
            type(score_fn).__name__,
        )
    biased = hasattr(module, "e_score_correction_bias") or type(module).__name__ == "Llama4Router"
    return str(getattr(module, "expert_selection_fn", "sigmoid" if biased else "softmax"))  # Cohere2 names it


def _read_transformers(module: Any, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
    """Return logits and ids as the forward of Transformers 5 gave them: (logits, weights, ids)."""
    if type(module).__name__ == "Llama4Router":  # (scores, logits), and its experts are the largest logits
        return output[1], output[1].topk(module.top_k, dim=1).indices
    logits, _, ids = output
    if type(module).__name__.startswith("Gemma4"):  # probabilities, whose logarithms are logits too
        logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log()
    return logits, ids


def _read_megatron(module: Any, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of a second run of the small gate, and the used experts.

    megatron-core's forward returns (probs [R, E], routing_map [R, E]), replayed or its own, and no logits.
    """
    logits = module.gating(args[0].detach())
    # Stable, so that the ids of a token come in rising order whatever it is sorted by.
    is_chosen, experts = output[1].to(torch.int8).sort(dim=1, descending=True, stable=True)
    ids = torch.where(is_chosen[:, : module.topk] > 0, experts[:, : module.topk], -1)
    return logits.reshape(-1, logits.shape[-1]), ids


TRANSFORMERS = RouterKind(
    name="transformers", matches=_is_transformers_router, score_function=_transformers_scores, read=_read_transformers
)
MEGATRON = RouterKind(
    name="megatron",
    matches=lambda module: type(module).__name__ == "TopKRouter" and hasattr(module, "gating"),
    score_function=lambda module: str(getattr(module, "score_function", "softmax")),
    read=_read_megatron,
)
ROUTER_KINDS: Registry[RouterKind] = Registry("router kind", [TRANSFORMERS, MEGATRON])


def refuse_strange_routers(modules: Sequence[tuple[str, nn.Module]], router_ids: set[int]) -> None:
    """Raise for a module that is named like a router and that no kind reads: its layer would be left out in silence."""
    for name, module in modules:
        class_name = type(module).__name__.lower()
        routes = class_name.endswith(("router", "gating", "gate")) and "shared" not in name
        if routes and id(module) not in router_ids and not any(id(child) in router_ids for child in module.modules()):
            raise InvalidInputError(
                f"{name} ({type(module).__name__}) looks like a router, but its class is not supported. "
                f"Supported router kinds: {', '.join(ROUTER_KINDS.names)}. Register others in ROUTER_KINDS."
            )
