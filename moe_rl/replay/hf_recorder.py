"""Record the routing of Hugging Face MoE models with forward hooks, for `model(...)` and for `model.generate(...)`.

B sequences of a forward call, L MoE layers, K experts per token, E experts per layer.

A router of transformers >= 5 is a module `...Router` with `top_k` and `num_experts` that returns (logits
`[B*tokens, E]`, weights, expert ids `[B*tokens, K]`): Qwen3MoeTopKRouter, OlmoeTopKRouter, MixtralTopKRouter, ...
(huggingface/transformers: src/transformers/models/*/modeling_*.py).
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.trace import RoutingTrace, route_dtype

# (router's name, router, what it returned) -> logits [rows, E], which `router_logprobs` alone uses, ids [rows, K].
ReadOutput = Callable[[str, nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedSequence:
    """Rows of one sequence, one per token that was fed to the model and is not padding."""

    routed_experts: NDArray[np.uint8] | NDArray[np.uint16]
    """[rows, L, K] logical expert ids."""
    token_ids: NDArray[np.int64]
    """[rows] the fed tokens, -1 where the call gave `inputs_embeds`."""
    router_logprobs: NDArray[np.float16] | None
    """[rows, L, K] log-softmax of the router's logits over all experts, at the routed ids."""


@dataclass(slots=True, kw_only=True)
class _Call:
    """One forward call while it runs: what came in, and what the routers have returned so far."""

    token_ids: torch.Tensor
    """[B, tokens]."""
    real: torch.Tensor
    """[B, tokens] False on padding."""
    cached_tokens: int
    routes: dict[int, tuple[torch.Tensor, torch.Tensor | None]]


# Rows of one forward call, on the CPU: routes and, where asked for, logprobs [B, tokens, L, K]; tokens and real [B,
# tokens].
_Rows = dict[str, NDArray[Any]]


class TransformersRecorder:
    """Records while its `with` block runs, and then returns sequences or a trace. `record_routing` makes it.

    A forward call on an empty key-value cache, or without one, starts a batch of new sequences; a call that continues
    the cache adds rows to the batch before it; `generate(use_cache=False)` is therefore one batch per token. Rows that
    the cache drops (drafts rejected in assisted generation) are dropped here too. Beam search reorders sequences behind
    the hooks and must not be recorded.
    """

    def __init__(
        self, model: nn.Module, *, router_logprobs: bool, eos_token_ids: frozenset[int], read_output: ReadOutput
    ) -> None:
        self._model, self._read_output = model, read_output
        self._routers = find_routers(model)
        self._router_logprobs = router_logprobs
        self._eos_token_ids = eos_token_ids
        self._signature = inspect.signature(model.forward)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._call: _Call | None = None
        self._batches: list[list[_Rows]] = []

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Layers of the model that hold a router."""
        return tuple(layer for layer, _, _ in self._routers)

    @property
    def num_experts(self) -> int:
        """E, experts of each layer."""
        return int(self._routers[0][2].num_experts)  # type: ignore[arg-type]

    @property
    def batch_sizes(self) -> list[int]:
        """Sequences of every recorded batch, in the order of the calls."""
        return [len(batch[0]["tokens"]) for batch in self._batches]

    def __enter__(self) -> Self:
        require(not self._handles, "this recorder has already been started.")
        for index, (_, name, router) in enumerate(self._routers):
            self._handles.append(router.register_forward_hook(self._router_hook(index, name)))
        self._handles.append(self._model.register_forward_pre_hook(self._before_call, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(self._after_call))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._call = None

    def sequences(self) -> list[RoutedSequence]:
        """Return every recorded sequence, batch after batch in the order of the calls.

        A sequence of P prompt and N generated tokens has P + N - 1 rows: the last token is never fed. In a batch that
        goes on after one of its sequences has ended, that sequence stops before its end-of-sequence token.
        """
        require(len(self._batches) > 0, "no routes were recorded: call the model that you passed to record_routing.")
        sequences: list[RoutedSequence] = []
        for batch in self._batches:
            sequences += self._split(batch)
        return sequences

    def trace(
        self,
        *,
        model: str = "",
        provenance: str = "live",
        policy_version: int | None = None,
        **columns: Any,
    ) -> RoutingTrace:
        """Return the recorded sequences as a trace; `columns` are sample_id, group_id, step, ... of shape [S].

        `policy_version` is written to every row. Raises `InvalidInputError` on an empty recording.
        """
        sequences = self.sequences()
        trace = RoutingTrace.from_sequences(
            [sequence.routed_experts for sequence in sequences],
            num_experts=self.num_experts,
            moe_layer_ids=self.moe_layer_ids,
            provenance=provenance,
            model=model,
            **columns,
        )
        logprobs = [sequence.router_logprobs for sequence in sequences if sequence.router_logprobs is not None]
        return replace(
            trace,
            router_logprobs=np.concatenate(logprobs) if logprobs else None,
            policy_version=None if policy_version is None else np.full(trace.num_tokens, policy_version, np.int32),
        )

    def _before_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # By name, however the caller passed them: model(ids) and model(input_ids=ids).
        call_arguments = self._signature.bind_partial(*args, **kwargs).arguments
        call_arguments = call_arguments | call_arguments.get("kwargs", {})
        token_ids, embeds = call_arguments.get("input_ids"), call_arguments.get("inputs_embeds")
        require(
            token_ids is not None or embeds is not None,
            "the recorder needs input_ids, but the model was called without them.",
        )
        if token_ids is None:
            # Their tokens are not known, their rows are all the same.
            token_ids = torch.full(embeds.shape[:2], -1)
        self._call = _Call(
            token_ids=token_ids,
            real=_real_tokens(call_arguments.get("attention_mask"), token_ids.shape),
            # Read before the call, which grows the cache.
            cached_tokens=_cached_tokens(call_arguments, token_ids.shape[1]),
            routes={},
        )

    def _router_hook(self, index: int, name: str) -> Any:
        def hook(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = self._call
            if call is None:  # activation checkpointing runs routers again in the backward pass
                return
            logits, ids = self._read_output(name, router, output)
            require(
                ids.shape[0] == call.token_ids.numel(),
                f"router {name} returned routes for {ids.shape[0]} tokens, but the model was called with "
                f"{call.token_ids.numel()} tokens.",
            )
            require(
                index not in call.routes,
                f"router {name} ran twice in one forward pass, but the recorder expects each router to run once.",
            )
            logprobs = None
            if self._router_logprobs:
                # In fp32: differences of bf16 logits near 20 are good to 0.06 only.
                logprobs = torch.log_softmax(logits.detach().float(), dim=-1).gather(-1, ids.detach())
            call.routes[index] = ids.detach(), logprobs

        return hook

    def _after_call(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        ids, logprobs = [], []
        for index, (_, name, _) in enumerate(self._routers):
            require(
                index in call.routes,
                f"router {name} did not run in this forward pass, but the recorder expects each router to run once.",
            )
            ids_of_layer, logprobs_of_layer = call.routes[index]
            ids.append(ids_of_layer)
            if logprobs_of_layer is not None:
                logprobs.append(logprobs_of_layer)
        shape = (*call.token_ids.shape, len(ids), -1)
        # One copy to the CPU per call, not one per layer: each waits for the GPU.
        routes = torch.stack(ids, dim=1).reshape(shape).cpu().numpy()
        tokens = call.token_ids.cpu().numpy().astype(np.int64)
        rows: _Rows = {"routes": routes, "tokens": tokens, "real": call.real.cpu().numpy()}
        if logprobs:
            rows["logprobs"] = torch.stack(logprobs, dim=1).reshape(shape).half().cpu().numpy()
        # An empty cache means new sequences; anything else goes on with the batch before.
        if call.cached_tokens == 0:
            self._batches.append([rows])
        else:
            self._continue_batch(rows, call.cached_tokens)

    def _continue_batch(self, rows: _Rows, cached_tokens: int) -> None:
        batch = self._batches[-1] if self._batches else []
        rows_kept: list[_Rows] = []
        for part in batch:
            room = cached_tokens - sum(earlier["tokens"].shape[1] for earlier in rows_kept)
            if room > 0:
                rows_kept.append({name: column[:, :room] for name, column in part.items()})
        recorded = sum(part["tokens"].shape[1] for part in rows_kept)
        require(
            recorded == cached_tokens,
            f"the key-value cache holds {cached_tokens} tokens, but only {recorded} of them were recorded. Start "
            "recording before the first token is passed to the model.",
        )
        require(
            len(rows_kept[0]["tokens"]) == len(rows["tokens"]),
            f"the batch size changed from {len(rows_kept[0]['tokens'])} to {len(rows['tokens'])} sequences while "
            "the same key-value cache was in use.",
        )
        self._batches[-1] = [*rows_kept, rows]

    def _split(self, batch: list[_Rows]) -> Iterable[RoutedSequence]:
        """Yield the sequences of a batch without padding and without what was fed after they had ended."""
        columns = {name: np.concatenate([rows[name] for rows in batch], axis=1) for name in batch[0]}
        routes, tokens = columns["routes"].astype(route_dtype(self.num_experts)), columns["tokens"]
        # Only single-token calls are generation; the prompt may well hold end-of-sequence tokens.
        widths = [rows["tokens"].shape[1] for rows in batch]
        generated = np.repeat([width == 1 for width in widths], widths)
        generated[: widths[0]] = False
        ended = np.isin(tokens, list(self._eos_token_ids)) & generated
        # What generate() feeds from the end-of-sequence token on is padding.
        keep = columns["real"] & ~np.maximum.accumulate(ended, axis=1)
        logprobs = columns.get("logprobs")
        for index, is_kept in enumerate(keep):
            yield RoutedSequence(
                routed_experts=routes[index, is_kept],
                token_ids=tokens[index, is_kept],
                router_logprobs=None if logprobs is None else logprobs[index, is_kept],
            )


def record_routing(
    model: nn.Module,
    *,
    router_logprobs: bool = False,
    eos_token_id: int | Sequence[int] | None = None,
    read_output: ReadOutput | None = None,
) -> TransformersRecorder:
    """Return a context manager that records the experts to which `model` routes each token.

    `router_logprobs` also keeps the log-probability of each routed expert (float16). For a router that scores with a
    sigmoid it is still the log-softmax of its logits. `eos_token_id` tells where a generated sequence ends in a batch
    that goes on; the default is that of the model's generation config, and a call of `generate` with another one
    needs it here too. `read_output` is for routers that return something else than transformers' do.

    Raises `InvalidInputError` if the model has no router of the kind above.
    """
    if eos_token_id is None:
        eos_token_id = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos_token_id is None:
        ends = []
    else:
        ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    return TransformersRecorder(
        model,
        router_logprobs=router_logprobs,
        eos_token_ids=frozenset(ends),
        read_output=read_output or _read_output,
    )


def router_choices(model: nn.Module, token_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """Return ([T - 1, L, K] experts that the model's routers choose for T tokens, [T - 1, L] margins of the choices).

    The margin is the lowest chosen logit less the highest other one, over the largest logit of the row: bf16 decides
    small ones either way. None where the choices are not the highest logits (a bias, groups of experts).
    """
    margins: list[torch.Tensor] = []

    def read(name: str, router: nn.Module, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, ids = _read_output(name, router, output)
        best_other = logits.float().scatter(1, ids, -torch.inf).amax(dim=1)
        least = logits.float().gather(1, ids).amin(dim=1)
        # Relative to the largest logit, because that is what bf16 rounds by: 8 bits of it.
        margins.append((least - best_other) / logits.float().abs().amax(dim=1).clamp_min(1e-9))
        return logits, ids

    recorder = record_routing(model, read_output=read)
    with recorder, torch.no_grad():
        tokens = torch.tensor([list(token_ids)[:-1]], device=next(model.parameters()).device)
        model(input_ids=tokens, use_cache=False)
    margin = torch.stack(margins, dim=1).cpu().numpy()
    ids = recorder.sequences()[0].routed_experts.astype(np.int64)
    return ids, margin if bool((margin >= 0).all()) else None


def find_routers(model: nn.Module) -> list[tuple[int, str, nn.Module]]:
    """Return (layer number, name, module) of every router, in the order of the layers."""
    routers: list[tuple[int, str, nn.Module]] = []
    for name, module in model.named_modules():
        is_router = type(module).__name__.endswith("Router")
        if is_router and isinstance(getattr(module, "top_k", None), int) and hasattr(module, "num_experts"):
            number = _LAYER_NUMBER.search(name)
            routers.append((int(number.group(1)) if number else len(routers), name, module))
    require(
        len(routers) > 0,
        f"{type(model).__name__} has no MoE layer that can be recorded: none of its modules is a router with the "
        "attributes top_k and num_experts.",
    )
    shapes = {(module.num_experts, module.top_k) for _, _, module in routers}
    require(
        len(shapes) == 1,
        "all MoE layers must have the same number of experts and the same top-k, but this model has (experts, top-k) = "
        f"{sorted(shapes)}.",
    )
    layers = [layer for layer, _, _ in routers]
    require(
        len(set(layers)) == len(layers),
        f"two routers of the model have the same layer number: {[name for _, name, _ in routers]}.",
    )
    return sorted(routers, key=lambda router: router[0])


def _read_output(name: str, router: nn.Module, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits, ids) of a router's output, or say what it returned instead."""
    if isinstance(output, tuple) and len(output) == 3 and all(isinstance(part, torch.Tensor) for part in output):
        logits, _, ids = output
        if not ids.is_floating_point() and ids.ndim == 2 and ids.shape[1] == router.top_k:
            return logits, ids
    kinds = [type(part).__name__ for part in output] if isinstance(output, tuple) else type(output).__name__
    raise InvalidInputError(
        f"router {name} ({type(router).__name__}) returned {kinds}, but the recorder expects the tuple (logits, "
        "weights, ids [tokens, top_k])."
    )


def _cached_tokens(arguments: dict[str, Any], num_tokens: int) -> int:
    """Return how many tokens the key-value cache of a forward call holds, 0 without a cache.

    `arguments` are the call's by name, `num_tokens` those that it feeds to every sequence. The cache is the argument
    that can say its length: it is called `past_key_values` up to Transformers 5.23, `cache` from 5.24 on.

    Raises `InvalidInputError` where a call shows no cache and may all the same go on with a sequence: a decoded token
    would be taken for a new sequence, and its prompt would end before it, without an error.
    """
    for argument in arguments.values():
        if callable(getattr(argument, "get_seq_length", None)):
            return int(argument.get_seq_length())
    mask = arguments.get("attention_mask")
    mask_tokens = mask.shape[1] if isinstance(mask, torch.Tensor) and mask.ndim == 2 else num_tokens
    require(
        mask_tokens <= num_tokens,
        f"the attention_mask has {mask_tokens} tokens per sequence, but the model was called with {num_tokens} and "
        "without a key-value cache that the recorder recognizes (an argument with the method get_seq_length).",
    )
    require(
        num_tokens != 1 or arguments.get("use_cache") is False,
        "the model was called with one token per sequence and without a key-value cache that the recorder "
        "recognizes (an argument with the method get_seq_length). If you are decoding, pass the cache. If each "
        "sequence has only one token, set use_cache=False.",
    )
    return 0


def _real_tokens(mask: Any, shape: torch.Size) -> torch.Tensor:
    """Return [B, tokens], False on padding; a mask that covers cached tokens too is cut to the new ones."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    fits = isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[0] == shape[0] and mask.shape[1] >= shape[1]
    got = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
    require(
        fits,
        f"the recorder needs an attention_mask of shape [batch, tokens], got {got}. With a static cache, the "
        "mask has another shape: generate with the default dynamic cache.",
    )
    # A mask that covers the cache too ends with the new tokens.
    real: torch.Tensor = mask[:, -shape[1] :] != 0
    return real
