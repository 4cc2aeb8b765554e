"""Sequences that are split over ranks: one sum over the context-parallel group gives every per-sequence quantity.

A rank holds a part of each sequence, the same sequences in the same order as its group. What a formula says about a
sequence (its length, its mean log-ratio, its largest token) is then a sum, or a maximum, over the group; the rest stays
per token. The loss of a rank is its share: the shares of the group add up to the loss of the whole sequences, and so do
the gradients.

    split over 2 ranks, 8 tokens     contiguous              zigzag (Megatron, Transformer Engine: causal attention
    rank 0                           t0 t1 t2 t3             t0 t1 t6 t7   costs every rank the same)
    rank 1                           t4 t5 t6 t7             t2 t3 t4 t5

The split only matters where the order of tokens does (prefix ratios).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.options import Options, option

# Sums a tensor over ranks and returns the sum; `moe_rl.importance.all_reduce_sum` makes one.
SumReducer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextParallel(Options):
    """This rank's place in its context-parallel group, and the sum over the group."""

    rank: int = option(0, at_least=0)
    size: int = option(1, at_least=1)
    split: Literal["contiguous", "zigzag"] = "zigzag"
    """How a sequence was cut: into `size` parts, or into 2 `size` of which rank r has number r and 2 size - 1 - r."""
    sum_over_group: SumReducer | None = None

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        require(self.rank < self.size, f"rank {self.rank} must be less than size {self.size}.")
        require(
            self.size == 1 or self.sum_over_group is not None,
            "context parallelism with size above 1 needs sum_over_group.",
        )

    @classmethod
    def whole(cls) -> Self:
        """Every sequence is whole on this rank, also where the model runs under context parallelism (gathered)."""
        return cls()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the group, differentiable: each rank's loss share depends on every rank's tokens."""
        if self.sum_over_group is None or self.size == 1:
            return values
        summed: Tensor = _Sum.apply(values, self.sum_over_group)
        return summed

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the group, detached."""
        if self.size == 1:
            return values
        # A maximum from the only collective there is, the sum: one row per rank, zeros in the others'.
        places = values.new_zeros(self.size, *values.shape)
        places[self.rank] = values.detach()
        return self.sum(places).amax(dim=0)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Numbers of this rank's parts of a sequence, of `size` or (zigzag) 2 `size`; one part where nothing is cut."""
        if self.split == "contiguous" or self.size == 1:
            return (self.rank,)
        return (self.rank, 2 * self.size - 1 - self.rank)

    def after(self, chunk_sums: Tensor) -> Tensor:
        """Return the sums of what follows each of this rank's parts in its sequence: [N, parts]."""
        if self.size == 1:
            return torch.zeros_like(chunk_sums)
        # All parts, since a zigzag split gives a rank two that lie apart: [N, size * parts], in the sequence's order.
        sums_of_chunks = chunk_sums.new_zeros(chunk_sums.shape[0], self.size * len(self.chunks))
        sums_of_chunks[:, list(self.chunks)] = chunk_sums.detach()
        columns = self.sum(sums_of_chunks).unbind(dim=1)
        sums_behind = [torch.zeros_like(columns[0])]
        # From the last part back: behind part i stand part i + 1 and what stands behind that.
        for sums in reversed(columns[1:]):
            sums_behind.append(sums + sums_behind[-1])
        return torch.stack(sums_behind[::-1], dim=1)[:, list(self.chunks)]


class _Sum(torch.autograd.Function):
    """y = sum over ranks of x; every rank's y feeds its own loss share, so the gradient is summed over ranks too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, reduce: SumReducer) -> Tensor:
        ctx.reduce = reduce
        return reduce(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # `.sum().backward()` hands over an expanded gradient, whose strides of 0 no collective takes.
        return ctx.reduce(grads[0].contiguous()), None


_WHOLE = ContextParallel()


# Who may split sequences in this process: a module, what is truthy when its groups exist, and the number of ranks.
_SPLITTERS = (
    ("megatron.core.parallel_state", "model_parallel_is_initialized", "get_context_parallel_world_size"),
    ("verl.utils.ulysses", "get_ulysses_sequence_parallel_group", "get_ulysses_sequence_parallel_world_size"),
)


def known_context_parallel(context: ContextParallel | None) -> ContextParallel:
    """Return what was given, or whole sequences; raise where somebody in this process splits them and nothing was."""
    if context is None and not torch.compiler.is_compiling():
        for name, ready, ranks in _SPLITTERS:
            # Looked up and never imported: without Megatron and verl this costs two lookups.
            module = sys.modules.get(name)
            size = 1
            if module is not None and getattr(module, ready)():
                size = getattr(module, ranks)()
            if size > 1:
                raise InvalidInputError(
                    f"{name} splits sequences over {size} context-parallel ranks: pass "
                    "context_parallel=context_parallel_of(group), or ContextParallel.whole() if this rank has whole "
                    "sequences."
                )
    if context is None:
        return _WHOLE
    return context
