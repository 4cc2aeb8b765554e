"""A stand-in of DeepEP over gloo, so that Megatron's flex dispatcher runs on a CPU.

Nothing of the real package is in it. `Buffer` follows the docstrings of the normal kernels in deep_ep/buffer.py of
https://github.com/deepseek-ai/DeepEP, `HybridEPBuffer` those in deep_ep/hybrid_ep_buffer.py of its branch hybrid-ep, as
far as Megatron-Core calls them. It is strict: rows that are combined must be bfloat16, as DeepEP's kernels want them
(unless `any_float` is open, for comparisons in float32); a handle is used with its own group and number of rows alone.
A `HybridEPBuffer` counts how often it would have been allocated again. Nothing here tells of the kernels.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deep_ep.utils import EventHandle, EventOverlap

_widened = False


@contextlib.contextmanager
def any_float() -> Iterator[None]:
    """Combine rows of any floating type inside, wider than DeepEP."""
    global _widened
    _widened = True
    try:
        yield
    finally:
        _widened = False


@dataclass(frozen=True)
class Config:
    """Sizes that grow with what they are asked for, so that Megatron's growth of its buffer is exercised."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes inside a node."""
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes between nodes."""
        return 0


@dataclass(frozen=True, eq=False)
class _Handle:
    """What the way back, and the same way again, need of a dispatch."""

    group: Any
    num_tokens: int
    sent_token: torch.Tensor
    """[sent] token of every copy sent, rank by rank, within one in token order."""
    sent_counts: list[int]
    received_counts: list[int]

    @classmethod
    def of(cls, group: Any, in_rank: torch.Tensor) -> "_Handle":
        """Exchange the counts of copies; `in_rank` [tokens, ranks] says where every token goes."""
        sent_counts = in_rank.sum(dim=0)
        received = torch.empty_like(sent_counts)
        dist.all_to_all_single(received, sent_counts, group=group)
        sent_token = in_rank.t().nonzero()[:, 1]
        return cls(group, len(in_rank), sent_token, sent_counts.tolist(), received.tolist())

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows that arrive here, rank by rank."""
        self._check(x, self.num_tokens)
        out = x.new_empty(sum(self.received_counts), *x.shape[1:])
        rows = x[self.sent_token].contiguous()
        dist.all_to_all_single(out, rows, self.received_counts, self.sent_counts, group=self.group)
        return out

    def give_back(self, x: torch.Tensor) -> torch.Tensor:
        """Return, per token of this rank, the float32 sum of its copies, in the type of `x`."""
        self._check(x, sum(self.received_counts))
        back = x.new_empty(len(self.sent_token), *x.shape[1:])
        dist.all_to_all_single(back, x.contiguous(), self.sent_counts, self.received_counts, group=self.group)
        out = torch.zeros(self.num_tokens, *x.shape[1:], dtype=torch.float32)
        return out.index_add_(0, self.sent_token, back.float()).to(x.dtype)

    def _check(self, x: torch.Tensor, expected: int) -> None:
        if len(x) != expected:
            raise AssertionError(f"{len(x)} rows with a handle of {expected}.")


def _require_bfloat16(x: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16 and not _widened:
        raise AssertionError(f"rows that are combined must be bfloat16, got {x.dtype}.")


class Buffer:
    """deep_ep/buffer.py: `Buffer`."""

    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **_: object) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.rank, self.group_size = group.rank(), group.size()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Buffer.set_num_sms: an even number."""
        if new_num_sms % 2:
            raise AssertionError("The SM count must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Buffer.get_dispatch_config."""
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Buffer.get_dispatch_layout: tokens per rank, per expert, and [tokens, ranks], of [tokens, K], -1 for none."""
        if topk_idx.dtype != torch.int64 or not topk_idx.is_contiguous():
            raise AssertionError("topk_idx must be contiguous int64.")
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        chosen = chosen.scatter(1, topk_idx.where(topk_idx >= 0, num_experts), True)[:, :num_experts]
        in_rank = chosen.view(len(topk_idx), self.group_size, -1).any(-1)
        return in_rank.sum(0).int(), None, chosen.sum(0).int(), in_rank, EventOverlap(EventHandle())

    def dispatch(
        self,
        x: torch.Tensor,
        handle: _Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Buffer.dispatch: every token once to each rank that has one of its experts; with `handle` that again."""
        if not x.is_contiguous() or expert_alignment != 1:
            raise AssertionError("x must be contiguous; expert_alignment is not here.")
        event = EventOverlap(EventHandle())
        if handle is not None:
            if topk_idx is not None or topk_weights is not None or handle.group is not self.group:
                raise AssertionError("a cached dispatch takes its handle alone, one of its own group.")
            return handle.send(x), None, None, None, None, event
        if topk_weights.dtype != torch.float32:
            raise AssertionError("topk_weights must be float32.")
        if not torch.equal(is_token_in_rank.sum(dim=0), num_tokens_per_rank.long()):
            raise AssertionError("num_tokens_per_rank and is_token_in_rank disagree.")
        handle = _Handle.of(self.group, is_token_in_rank)
        per_rank = num_tokens_per_expert.numel() // self.group_size
        local = handle.send(topk_idx) - self.rank * per_rank
        here = (local >= 0) & (local < per_rank)
        local = local.where(here, -1)  # experts of other ranks, and those never chosen
        weights = handle.send(topk_weights).where(here, 0.0)
        counts = torch.bincount(local[here], minlength=per_rank).tolist()
        return handle.send(x), local, weights, counts, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: _Handle,
        topk_weights: torch.Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Buffer.combine: what was received goes back and is summed over ranks, without weights; `topk_weights` too."""
        _require_bfloat16(x)
        if handle.group is not self.group:
            raise AssertionError("the handle is of another group.")
        weights = None if topk_weights is None else handle.give_back(topk_weights)
        return handle.give_back(x), weights, EventOverlap(EventHandle())


@dataclass(frozen=True, eq=False)
class _PermutedHandle:
    """What HybridEP's way back needs beside the way between ranks."""

    between_ranks: _Handle
    num_experts: int
    first_expert: int
    row_token: torch.Tensor
    """[rows] which received token stands there, -1 for a row of padding."""
    row_expert: torch.Tensor
    """[rows] of which local expert."""
    overflow: torch.Tensor
    """1 where rows were dropped, because more came than the buffer of `num_permuted_tokens` holds."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """The last of the real handle's parts is its overflow flag; Megatron reads no other."""
        if index != -1:
            raise AssertionError("only the overflow flag of a handle is read.")
        return self.overflow


class HybridEPBuffer:
    """deep_ep/hybrid_ep_buffer.py: `HybridEPBuffer`; dispatch and combine that permute by themselves."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
    ) -> None:
        self.group, self.size = group, (max_num_of_tokens_per_rank, num_local_experts)
        self.reallocations = 0

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        pad_multiple: int | None = None,
        num_permuted_tokens: Any = None,
        non_blocking: bool = False,
        handle: _PermutedHandle | None = None,
    ) -> tuple[Any, ...]:
        """HybridEPBuffer.dispatch_with_permute: rows, expert by expert, probabilities, scales, counts, handle."""
        if handle is not None:
            return self._rows(handle.between_ranks.send(hidden), handle), None, None, None, handle
        if probs.dtype != torch.float32:
            raise AssertionError("probs must be float32.")
        needed = (len(hidden), num_of_experts_per_rank)
        if any(need > have for need, have in zip(needed, self.size, strict=True)):
            self.size = tuple(max(pair) for pair in zip(needed, self.size, strict=True))
            self.reallocations += 1
        ranks = self.group.size()
        between = _Handle.of(self.group, routing_map.view(len(hidden), ranks, -1).any(-1))
        first = self.group.rank() * num_of_experts_per_rank
        mine = slice(first, first + num_of_experts_per_rank)
        chosen = between.send(routing_map.to(torch.uint8))[:, mine].bool()
        expert_probs = between.send(probs)[:, mine]
        tokens = [chosen[:, expert].nonzero()[:, 0] for expert in range(num_of_experts_per_rank)]
        padded = [torch.nn.functional.pad(t, (0, -len(t) % (pad_multiple or 1)), value=-1) for t in tokens]
        counts = torch.tensor([len(each) for each in padded])
        row_token, row_expert = torch.cat(padded), torch.arange(num_of_experts_per_rank).repeat_interleave(counts)
        room = len(row_token) if num_permuted_tokens is None else int(num_permuted_tokens)
        overflow = torch.tensor(int(len(row_token) > room))
        row_token = torch.nn.functional.pad(row_token[:room], (0, max(0, room - len(row_token))), value=-1)
        row_expert = torch.nn.functional.pad(row_expert[:room], (0, max(0, room - len(row_expert))))
        counts = counts.cumsum(0).clamp(max=room).diff(prepend=torch.zeros(1, dtype=torch.int64))
        handle = _PermutedHandle(
            between_ranks=between,
            num_experts=ranks * num_of_experts_per_rank,
            first_expert=first,
            row_token=row_token,
            row_expert=row_expert,
            overflow=overflow,
        )
        last_is_padding = torch.nn.functional.pad(expert_probs, (0, 0, 0, 1))  # where nothing arrived, too
        row_probs = last_is_padding[handle.row_token, handle.row_expert]
        return self._rows(between.send(hidden), handle), row_probs, None, counts, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: _PermutedHandle,
        pad_multiple: int | None = None,
        num_permuted_tokens: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """HybridEPBuffer.combine_with_unpermute: the sum of every token's rows; `probs` [tokens, experts] likewise."""
        _require_bfloat16(hidden)
        real = handle.row_token >= 0
        token, expert, between = handle.row_token[real], handle.row_expert[real], handle.between_ranks
        received = sum(between.received_counts)
        sums = torch.zeros(received, hidden.shape[1], dtype=torch.float32)
        sums.index_add_(0, token, hidden[real].float())
        combined = between.give_back(sums.to(hidden.dtype))
        if probs is None:
            return combined, None
        of_experts = torch.zeros(received, handle.num_experts)
        of_experts[token, handle.first_expert + expert] = probs[real].float()
        return combined, between.give_back(of_experts)

    @staticmethod
    def _rows(received: torch.Tensor, handle: _PermutedHandle) -> torch.Tensor:
        """Return received tokens as they stand before the experts."""
        real = (handle.row_token >= 0)[:, None]
        return (
            received[handle.row_token.clamp(min=0)].where(real, 0.0)
            if len(received)
            else received.new_zeros(len(handle.row_token), received.shape[1])
        )
