"""Replicas of one (EP group, micro-batch, layer), in plain Python: the same steps and results as csrc/planner_cell.cpp.

For machines without the C++ core, where it plans small problems. E experts, P ranks, N nodes; loads are integers.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from moe_rl.core.cost import LayerCostParams, LayerRows, layer_time
from moe_rl.planner.domain import Copy, Domain, Limits

NODE_SLACK_PPM = (0, 2500, 5000, 7500, 10000, 15000, 20000, 30000, 40000, 60000, 80000, 120000)
"""Excess of the highest node over the mean that a set of cross-node copies may leave, in millionths."""
RANK_SLACK_PPM = (0, 10000, 20000, 50000)
"""Excess of the highest rank over the node-limited floor that is tried when copies have a price."""
PPM = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateOptions:
    """What the planner of a cell may do."""

    slots: int
    cross_slots: int
    cost: LayerCostParams | None
    """Prices of objective "time"; None: only the highest rank load counts."""
    reuse: bool
    min_quota: int
    search_nodes: int
    tolerance_ppm: int
    cross_gain_ppm: int


@dataclass(slots=True, kw_only=True)
class CellPlan:
    """Copies on ranks of the home's node, and of other nodes."""

    inside: list[Copy] = field(default_factory=list)
    across: list[Copy] = field(default_factory=list)
    highest_load: int = 0
    time_s: float = 0.0
    time_without_copies_s: float = 0.0


class CellPlanner:
    """Plans one cell: `rows` [E], `home` [E] ranks, `tokens` on all source ranks together."""

    def __init__(
        self, options: ReplicateOptions, rows: list[int], home: list[int], tokens: int, ranks: int, per_node: int
    ) -> None:
        self.options, self.rows, self.home, self.tokens = options, rows, home, tokens
        self.ranks, self.per_node, self.nodes = ranks, per_node, ranks // per_node
        self.rank_load, self.node_load = [0] * ranks, [0] * self.nodes
        for load, rank in zip(rows, home, strict=True):
            self.rank_load[rank] += load
            self.node_load[rank // per_node] += load
        self.total = sum(rows)

    def plan(self, previous: CellPlan | None) -> CellPlan:
        """Return the plan; `previous` is that of the micro-batch before."""
        before = previous if self.options.reuse else None
        best = CellPlan(highest_load=max(self.rank_load))
        if self.options.cost is not None:
            return self._cheapest(best, before, self.options.cost)
        across = CellPlan(across=self._cross_node_choices()[0])
        self._inside_nodes(across, 0, before)
        if across.highest_load < best.highest_load:
            best = across
        floor = -(-max(self.node_load) // self.per_node)
        if across.across and across.highest_load > floor:
            inside = CellPlan()
            self._inside_nodes(inside, 0, before)
            if inside.highest_load <= best.highest_load:
                best = inside
        return best

    def _cheapest(self, best: CellPlan, before: CellPlan | None, cost: LayerCostParams) -> CellPlan:
        alone = best.time_s = best.time_without_copies_s = self._seconds(best, cost)
        for across in self._cross_node_choices() if self.total else ():
            tries = []
            if across:
                highest = max(domain.highest for domain in self._domains(across))
                tries.append(CellPlan(across=across, highest_load=highest))
            for slack in RANK_SLACK_PPM:
                plan = CellPlan(across=across)
                self._inside_nodes(plan, slack, before)
                if plan.inside:
                    tries.append(plan)
            for plan in tries:
                plan.time_s = self._seconds(plan, cost)
                if plan.time_s < best.time_s:
                    best = plan
                    best.time_without_copies_s = alone
        return best

    def _cross_node_choices(self) -> list[list[Copy]]:
        """Return the sets of cross-node copies to try, fewest first; the one that is worth most without prices."""
        if self.options.cross_slots == 0 or self.nodes == 1 or self.total == 0:
            return [[]]
        mean, highest = -(-self.total // self.nodes), max(self.node_load)
        best_worth, best = highest * PPM, list[Copy]()
        choices: list[list[Copy]] = []
        for slack in NODE_SLACK_PPM:
            target = mean + mean * slack // PPM
            if target >= highest:
                break
            copies = self._cross_node_copies(target)
            if copies is None:
                continue
            if not choices or len(copies) < len(choices[-1]):
                choices.append(copies)
            worth = target * PPM + mean * self.options.cross_gain_ppm * len(copies)
            if worth < best_worth:
                best_worth, best = worth, copies
        return [best] if self.options.cost is None else [[], *reversed(choices)]

    def _cross_node_copies(self, target: int) -> list[Copy] | None:
        """Move load between nodes until none is above `target`."""
        node_load, rank_load, left = list(self.node_load), list(self.rank_load), list(self.rows)
        received, sent = [0] * self.ranks, [0] * self.ranks
        copies: list[Copy] = []
        for donor in sorted(range(self.nodes), key=lambda node: -self.node_load[node]):
            while node_load[donor] > target:
                receiver, widest = self._receiver(target, node_load, rank_load, received)
                if receiver < 0:
                    return None
                wanted = min(node_load[donor] - target, widest, -(-self.total // self.ranks))
                expert = self._exported(donor, receiver, wanted, left, sent, copies)
                quota = min(wanted, left[expert]) if expert >= 0 else 0
                if expert < 0 or quota < self.options.min_quota:
                    return None
                copies.append(Copy(expert, receiver, quota))
                home = self.home[expert]
                left[expert] -= quota
                node_load[donor] -= quota
                rank_load[home] -= quota
                node_load[receiver // self.per_node] += quota
                rank_load[receiver] += quota
                received[receiver] += 1
                sent[home] += 1
        return copies

    def _receiver(
        self, target: int, node_load: list[int], rank_load: list[int], received: list[int]
    ) -> tuple[int, int]:
        """Return the least loaded rank with a slot on the node with most room, and that room; -1 if there is none."""
        receiver, widest = -1, 0
        for node in range(self.nodes):
            if target - node_load[node] <= widest:
                continue
            ranks = range(node * self.per_node, (node + 1) * self.per_node)
            free = [rank for rank in ranks if received[rank] < self.options.cross_slots]
            if free:
                receiver, widest = min(free, key=lambda rank: rank_load[rank]), target - node_load[node]
        return receiver, widest

    def _exported(
        self, donor: int, receiver: int, wanted: int, left: list[int], sent: list[int], copies: list[Copy]
    ) -> int:
        """Return the expert to copy: one that suffices alone, from the NIC that sends least, then the largest."""
        chosen, best = -1, (False, 0, 0)
        for expert, home in enumerate(self.home):
            if home // self.per_node != donor or left[expert] <= 0:
                continue
            if any(copy.expert == expert and copy.rank == receiver for copy in copies):
                continue
            rating = (left[expert] >= wanted, -sent[home], left[expert])
            if chosen < 0 or rating > best:
                chosen, best = expert, rating
        return chosen

    def _domains(self, across: list[Copy]) -> list[Domain]:
        left = list(self.rows)
        fixed = [[0] * self.per_node for _ in range(self.nodes)]
        for copy in across:
            left[copy.expert] -= copy.quota
            fixed[copy.rank // self.per_node][copy.rank % self.per_node] += copy.quota
        items: list[list[tuple[int, int, int]]] = [[] for _ in range(self.nodes)]
        for expert, home in enumerate(self.home):
            items[home // self.per_node].append((expert, home % self.per_node, left[expert]))
        return [Domain(self.per_node, items[node], fixed[node]) for node in range(self.nodes)]

    def _inside_nodes(self, plan: CellPlan, slack_ppm: int, previous: CellPlan | None) -> None:
        """Balance every node down to one target for all: the lowest that the worst node can reach, times 1 + slack."""
        domains = self._domains(plan.across)
        target = max(-(-self.total // self.ranks), *(-(-domain.total // self.per_node) for domain in domains))
        target += target * slack_ppm // PPM
        limits = Limits(
            slots=self.options.slots,
            min_quota=max(1, self.options.min_quota),
            search_nodes=self.options.search_nodes,
            tolerance=max(1, target * self.options.tolerance_ppm // PPM),
        )
        copies: list[list[Copy]] = [[] for _ in domains]
        for node in sorted(range(self.nodes), key=lambda node: -domains[node].total):
            lowest, copies[node] = domains[node].lowest_target(target, limits)
            target = max(target, lowest)
        plan.highest_load = target
        for node, domain in enumerate(domains):
            if domain.highest <= target:
                continue
            chosen = domain.fewest_copies(target, limits, copies[node])
            again = self._again(node, domain, target, previous)
            first = node * self.per_node
            plan.inside += [Copy(copy.expert, copy.rank + first, copy.quota) for copy in again or chosen]

    def _again(self, node: int, domain: Domain, target: int, previous: CellPlan | None) -> list[Copy] | None:
        """Return the previous micro-batch's copies on this node with new quotas, if they reach the target."""
        first = node * self.per_node
        before = [
            Copy(copy.expert, copy.rank - first, 0)
            for copy in (previous.inside if previous else ())
            if copy.rank // self.per_node == node and self.home[copy.expert] // self.per_node == node
        ]
        return domain.refill(target, before) if before else None

    def _seconds(self, plan: CellPlan, cost: LayerCostParams) -> float:
        return float(layer_time(cost, self._layer_rows(plan, cost.gemm_tile_rows)).total_s)

    def _layer_rows(self, plan: CellPlan, tile_rows: float) -> LayerRows:
        """Return rows, visits and copies, summed in the order of csrc/planner_cell.cpp."""
        rows, padded, active = ([0.0] * self.ranks for _ in range(3))
        rank_stays, node_stays = [0.0] * self.ranks, [0.0] * self.nodes
        left = list(self.rows)

        def add(rank: int, quota: int) -> None:
            if quota:
                rows[rank] += quota
                padded[rank] += math.ceil(quota / tile_rows) * tile_rows
                active[rank] += 1.0
                rank_stays[rank] += self._stays(quota)

        received, crossing, sending = ([0] * self.ranks for _ in range(3))
        abroad: dict[tuple[int, int], int] = {}
        for copy in plan.inside:
            left[copy.expert] -= copy.quota
            add(copy.rank, copy.quota)
            received[copy.rank] += 1
        for copy in plan.across:
            left[copy.expert] -= copy.quota
            add(copy.rank, copy.quota)
            crossing[copy.rank] += 1
            sending[self.home[copy.expert]] += 1
            key = (copy.expert, copy.rank // self.per_node)
            abroad[key] = abroad.get(key, 0) + copy.quota
        for (_, node), quota in abroad.items():
            node_stays[node] += self._stays(quota)
        for expert, total in enumerate(self.rows):
            if total == 0:
                continue
            add(self.home[expert], left[expert])
            away = sum(quota for (other, _), quota in abroad.items() if other == expert)
            node_stays[self.home[expert] // self.per_node] += self._stays(total - away)
        tokens = self.tokens / self.ranks
        visits = np.array([-math.expm1(stay) for stay in node_stays])
        return LayerRows(
            rows=np.array(rows),
            padded_rows=np.array(padded),
            active_experts=np.array(active),
            rank_visits=np.array([tokens * self.ranks * -math.expm1(stay) for stay in rank_stays]),
            nic_ingress=visits * (tokens * (self.nodes - 1)),
            nic_egress=tokens * (sum(visits.tolist()) - visits),
            replicas=np.array(float(max(received))),
            cross_node_replicas=np.array(float(max(*crossing, *sending))),
        )

    def _stays(self, rows: int) -> float:
        share = rows / self.tokens if self.tokens else 0.0
        return math.log1p(-share) if share < 1.0 else -math.inf
