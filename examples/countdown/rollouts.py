"""What the rollout engine hands to the trainer: sampled sequences with everything that was known when they were made.

S sequences, T tokens of all sequences (prompt and response) one after the other, L MoE layers, K experts per token,
E experts per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.core.trace import RoutingTrace, route_dtype

_DTYPES = {
    "tokens": torch.int64,
    "cu_seqlens": torch.int64,
    "prompt_lengths": torch.int64,
    "problem_id": torch.int64,
    "logprobs": torch.float32,
    "response_mask": torch.bool,
    "routed_experts": torch.uint8,
    "routed": torch.bool,
    "router_logprobs": torch.float32,
    "rewards": torch.float32,
    "policy_version": torch.int64,
}
_PER_TOKEN = ("tokens", "logprobs", "response_mask", "routed_experts", "routed", "router_logprobs", "policy_version")
_PER_SEQUENCE = ("prompt_lengths", "problem_id", "rewards")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollouts:
    """Sampled sequences, packed; the samples of one prompt lie next to each other.

    The constructor checks shapes, dtypes and that the masks fit the sequences; all tensors are on the CPU.
    """

    tokens: Tensor
    """[T] int64 prompt, then response, of every sequence."""
    cu_seqlens: Tensor
    """[S + 1] int64 first token of every sequence, then T."""
    prompt_lengths: Tensor
    """[S] int64 tokens of the prompt, 1 .. length of the sequence."""
    problem_id: Tensor
    """[S] int64 prompt group: the samples of one problem share it."""
    logprobs: Tensor
    """[T] float32 log-probability of token t given those before it, under softmax(logits / temperature), the
    distribution it was drawn from; 0 for prompt tokens."""
    response_mask: Tensor
    """[T] bool, True for the tokens that were sampled."""
    routed_experts: Tensor
    """[T, L, K] uint8 expert ids, in the router's order (falling probability)."""
    routed: Tensor
    """[T] bool, False for the last token of every sequence: the engine never ran it, so its row of
    `routed_experts` and `router_logprobs` is filler (zeros)."""
    router_logprobs: Tensor
    """[T, L, K] float32 log-softmax of the router's logits over all E experts, at `routed_experts`."""
    rewards: Tensor
    """[S] float32 reward of the whole answer."""
    policy_version: Tensor
    """[T] int64 version of the weights that produced the token (that read it, for prompt tokens)."""
    temperature: float
    """Temperature of the samples, > 0."""
    num_experts: int
    """E, at most 256: ids are kept as uint8."""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            value = getattr(self, name)
            require(
                value.dtype == dtype and value.device.type == "cpu",
                f"{name} must be a {dtype} tensor on the CPU, got {value.dtype} on {value.device}.",
            )
        num_tokens = len(self.tokens)
        require(
            self.routed_experts.ndim == 3 and self.routed_experts.shape == self.router_logprobs.shape,
            f"routed_experts and router_logprobs must both be [T, L, K], got {list(self.routed_experts.shape)} and "
            f"{list(self.router_logprobs.shape)}.",
        )
        for name in _PER_TOKEN:
            rows = len(getattr(self, name))
            require(rows == num_tokens, f"{name} must have one row per token ({num_tokens}), got {rows}.")
        for name in _PER_SEQUENCE:
            shape = list(getattr(self, name).shape)
            require(shape == [self.num_sequences], f"{name} must be [S] = [{self.num_sequences}], got {shape}.")
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}.")
        self._check_sequences()
        self._check_routes()

    def _check_sequences(self) -> None:
        bounds = self.cu_seqlens
        require(
            bounds.ndim == 1 and len(bounds) >= 1 and int(bounds[0]) == 0 and int(bounds[-1]) == len(self.tokens),
            f"cu_seqlens must run from 0 to the number of tokens ({len(self.tokens)}).",
        )
        prompts = self.prompt_lengths
        require(
            bool(((prompts >= 1) & (prompts <= self.lengths)).all()),
            "each prompt length must be between 1 and the length of its sequence.",
        )
        expected = self.positions >= prompts[self.sequence_of_token]
        require(
            torch.equal(self.response_mask, expected), "response_mask must be True after each prompt, and only there."
        )
        groups = torch.unique_consecutive(self.problem_id)
        require(len(groups) == len(torch.unique(groups)), "the samples of one problem_id must be adjacent.")
        require(bool((self.logprobs[~self.response_mask] == 0).all()), "logprobs must be 0 for prompt tokens.")

    def _check_routes(self) -> None:
        not_last = torch.ones(len(self.tokens), dtype=torch.bool)
        not_last[self.cu_seqlens[1:] - 1] = False
        require(
            torch.equal(self.routed, not_last), "routed must be False for the last token of a sequence, and only there."
        )
        require(1 <= self.num_experts <= 256, f"num_experts must be between 1 and 256, got {self.num_experts}.")
        if self.routed_experts.numel():
            highest = int(self.routed_experts.max())
            require(highest < self.num_experts, f"expert id {highest} is outside 0 .. {self.num_experts - 1}.")

    @property
    def num_sequences(self) -> int:
        """S, prompts times samples of each."""
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        """[S] int64 tokens of every sequence."""
        return self.cu_seqlens.diff()

    @property
    def sequence_of_token(self) -> Tensor:
        """[T] int64 sequence of every token."""
        return torch.arange(self.num_sequences).repeat_interleave(self.lengths)

    @property
    def positions(self) -> Tensor:
        """[T] int64 place of every token in its sequence."""
        return torch.arange(len(self.tokens)) - self.cu_seqlens[:-1][self.sequence_of_token]

    def select(self, sequences: Tensor) -> Self:
        """Return the given sequences `[n]` int64 (indices), in the given order; groups must stay adjacent."""
        lengths = self.lengths[sequences]
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        start_of_token = (self.cu_seqlens[:-1][sequences] - bounds[:-1]).repeat_interleave(lengths)
        rows = start_of_token + torch.arange(int(bounds[-1]))
        per_token = {name: getattr(self, name)[rows] for name in _PER_TOKEN}
        per_sequence = {name: getattr(self, name)[sequences] for name in _PER_SEQUENCE}
        return replace(self, cu_seqlens=bounds, **per_token, **per_sequence)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return the sequences of all parts, one after the other; they share the temperature and E."""
        require(len(parts) > 0, "there are no rollouts to concatenate.")
        first = parts[0]
        for part in parts[1:]:
            require(
                (part.temperature, part.num_experts) == (first.temperature, first.num_experts),
                "rollouts of different temperatures or numbers of experts cannot be concatenated.",
            )
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in (*_PER_TOKEN, *_PER_SEQUENCE)}
        lengths = torch.cat([part.lengths for part in parts])
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return cls(cu_seqlens=bounds, temperature=first.temperature, num_experts=first.num_experts, **joined)

    def state(self) -> dict[str, Tensor | float | int]:
        """Return every field by name: what `Rollouts(**state)` takes, for a checkpoint or a broadcast."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def trace(self, *, model: str, step: int) -> RoutingTrace:
        """Return the routes as a trace: one row per token, `valid` = `routed`, `group_id` = `problem_id`."""
        routes: NDArray[Any] = self.routed_experts.numpy().astype(route_dtype(self.num_experts))
        return RoutingTrace(
            routed_experts=routes,
            valid=self.routed.numpy().copy(),
            cu_seqlens=self.cu_seqlens.numpy().copy(),
            num_experts=self.num_experts,
            moe_layer_ids=tuple(range(self.routed_experts.shape[1])),
            sample_id=np.arange(self.num_sequences, dtype=np.int64),
            group_id=self.problem_id.numpy().copy(),
            step=np.full(self.num_sequences, step, np.int32),
            micro_batch=np.full(self.num_sequences, -1, np.int32),
            dp_rank=np.full(self.num_sequences, -1, np.int32),
            provenance="R3",
            model=model,
            policy_version=self.policy_version.numpy().astype(np.int32),
            router_logprobs=self.router_logprobs.numpy().astype(np.float16),
        )
