"""Rows over the instances of a placement by augmenting paths: the same steps and results as csrc/split.cpp."""

Part = tuple[int, list[int]]
"""Rows of an expert, and the distinct ranks that may compute them."""


def split_fits(room: list[int], parts: list[Part]) -> list[list[int]] | None:
    """Return rows per (part, holder) such that no rank takes more than its room, or None if there is no such split."""
    if any(rows < 0 for rows in room):
        return None
    left = list(room)
    taken = [[0] * len(holders) for _, holders in parts]
    for part, (rows, _) in enumerate(parts):
        while rows > 0:
            sent = _augment(part, rows, left, parts, taken)
            if sent == 0:
                return None
            rows -= sent
    return taken


def _augment(part: int, rows: int, left: list[int], parts: list[Part], taken: list[list[int]]) -> int:
    """Send rows of `part` along a shortest path to a rank with room; return how many."""
    reached: list[int] = []
    came: dict[int, tuple[int, int, int]] = {}

    def reach(from_rank: int, via: int) -> None:
        for holder, rank in enumerate(parts[via][1]):
            if rank not in came:
                came[rank] = (from_rank, via, holder)
                reached.append(rank)

    reach(-1, part)
    at = 0
    while at < len(reached):
        rank = reached[at]
        if left[rank] > 0:
            return _apply(rank, rows, left, parts, taken, came)
        for other in range(len(parts)):
            if _rows_of(other, rank, parts, taken) > 0:
                reach(rank, other)
        at += 1
    return 0


def _apply(
    last: int,
    rows: int,
    left: list[int],
    parts: list[Part],
    taken: list[list[int]],
    came: dict[int, tuple[int, int, int]],
) -> int:
    sent = min(rows, left[last])
    rank = last
    while came[rank][0] >= 0:
        from_rank, part, _ = came[rank]
        sent = min(sent, _rows_of(part, from_rank, parts, taken))
        rank = from_rank
    left[last] -= sent
    rank = last
    while True:
        from_rank, part, holder = came[rank]
        taken[part][holder] += sent
        if from_rank < 0:
            return sent
        taken[part][parts[part][1].index(from_rank)] -= sent
        rank = from_rank


def _rows_of(part: int, rank: int, parts: list[Part], taken: list[list[int]]) -> int:
    holders = parts[part][1]
    return taken[part][holders.index(rank)] if rank in holders else 0
