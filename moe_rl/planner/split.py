"""How many pairs every instance takes from every source rank.

N replicas, P ranks, E experts, C cells: a cell is a (EP group, micro-batch, layer) triple as one index
(g * M + m) * L + l. Quotas are integers, never more than a source has, and add up exactly.
"""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require


def equal_source_quotas(
    pairs: NDArray[np.int64], turn: NDArray[np.int64], count: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Deal the pairs of each expert round-robin over its `count` [N] instances; return what `turn` [N] gets, [N, P].

    `pairs` [N, P] are the expert's pairs per source. The deal runs on from one source to the next, so that the
    instances' totals differ by at most one pair, and so do their parts of each source.
    """
    ends = np.cumsum(pairs, axis=1)
    turns = turn[:, None]

    def dealt(up_to: NDArray[np.int64]) -> NDArray[np.int64]:
        dealt_rows: NDArray[np.int64] = (up_to - turns + count[:, None] - 1) // count[:, None]
        return dealt_rows

    quota: NDArray[np.int32] = (dealt(ends) - dealt(ends - pairs)).astype(np.int32)
    return quota


def proportional_source_quotas(
    pairs: NDArray[np.int32],
    *,
    cell: NDArray[np.int64],
    expert: NDArray[np.integer],
    rank: NDArray[np.int64],
    home: NDArray[np.int64],
    quota: NDArray[np.int64],
    local_first: bool,
) -> NDArray[np.int32]:
    """Split the `quota` [N] of every replica over source ranks, [N, P], by the sources' shares of the expert.

    `pairs` is [C, P, E]; `rank` and `home` [N] are the replica's rank and its expert's home. With `local_first` every
    instance, the home included, first takes pairs that are already on its rank
    (Dots-Infra/UltraEP:csrc/kernels/placement.cu), and only the rest follows the shares. Every part is within one pair
    of its share. An expert has at most one replica per rank and cell.
    """
    if not len(cell):
        return np.zeros((0, pairs.shape[1]), np.int32)
    group, member = np.unique(cell * pairs.shape[2] + expert, return_inverse=True)
    group_cell, group_expert = np.divmod(group, pairs.shape[2])
    remaining_pairs = pairs[group_cell, :, group_expert].astype(np.int64)
    replica_rows = np.bincount(member, weights=quota, minlength=len(group)).astype(np.int64)
    home_rows = remaining_pairs.sum(axis=1) - replica_rows
    require(int(home_rows.min()) >= 0, "the replicas of an expert take more token-expert pairs than the expert has.")
    quota_of_sources = np.zeros((len(cell), pairs.shape[1]), np.int64)
    if local_first:
        # Homes keep their own pairs out of the replicas' reach, up to what homes take in all.
        group_home = np.zeros(len(group), np.int64)
        group_home[member] = home
        groups = np.arange(len(group))
        remaining_pairs[groups, group_home] -= np.minimum(remaining_pairs[groups, group_home], home_rows)
        local = np.minimum(quota, remaining_pairs[member, rank])
        remaining_pairs[member, rank] -= local
        quota_of_sources[np.arange(len(cell)), rank] = local
    remaining_quota = quota - quota_of_sources.sum(axis=1)
    for turn in _turns(member):
        group_of_turn = member[turn]
        taken_pairs = _share(remaining_pairs[group_of_turn], remaining_quota[turn])
        remaining_pairs[group_of_turn] -= taken_pairs
        quota_of_sources[turn] += taken_pairs
    return quota_of_sources.astype(np.int32)


def _turns(member: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return index sets that hold every position once and no group of `member` twice."""
    order = np.argsort(member, kind="stable")
    ranked = member[order]
    start = np.searchsorted(ranked, ranked)
    ordinal = np.arange(len(member)) - start
    return [order[ordinal == turn] for turn in range(int(ordinal.max(initial=-1)) + 1)]


def _share(available: NDArray[np.int64], amount: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [N, P] with sums `amount` [N], every entry within one of its share and at most `available` [N, P]."""
    ends = np.cumsum(available, axis=1)
    cumulative_share = ends * amount[:, None] // np.maximum(ends[:, -1:], 1)
    part: NDArray[np.int64] = np.diff(cumulative_share, axis=1, prepend=0)
    return part
