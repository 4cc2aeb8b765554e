"""A stand-in of MoonEP over gloo, so that a dispatcher which deals rows out by itself runs on a CPU.

Nothing of the real package is in it. `Buffer` follows the API walkthrough of MoonEP's README
(https://github.com/MoonshotAI/MoonEP): a rank has `epn` experts in the order of its weights and as many slots for
copies; `dispatch` gives every rank floor(total K / R) rows, one more on the first ranks, grouped by expert and slot;
`prefetch_weight` brings the weights of the slots' experts, `reduce_grad` takes their gradients home, `combine` brings
rows back. By its description NVIDIA/Megatron-LM's pull request 7450 does the same inside HybridEP ("virtual experts":
the router's choices stay, selected weights move, replica gradients return to the original experts).

Other than the real one it takes any type of number, one list of tensors for all projections, and its planner is the
greedy one that `moe_rl.planner.domain_engine.level_exactly` repeats. Nothing here tells of the kernels.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class MoonEPCommPlan:
    """Where the rows of one dispatch go."""

    num_tokens: int
    order: torch.Tensor
    """[s K] (token, choice) pairs of this rank in the order in which they are sent."""
    sent: list[int]
    received: list[int]
    group_row: torch.Tensor
    """[rows] received row that stands at each place, by expert or slot."""
    counts: list[int]
    """[2 epn] rows of every expert, then of every slot."""
    slots: list[list[int]]
    """Of every rank, the experts in its slots, -1 in an empty one."""


class Buffer:
    """moonep: `Buffer`."""

    def __init__(self, *, K: int, E: int, num_ep_ranks: int, group: dist.ProcessGroup) -> None:
        self.top_k, self.epn, self.group = K, E // num_ep_ranks, group
        self.rank, self.ranks = group.rank(), num_ep_ranks

    def dispatch(
        self,
        hidden: torch.Tensor,
        route_weights: torch.Tensor,
        topk_experts: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        plan: MoonEPCommPlan | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, MoonEPCommPlan]:
        """Return rows and weights by expert and slot, their ends, and the plan; with `plan` the same way again."""
        plan = plan or self._plan(topk_experts, tokens_per_expert)
        token = plan.order // self.top_k
        rows = self._sent(hidden[token], plan)[plan.group_row]
        weights = self._sent(route_weights.reshape(-1)[plan.order], plan)[plan.group_row]
        return rows, weights, torch.tensor(plan.counts).cumsum(0), plan

    def combine(
        self, *, plan: MoonEPCommPlan, hidden: torch.Tensor, route_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [s, H] sums of every token's rows, and [s, K] of what stands beside them."""
        found = []
        for values in (hidden, route_weights):
            received = torch.empty_like(values)
            received[plan.group_row] = values
            back = values.new_empty(sum(plan.sent), *values.shape[1:])
            dist.all_to_all_single(back, received, plan.sent, plan.received, group=self.group)
            found.append(back)
        sums = hidden.new_zeros(plan.num_tokens, hidden.shape[1]).index_add_(0, plan.order // self.top_k, found[0])
        beside = route_weights.new_zeros(plan.num_tokens * self.top_k)
        beside[plan.order] = found[1]
        return sums, beside.view(plan.num_tokens, self.top_k)

    def prefetch_weight(self, *, plan: MoonEPCommPlan, local: list[torch.Tensor], prefetch: list[torch.Tensor]) -> None:
        """Fill `prefetch` [epn, ...] with the weights of the experts in this rank's slots."""
        for own, slots in zip(local, prefetch, strict=True):
            everyone = [torch.empty_like(own) for _ in range(self.ranks)]
            dist.all_gather(everyone, own, group=self.group)
            for slot, expert in enumerate(plan.slots[self.rank]):
                if expert >= 0:
                    slots[slot] = everyone[expert // self.epn][expert % self.epn]

    def reduce_grad(self, *, plan: MoonEPCommPlan, local: list[torch.Tensor], reduce: list[torch.Tensor]) -> None:
        """Add the gradients [epn, ...] of all ranks' slots to those of the experts' own ranks."""
        for own, slots in zip(local, reduce, strict=True):
            everyone = [torch.empty_like(slots) for _ in range(self.ranks)]
            dist.all_gather(everyone, slots, group=self.group)
            for held, experts in zip(everyone, plan.slots, strict=True):
                for slot, expert in enumerate(experts):
                    if expert // self.epn == self.rank:
                        own[expert % self.epn] += held[slot]

    def _sent(self, values: torch.Tensor, plan: MoonEPCommPlan) -> torch.Tensor:
        received = values.new_empty(sum(plan.received), *values.shape[1:])
        dist.all_to_all_single(received, values.contiguous(), plan.received, plan.sent, group=self.group)
        return received

    def _plan(self, topk_experts: torch.Tensor, tokens_per_expert: torch.Tensor) -> MoonEPCommPlan:
        if int(tokens_per_expert.sum()) != topk_experts.numel():
            raise AssertionError("tokens_per_expert does not sum to s K.")
        everyone = [torch.empty_like(tokens_per_expert) for _ in range(self.ranks)]
        dist.all_gather(everyone, tokens_per_expert, group=self.group)
        by_source = torch.stack(everyone)  # [R, E]
        instances = self._instances(by_source.sum(dim=0))  # expert -> [(rank, row of the VM group, rows)]
        slots = [[-1] * self.epn for _ in range(self.ranks)]
        for expert, copies in instances.items():
            for rank, row, _ in copies[1:]:
                slots[rank][row - self.epn] = expert
        # An expert's rows, source by source in their order, fill its instances one after the other.
        before = by_source.cumsum(0) - by_source
        target = torch.empty(topk_experts.numel(), 2, dtype=torch.int64)
        mine = torch.zeros(self.ranks, self.ranks, 2 * self.epn, dtype=torch.int64)  # [source, rank, row]
        for expert, copies in instances.items():
            start = 0
            own = (topk_experts.reshape(-1) == expert).nonzero()[:, 0]
            ordinal = int(before[self.rank, expert]) + torch.arange(len(own))
            for rank, row, rows in copies:
                target[own[(ordinal >= start) & (ordinal < start + rows)]] = torch.tensor([rank, row])
                for source in range(self.ranks):
                    first = int(before[source, expert])
                    last = first + int(by_source[source, expert])
                    mine[source, rank, row] += max(0, min(last, start + rows) - max(first, start))
                start += rows
        order = torch.argsort(target[:, 0] * 2 * self.epn + target[:, 1], stable=True)
        received = mine[:, self.rank]  # [source, row]
        row_of = torch.cat([torch.arange(2 * self.epn).repeat_interleave(each) for each in received])
        return MoonEPCommPlan(
            num_tokens=len(topk_experts),
            order=order,
            sent=mine[self.rank].sum(dim=1).tolist(),
            received=received.sum(dim=1).tolist(),
            group_row=torch.argsort(row_of, stable=True),
            counts=received.sum(dim=0).tolist(),
            slots=slots,
        )

    def _instances(self, rows: torch.Tensor) -> dict[int, list[tuple[int, int, int]]]:
        """Return where the rows [E] of every expert are computed: its own rank first, then slots."""
        left = rows.view(self.ranks, self.epn).clone()
        total = int(rows.sum())
        share = [total // self.ranks + (rank < total % self.ranks) for rank in range(self.ranks)]
        excess = [int(left[rank].sum()) - share[rank] for rank in range(self.ranks)]
        copies: dict[int, list[tuple[int, int, int]]] = {expert: [] for expert in range(len(rows))}
        while max(excess) > 0:
            giver, taker = excess.index(max(excess)), excess.index(min(excess))
            lacks, slot = -excess[taker], self.epn
            excess[giver] -= lacks
            excess[taker] = 0
            while lacks:
                local = int(left[giver].argmax())
                moved = min(lacks, int(left[giver, local]))
                copies[giver * self.epn + local].append((taker, slot, moved))
                left[giver, local] -= moved
                lacks, slot = lacks - moved, slot + 1
        return {
            expert: [(expert // self.epn, expert % self.epn, int(left.view(-1)[expert])), *found]
            for expert, found in copies.items()
        }
