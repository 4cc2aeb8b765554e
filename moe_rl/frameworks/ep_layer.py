"""What one MoE layer does in a pass when its framework spreads the experts: which micro-batch, which ids, which slots.

T tokens of a rank, K choices, E experts, P EP ranks with E/P homes each, R replica slots of a rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.route_counter import RouteCounter
from moe_rl.balancing.slots import SlotTable
from moe_rl.core.errors import require
from moe_rl.frameworks.ep_exchange import ReplicaExchange, slots_of_pairs


@dataclass(slots=True, kw_only=True)
class LayerRun:
    """What one MoE layer of this rank does in the run of it that is under way, and what it did in the pass."""

    index: int
    """Among the model's MoE layers."""
    clock: MicroBatchClock
    homes: torch.Tensor | None = None
    """[E] in which of the E home slots, rank by rank, an expert is; None while that is its own number."""
    targets: list[torch.Tensor | None] = field(default_factory=list)
    """Per micro-batch the replayed ids [T, K], -1 where the router chooses."""
    tables: list[SlotTable | None] = field(default_factory=list)
    exchanges: list[ReplicaExchange | None] = field(default_factory=list)
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    """[P] rows that this rank sent to every EP rank, by micro-batch."""
    micro_batch: int = -1
    """Of the run that is under way; -1 outside of passes, and in a forward that is no micro-batch of one."""
    recomputing: bool = False
    counter: RouteCounter | None = None
    """Hears what the router chooses; None where nobody asks."""
    leave: Callable[[], None] = lambda: None
    """Gives the layer's module back what the run that is under way has changed of it."""

    def begin(self, targets: Sequence[torch.Tensor | None], num_micro_batches: int) -> None:
        """Start a pass of M micro-batches that replays `targets`, without replicas."""
        self.sent.clear()
        self.targets = [*targets, *[None] * (num_micro_batches - len(targets))]
        self.tables, self.exchanges = [None] * num_micro_batches, [None] * num_micro_batches

    def enter(self) -> torch.Tensor | None:
        """Note which micro-batch the layer is in now, once per run of it; return its replayed ids, if any."""
        self.micro_batch = -1
        if self.clock.current_pass is None:
            return None
        self.recomputing = self.clock.recomputing
        self.micro_batch = self.clock.micro_batch(self.index)
        if not self.planned:
            return None
        return self.targets[self.micro_batch]

    @property
    def planned(self) -> bool:
        """Whether the run that is under way is of a micro-batch that was announced.

        In another one, of a loop that accumulates over more than it said, the router chooses, without copies.
        """
        return 0 <= self.micro_batch < len(self.targets)

    def routed(self, router: Any, forward: Callable[..., Any], hidden_states: torch.Tensor, *args: Any) -> Any:
        """Enter the layer, and return what `forward` of its router returns when it takes the replayed ids."""
        targets = self.enter()
        if targets is None:
            return forward(hidden_states, *args)
        num_tokens = hidden_states.numel() // hidden_states.shape[-1]
        require(
            len(targets) == num_tokens,
            f"there are routes for {len(targets)} tokens of micro-batch {self.micro_batch}, but the router gets "
            f"{num_tokens}.",
        )
        with ReplayedTopK(targets, (num_tokens, router.num_experts), router.top_k) as mode:
            output = forward(hidden_states, *args)
        require(
            mode.replayed,
            f"{type(router).__name__} does not choose experts with torch.topk, so it cannot replay routes.",
        )
        return output

    @property
    def exchange(self) -> ReplicaExchange | None:
        """The copies of the run of the layer that is under way; None without."""
        if not self.planned:
            return None
        return self.exchanges[self.micro_batch]

    def slots(self, ids: torch.Tensor, num_experts: int, num_homes: int) -> torch.Tensor:
        """Return [T, K] the slot of every pair of `ids` [T, K], and count which rank it goes to.

        Slots count rank by rank, E/P homes and then R replica slots where the run has copies; `ids` itself where slots
        and experts are the same. No host sync.
        """
        exchange = self.exchange
        slots, per_rank = ids, num_homes
        if exchange is not None or self.homes is not None:
            if self.homes is None:
                home = torch.arange(num_experts, device=ids.device)
            else:
                home = self.homes
            if exchange is None:
                slots = home[ids]
            else:
                per_rank += exchange.num_replica_slots
                table = self.tables[self.micro_batch]
                assert table is not None  # where there are copies, there is their table
                slots = slots_of_pairs(table, ids, home // num_homes * per_rank + home % num_homes)
        # Recomputation runs the layer twice, and its rows were sent once.
        if self.micro_batch >= 0 and not self.recomputing:
            if self.counter is not None:
                self.counter.count_ids(self.micro_batch, self.index, ids.detach())
            rank = (slots // per_rank).flatten()
            nothing = torch.zeros(num_experts // num_homes, dtype=torch.int64, device=ids.device)
            self.sent[self.micro_batch] = nothing.scatter_add(0, rank, torch.ones_like(rank))
        return slots


class ReplayedTopK(torch.overrides.TorchFunctionMode):
    """Replays the choice where the router makes it: in its `topk` over the experts.

    Scores, normalization, scaling and the gradient through them stay the router's, whatever its family; only which
    experts it took is given. The groups of a group-limited router are chosen by other calls of `topk`.
    """

    def __init__(self, ids: torch.Tensor, scores_shape: tuple[int, ...], top_k: int) -> None:
        super().__init__()
        self._ids, self._shape, self._top_k = ids, scores_shape, top_k
        self.replayed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        # A group-limited router also asks topk for groups: its scores have another shape.
        if tuple(scores.shape) != self._shape or found.indices.shape[1] != self._top_k:
            return found
        self.replayed = True
        ids = torch.where((self._ids >= 0).all(dim=1, keepdim=True), self._ids, found.indices)
        return torch.return_types.topk((scores.gather(1, ids), ids))
