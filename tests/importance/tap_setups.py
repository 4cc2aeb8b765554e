"""Legal ways to train a mixture of experts, each with the tap beside a brute force that uses none of its code.

A set-up is how a model runs a batch: padded or packed, recomputed, accumulated, under DDP, LoRA or `torch.compile`. The
brute force runs the same model outside of the tap's passes, before and after the update, and takes every router's
logits from its input and its weight, in float64.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.importance import RouterTap, as_floats

SAMPLES, LENGTH, VOCABULARY = 6, 7, 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "num_experts": 8, "head_dim": 8,
}  # fmt: skip
TOLERANCE = 1e-6
"""Of gamma: float32 logits near 1 round to 6e-8, and a store of int32 words to 1e-8."""

Weights = dict[str, Tensor]
"""Log-probabilities of every router over all experts, [tokens, E] float64, by its name."""


def built(name: str) -> nn.Module:
    """A small model of Transformers with random weights, float32 on the CPU, that drops nothing at random."""
    import transformers

    # With a cache, positions that start again in a row are not read as another sample.
    config = getattr(transformers, f"{name}Config")(**SIZES, use_cache=False)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward: what the model is called with, and the keys of its rows, -1 for padding."""

    arguments: dict[str, Tensor]
    keys: Tensor


def tokens() -> Tensor:
    """[SAMPLES, LENGTH] input ids; the key of a token is its place in it."""
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(2))


KEYS = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)


def padded(samples: list[int], lengths: dict[int, int]) -> Batch:
    """Samples on the left of rows as wide as the longest; what is behind is padding and has other tokens."""
    ids, keys, mask = tokens()[samples], KEYS[samples].clone(), torch.ones(len(samples), LENGTH, dtype=torch.int64)
    for row, sample in enumerate(samples):
        stop = lengths.get(sample, LENGTH)
        ids[row, stop:], keys[row, stop:], mask[row, stop:] = 0, -1, 0
    return Batch(arguments={"input_ids": ids, "attention_mask": mask}, keys=keys)


def packed(samples: list[int], lengths: dict[int, int]) -> Batch:
    """The samples behind each other in one row, with positions that start again."""
    stops = [lengths.get(sample, LENGTH) for sample in samples]
    ids = torch.cat([tokens()[sample, :stop] for sample, stop in zip(samples, stops, strict=True)])
    keys = torch.cat([KEYS[sample, :stop] for sample, stop in zip(samples, stops, strict=True)])
    positions = torch.cat([torch.arange(stop) for stop in stops])
    arguments = {"input_ids": ids[None], "position_ids": positions[None]}
    return Batch(arguments=arguments, keys=keys[None])


SHORT = {1: 4, 4: 2}
Layout = Callable[[list[int], dict[int, int]], Batch]


def old_batches() -> list[Batch]:
    """The old pass: all samples, padded, in order, three a forward."""
    return [padded([0, 1, 2], SHORT), padded([3, 4, 5], SHORT)]


def batches(layout: Layout, *samples: list[int]) -> list[Batch]:
    """The update's forwards."""
    return [layout(each, SHORT) for each in samples]


def is_router(module: nn.Module) -> bool:
    """True for the routers of Transformers' models here."""
    return type(module).__name__.endswith("TopKRouter")


def router_weights(model: nn.Module, runs: list[Batch], weight_of: Callable[[nn.Module], Tensor]) -> Weights:
    """Run the model outside of a pass; every router's log-probabilities from its input and weight, by key."""
    found: Weights = {}
    names = [name for name, module in model.named_modules() if is_router(module) and "original_module" not in name]
    modules = dict(model.named_modules())
    for batch in runs:
        inputs: dict[str, Tensor] = {}

        def keep(name: str, store: dict[str, Tensor] = inputs) -> Callable[..., None]:
            return lambda module, args: store.__setitem__(name, args[0].detach().double())

        handles = [modules[name].register_forward_pre_hook(keep(name)) for name in names]
        with torch.no_grad():
            model(**batch.arguments)
        for handle in handles:
            handle.remove()
        keys = batch.keys.reshape(-1)
        for name, hidden in inputs.items():
            weight = weight_of(modules[name]).detach().double()
            logs = (hidden.reshape(-1, hidden.shape[-1]) @ weight.T).log_softmax(dim=1)
            by_key = found.setdefault(name, torch.full((SAMPLES * LENGTH, weight.shape[0]), torch.nan).double())
            by_key[keys[keys >= 0]] = logs[keys >= 0]
    return found


def gamma_by_hand(before: Weights, after: Weights, lowest: float) -> Tensor:
    """[SAMPLES * LENGTH] exp(-mean |delta|) over routers and the experts that the old one likes best; NaN: no token."""
    deltas = []
    for name, old in before.items():
        used = old.topk(SIZES["num_experts_per_tok"], dim=1).indices
        deltas.append((after[name].clamp(min=lowest) - old.clamp(min=lowest)).gather(1, used).abs())
    return torch.exp(-torch.stack(deltas).mean(dim=(0, 2)))


def drifted(model: nn.Module, scale: float = 0.01) -> None:
    """An update of every weight that is trained."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)


def plain_weight(router: Any) -> Tensor:
    """The weight of a router of Transformers."""
    weight: Tensor = router.weight
    return weight


def worst_error(
    model: nn.Module,
    runs: list[Batch],
    *,
    plain: nn.Module | None = None,
    weight_of: Callable[[nn.Module], Tensor] = plain_weight,
    drift: Callable[[nn.Module], None] = drifted,
    lowest: float = -math.inf,
    at_floor: list[float] | None = None,
) -> float:
    """Return the largest |gamma - by hand| over the tokens of an update, after an unmoved one that gave 1.

    `plain`: the same modules, run for the brute force where `model` wraps them. `lowest`: where the brute force reads
    smaller log-probabilities as this one. `at_floor` gets the share of entries there that the update's result names.
    """
    plain = plain or model
    tap = RouterTap(model, word=torch.int32)
    with torch.no_grad(), tap.old_pass(SAMPLES * LENGTH) as store:
        for batch in old_batches():
            tap.rows = batch.keys
            model(**batch.arguments)
    before = router_weights(plain, old_batches(), weight_of)
    every_key = torch.cat([batch.keys.reshape(-1) for batch in runs])
    asked = every_key[every_key >= 0]
    with tap.update_pass(store) as unmoved:
        for batch in runs:
            tap.rows = batch.keys
            forward_and_backward(model, batch)
        ones = unmoved.finish(asked, floor=0.0).ratio
    assert float((ones - 1.0).abs().max()) <= TOLERANCE
    drift(plain)
    with tap.update_pass(store) as update:
        for batch in runs:
            tap.rows = batch.keys
            forward_and_backward(model, batch)
        shift = update.finish(asked, floor=0.0)
    if at_floor is not None:
        at_floor.append(as_floats(shift.metrics)["router_corr/log_prob_floor_frac"])
    expected = gamma_by_hand(before, router_weights(plain, runs, weight_of), lowest)[asked]
    assert float(expected.max()) < 0.9999, "every token's routers have moved"
    return float((shift.ratio.double() - expected).abs().max())


def forward_and_backward(model: nn.Module, batch: Batch) -> None:
    """What an update does with a micro-batch; gradients add up, as under accumulation."""
    model(**batch.arguments).logits.logsumexp(dim=-1).sum().backward()


@contextmanager
def recomputed(model: Any, *, reentrant: bool) -> Iterator[None]:
    """Activation checkpointing of every layer."""
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    yield
