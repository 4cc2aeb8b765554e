"""Expert tensor parallelism: every expert is cut into parts, which are placed and loaded as experts of their own.

So Megatron's flex dispatcher sends tokens: to all parts of an expert. Its alltoall gathers the parts' rows in a node,
in no more time. Example: 4 experts on EP2 with 2 parts are 8 parts on 4 ranks. Ranks 0 and 1 hold the parts 0 and 1 of
experts 0 and 1, so parts are numbered
    rank 0: (expert 0, part 0), (expert 1, part 0)    rank 1: (expert 0, part 1), (expert 1, part 1)    rank 2: ...
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.trace import RoutingTrace, SequenceCounts, route_dtype
from moe_rl.replay import Trace, TraceSource
from moe_rl.replay.traces import Progress


def model_in_parts(model: MoeModelSpec, parts: int) -> MoeModelSpec:
    """Return the model whose experts are the parts that expert TP cuts its experts into; a token goes to all parts."""
    width = model.moe_ffn_hidden_size
    require(
        width % parts == 0, f"the expert tensor-parallel size ({parts}) does not divide moe_ffn_hidden_size ({width})."
    )
    return replace(
        model, num_experts=model.num_experts * parts, top_k=model.top_k * parts, moe_ffn_hidden_size=width // parts
    )


def model_of_whole_experts(model: MoeModelSpec, parts: int) -> MoeModelSpec:
    """Return the model that `model_in_parts` cut: rollout engines and weight syncs have its experts whole."""
    return replace(
        model,
        num_experts=model.num_experts // parts,
        top_k=model.top_k // parts,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size * parts,
    )


def part_numbers(num_experts: int, *, ep_size: int, parts: int) -> NDArray[np.int64]:
    """Return [E, parts] numbers of the parts of every expert, in the order of the ranks that Megatron gives them to."""
    per_rank = num_experts // ep_size
    expert, part = np.arange(num_experts)[:, None], np.arange(parts)[None, :]
    numbers: NDArray[np.int64] = (expert // per_rank * parts + part) * per_rank + expert % per_rank
    return numbers


@dataclass(frozen=True, kw_only=True)
class PartsOfExperts(TraceSource):
    """A trace whose experts are parts of another's."""

    whole: TraceSource
    numbers: NDArray[np.int64]
    """[E, parts] of the whole trace's experts."""

    @classmethod
    def of(cls, source: TraceSource, *, ep_size: int, parts: int) -> Self:
        """Return the trace for EP groups of `ep_size` ranks, each of which is `parts` ranks of expert TP."""
        require(
            source.num_experts % ep_size == 0,
            f"--ep {ep_size} does not divide the {source.num_experts} experts of the trace.",
        )
        facts: dict[str, Any] = {item.name: getattr(source, item.name) for item in fields(TraceSource)}
        facts |= {"num_experts": source.num_experts * parts, "top_k": source.top_k * parts}
        numbers = part_numbers(source.num_experts, ep_size=ep_size, parts=parts)
        return cls(**facts, whole=source, numbers=numbers)

    def parts(self, step: int | None = None) -> Iterator[Trace]:
        """Yield the pieces of the whole trace with their experts in parts."""
        for piece in self.whole.parts(step):
            yield self._of_routes(piece) if isinstance(piece, RoutingTrace) else self._of_counts(piece)

    def validate(self, progress: Progress | None = None) -> None:
        """Check the whole trace."""
        self.whole.validate(progress)

    def _of_routes(self, piece: RoutingTrace) -> RoutingTrace:
        numbers = self.numbers.astype(route_dtype(self.num_experts))
        routes: NDArray[Any] = numbers[piece.routed_experts].reshape(*piece.routed_experts.shape[:2], self.top_k)
        # What the router said of an expert is not said of its parts.
        return replace(piece, routed_experts=routes, num_experts=self.num_experts, router_logprobs=None)

    def _of_counts(self, piece: SequenceCounts) -> SequenceCounts:
        # [sequences, layers, E * parts]; each part of an expert gets all of the expert's tokens.
        counts = np.zeros((*piece.tokens_per_expert.shape[:2], self.num_experts), piece.tokens_per_expert.dtype)
        counts[:, :, self.numbers] = piece.tokens_per_expert[..., None]
        return replace(piece, tokens_per_expert=counts, top_k=self.top_k)
