"""The placement policies of the published-picture study, on expected shares: x[e, p], rows of each expert on each rank.

Written from their description, apart from the planners, so that the simulator is checked without them.
"""

import numpy as np

Shares = np.ndarray
RANKS_PER_NODE = 8


def contiguous(experts: int, ranks: int) -> Shares:
    """x of Megatron's placement, [E, P]."""
    return (np.arange(experts)[:, None] // (experts // ranks) == np.arange(ranks)).astype(float)


def eplb(weight: Shares, ranks: int, redundant: int = 1) -> Shares:
    """Flat EPLB: replicas to the largest load per replica, sorted slots to the least loaded rank; equal shares."""
    experts = len(weight)
    count = np.ones(experts, int)
    for _ in range(ranks * redundant):
        count[np.argmax(weight / count)] += 1
    slots = np.repeat(np.arange(experts), count)
    each = (weight / count)[slots]
    load, free = np.zeros(ranks), np.full(ranks, experts // ranks + redundant)
    held = np.zeros((experts, ranks))
    for slot in np.argsort(-each, kind="stable"):
        expert = slots[slot]
        usable = free > 0
        fresh = usable & (held[expert] == 0)
        rank = np.argmin(np.where(fresh if fresh.any() else usable, load, np.inf))
        held[expert, rank] += 1
        load[rank] += each[slot]
        free[rank] -= 1
    return held / count[:, None]


def heaviest_first(weight: Shares, bins: int) -> np.ndarray:
    """LPT: bin of each expert, equal numbers per bin."""
    room, load = np.full(bins, len(weight) // bins), np.zeros(bins)
    place = np.zeros(len(weight), int)
    for expert in np.argsort(-weight, kind="stable"):
        best = np.argmin(np.where(room > 0, load, np.inf))
        place[expert] = best
        load[best] += weight[expert]
        room[best] -= 1
    return place


def ranks_within_nodes(weight: Shares, node: np.ndarray, ranks: int) -> np.ndarray:
    """Home rank of each expert: LPT inside every node."""
    per_node = min(ranks, RANKS_PER_NODE)
    home = np.zeros(len(weight), int)
    for one in range(max(1, ranks // RANKS_PER_NODE)):
        mine = np.flatnonzero(node == one)
        home[mine] = one * per_node + heaviest_first(weight[mine], per_node)
    return home


def swap_nodes(loads: Shares, node: np.ndarray, rng: np.random.Generator, proposals: int = 400) -> np.ndarray:
    """Random swaps of experts between nodes, kept if the mean over micro-batches of the largest node load falls.

    `loads` [M, E].
    """
    nodes = int(node.max()) + 1
    node = node.copy()
    if nodes == 1:
        return node
    per_node = np.stack([loads[:, node == one].sum(axis=1) for one in range(nodes)], axis=1)
    best = per_node.max(axis=1).mean()
    for _ in range(proposals):
        first, second = rng.integers(0, len(node), 2)
        if node[first] == node[second]:
            continue
        moved = loads[:, first] - loads[:, second]
        tried = per_node.copy()
        tried[:, node[first]] -= moved
        tried[:, node[second]] += moved
        if tried.max(axis=1).mean() < best:
            best, per_node = tried.max(axis=1).mean(), tried
            node[first], node[second] = node[second], node[first]
    return node


def replicate(load: Shares, home: np.ndarray, ranks: int, slots: int = 2) -> tuple[Shares, int]:
    """Greedy replication of one micro-batch inside every node: (x [E, P], most slots used on one rank)."""
    per_node = min(ranks, RANKS_PER_NODE)
    rows = np.zeros((len(load), ranks))
    rows[np.arange(len(load)), home] = load
    used = np.zeros(ranks, int)
    for first in range(0, ranks, per_node):
        here = np.arange(first, first + per_node)
        total = rows[:, here].sum(axis=0)
        target = total.mean()
        for _ in range(slots * per_node):
            hot = int(total.argmax())
            if total[hot] <= 1.02 * target:
                break
            candidates = np.flatnonzero((used[here] < slots) & (total < target))
            if not len(candidates):
                break
            cold = int(candidates[total[candidates].argmin()])
            expert = int(rows[:, here[hot]].argmax())
            amount = min(rows[expert, here[hot]], total[hot] - target, target - total[cold])
            if amount < 0.01 * target:
                break
            used[here[cold]] += rows[expert, here[cold]] == 0
            rows[expert, here[hot]] -= amount
            rows[expert, here[cold]] += amount
            total[hot] -= amount
            total[cold] += amount
    share = np.divide(rows, load[:, None], out=np.zeros_like(rows), where=load[:, None] > 0)
    return share, int(used.max())
