"""Layouts as training frameworks make them from the lengths of a step, and the partition that they share.

S sequences, D data-parallel ranks. A layout decides which sequences wait for each other, so what balancing brings is
measured against the layout that a run would have without it.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_known
from moe_rl.core.layout import BatchLayout, check_token_budget
from moe_rl.core.model import MoeModelSpec

# Tokens of attention that cost as much as one token's other work (verl 0.9.1:verl/utils/seqlen_balancing.py).
VERL_TOKEN_WORK = 24576

# (sum, number of items, first item, items): Python compares such tuples as verl and slime compare their sets.
_Set = tuple[int, int, int, tuple[int, ...]]


def karmarkar_karp(values: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Return `parts` ascending lists of indices whose sums of `values` are close: the largest differencing method.

    Ties are broken as in `get_seqlen_balanced_partitions` of verl and slime, so that the lists are theirs. With
    `equal_size` all lists are equally long; `parts` must divide the number of values.
    """
    require(parts >= 1, f"the number of parts must be at least 1, got {parts}.")
    require(
        not equal_size or len(values) % parts == 0,
        f"{len(values)} values cannot be divided evenly into {parts} parts.",
    )
    ascending = sorted((int(value), index) for index, value in enumerate(values))
    values_per_state = parts if equal_size else 1
    states: list[list[_Set]] = [
        sorted(
            ((value, 1, index, (index,)) for value, index in ascending[start : start + values_per_state]), reverse=True
        )
        for start in range(0, len(ascending), values_per_state)
    ]
    # The two states that differ most inside are merged, large against small, until one is left.
    heap = [(*_priority(sets, parts), sets) for sets in states]
    heapq.heapify(heap)
    while len(heap) > 1:
        merged_state = _merged(heapq.heappop(heap)[-1], heapq.heappop(heap)[-1], parts)
        heapq.heappush(heap, (*_priority(merged_state, parts), merged_state))
    parts_found = [sorted(items) for *_, items in (heap[0][-1] if heap else [])]
    return parts_found + [[] for _ in range(parts - len(parts_found))]


def _priority(sets: list[_Set], parts: int) -> tuple[int, int, int, int]:
    """Order states: largest spread first, then largest first set. Sets that hold nothing are left out of a state."""
    total, count, largest_index, _ = sets[0]
    smallest_total = sets[-1][0] if len(sets) == parts else 0
    return smallest_total - total, -total, -count, -largest_index


def _merged(left: list[_Set], other: list[_Set], parts: int) -> list[_Set]:
    """Return the largest sets of one state with the smallest of the other."""
    num_unmerged = parts - len(other)  # the first sets of `left` meet nothing
    sets = left[:num_unmerged]
    for own_set, other_set in zip(left[num_unmerged:], reversed(other), strict=False):
        sets.append((own_set[0] + other_set[0], own_set[1] + other_set[1], own_set[2], own_set[3] + other_set[3]))
    sets += other[: len(other) - max(0, len(left) - num_unmerged)]
    sets.sort(reverse=True)
    return sets


def verl_layout(
    lengths: NDArray[np.int64], *, num_dp_ranks: int, token_budget: int, multiple_of: int = 1
) -> BatchLayout:
    """Return verl's dynamic micro-batches: `balance_batch`, then `rearrange_micro_batches` on every rank.

    Ranks get equally many sequences of about equal work; a rank's are cut into as few micro-batches of at most
    `token_budget` tokens as the differencing method finds, as many on every rank, the smallest at both ends. verl
    asks for a number of sequences that the ranks divide: here the last ones are missing. Source: verl 0.9.1.
    """
    check_token_budget(lengths, token_budget)
    tokens = [int(length) for length in lengths]
    # Missing sequences are padded with work 0, and dropped again below.
    work = [VERL_TOKEN_WORK * length + length**2 for length in tokens] + [0] * (-len(tokens) % num_dp_ranks)
    ranks = []
    for part in karmarkar_karp(work, num_dp_ranks, equal_size=True):
        part.sort(key=lambda sample: (work[sample], sample))
        # Every other one forward and then back: cheap sequences at both ends, as verl orders a rank.
        ranks.append([sample for sample in part[::2] + part[1::2][::-1] if sample < len(tokens)])
    num_micro_batches = max(min(len(rank), -(-sum(tokens[s] for s in rank) // token_budget)) for rank in ranks)
    count = -(-max(1, num_micro_batches) // multiple_of) * multiple_of
    while True:
        parts_of_rank = [karmarkar_karp([work[sample] for sample in rank], count) for rank in ranks]
        cells = [[[rank[i] for i in part] for part in parts] for rank, parts in zip(ranks, parts_of_rank, strict=True)]
        if all(sum(tokens[s] for s in cell) <= token_budget for row in cells for cell in row):
            break
        # One more micro-batch of every rank until all fit: equal counts, since all ranks meet in every micro-batch.
        count += multiple_of
    for number, (parts, rank) in enumerate(zip(parts_of_rank, ranks, strict=True)):
        parts.sort(key=lambda part: (sum(work[rank[i]] for i in part), part[0] if part else 0), reverse=True)
        cells[number] = [[rank[i] for i in part] for part in parts[::2][::-1] + parts[1::2]]
    return layout_of_cells(cells, len(tokens), token_budget)


def slime_layout(
    lengths: NDArray[np.int64],
    *,
    num_dp_ranks: int,
    token_budget: int,
    multiple_of: int = 1,
    model: MoeModelSpec | None = None,
) -> BatchLayout:
    """Return slime's dynamic batches: first fit over all ranks, then micro-batches dealt out by floating-point work.

    `use_dynamic_batch_size` and `balance_data`, as slime's scripts have them; without a `model` the micro-batches are
    dealt out in turn, as without `balance_data`. Source: THUDM/slime:slime/utils/dp_schedule.py at 624b824.
    """
    check_token_budget(lengths, token_budget)
    tokens = [int(length) for length in lengths]
    bins: list[list[int]] = []
    bins_held: list[int] = []
    for sample, length in enumerate(tokens):
        # First fit: the first micro-batch with room, of any rank.
        place = next(
            (index for index, tokens_of_bin in enumerate(bins_held) if tokens_of_bin + length <= token_budget), None
        )
        if place is None:
            bins.append([sample])
            bins_held.append(length)
        else:
            bins[place].append(sample)
            bins_held[place] += length
    # Whole rounds: each rank must get equally many micro-batches.
    align = num_dp_ranks * multiple_of
    _split_largest(bins, max(align, -(-len(bins) // align) * align), tokens)
    if model is None:
        of_rank = [list(range(rank, len(bins), num_dp_ranks)) for rank in range(num_dp_ranks)]
    else:
        work = [_slime_flops(model, length) for length in tokens]
        of_rank = karmarkar_karp([sum(work[s] for s in part) for part in bins], num_dp_ranks, equal_size=True)
    return layout_of_cells(
        [[bins[index] for index in bins_of_rank] for bins_of_rank in of_rank], len(tokens), token_budget
    )


def _split_largest(bins: list[list[int]], count: int, tokens: Sequence[int]) -> None:
    """Halve the bins with most tokens until there are `count`; where all hold one sequence, empty ones follow."""
    while len(bins) < count:
        _, index = max(
            ((sum(tokens[s] for s in part), i) for i, part in enumerate(bins) if len(part) > 1), default=(0, -1)
        )
        if index < 0:
            bins += [[] for _ in range(count - len(bins))]
            return
        halves: tuple[list[int], list[int]] = ([], [])
        for sample in sorted(bins[index], key=lambda s: -tokens[s]):
            left_tokens, right_tokens = (sum(tokens[s] for s in half) for half in halves)
            halves[left_tokens > right_tokens].append(sample)
        bins[index], second_half = halves
        bins.append(second_half)


def _slime_flops(model: MoeModelSpec, length: int) -> int:
    """Return forward operations of a sequence as slime counts them (slime/utils/flops_utils.py, without MLA)."""
    hidden, heads, width = model.hidden_size, model.num_attention_heads, model.kv_channels
    moe = model.moe_ffn_hidden_size * model.top_k + model.shared_expert_ffn_hidden_size
    attention = (
        2 * hidden * (heads + 2 * model.num_query_groups) * width + 2 * hidden * hidden + 2 * length * heads * width
    )
    ffn = moe * model.num_moe_layers + model.dense_ffn_hidden_size * (model.num_layers - model.num_moe_layers)
    return length * (model.num_layers * attention + 6 * hidden * ffn + 2 * hidden * model.vocab_size)


def megatron_layout(
    lengths: NDArray[np.int64], *, num_dp_ranks: int, token_budget: int, multiple_of: int = 1
) -> BatchLayout:
    """Return Megatron's fixed micro-batches: as many sequences in each as fit when all are as long as the longest.

    A micro-batch of all ranks is a run of consecutive sequences, rank by rank (`MegatronPretrainingSampler`).
    """
    check_token_budget(lengths, token_budget)
    # A fixed number of sequences is padded to its longest: 8,192 tokens hold 4 of at most 2,048.
    size = max(1, token_budget // int(lengths.max(initial=1)))
    count = -(-len(lengths) // (size * num_dp_ranks * multiple_of)) * multiple_of
    cell = np.arange(len(lengths)) // size
    return BatchLayout(
        micro_batch=(cell // num_dp_ranks).astype(np.int32),
        dp_rank=(cell % num_dp_ranks).astype(np.int32),
        order=np.arange(len(lengths), dtype=np.int32),
        num_micro_batches=count,
        num_dp_ranks=num_dp_ranks,
        token_budget=token_budget,
    )


def layout_of_cells(
    cells: Sequence[Sequence[Sequence[int]]], num_sequences: int, token_budget: int | None
) -> BatchLayout:
    """Return the layout of `cells[dp_rank][micro_batch]` = indices of sequences, each of which stands there once."""
    columns = np.zeros((3, num_sequences), np.int32)
    for dp_rank, micro_batches in enumerate(cells):
        for micro_batch, samples in enumerate(micro_batches):
            columns[:, samples] = [[micro_batch] * len(samples), [dp_rank] * len(samples), range(len(samples))]
    return BatchLayout(
        micro_batch=columns[0],
        dp_rank=columns[1],
        order=columns[2],
        num_micro_batches=max(map(len, cells), default=0),
        num_dp_ranks=len(cells),
        token_budget=token_budget,
    )


FRAMEWORK_LAYOUTS: dict[str, Callable[..., BatchLayout]] = {
    "verl": verl_layout,
    "slime": slime_layout,
    "megatron": megatron_layout,
    "in-order": BatchLayout.in_order,
}


# What a run of each framework lets a plan do with its sequences, when moe_rl packs for it ("run" of `PACKINGS`).
EQUAL_COUNTS, ANY_COUNTS, OWN_SCHEDULE = "equal counts", "any counts", "own schedule"
FRAMEWORK_RULES = {"verl": EQUAL_COUNTS, "slime": ANY_COUNTS, "megatron": OWN_SCHEDULE, "in-order": OWN_SCHEDULE}
PACKINGS = ("run", "free", "none")


def may_be_padded(framework: str, packing: str) -> bool:
    """Return whether padding samples may fill up ranks: where a run has to give all of them equally many."""
    return packing == PACKINGS[0] and FRAMEWORK_RULES[framework] == EQUAL_COUNTS


def with_rule(layout: BatchLayout, framework: str, packing: str = "run", *, padding_samples: int = 0) -> BatchLayout:
    """Return the layout with the rule under which it may be packed anew.

    "run": what moe_rl does in a run of the framework. Drivers of verl and slime pack by lengths alone; verl's gives all
    data-parallel ranks equally many sequences, up to `padding_samples` of which per rank may be padding samples.
    Schedules of the others are carried out as they are. "free": any place within the token budget, by routes. "none":
    as laid out.
    """
    require_known(packing, PACKINGS, f"--packing {packing!r} is unknown.")
    layout = replace(layout, fixed=False, most_sequences=None, padding_samples=0, lengths_alone=False)
    if packing == "free":
        return layout
    if packing == "none" or FRAMEWORK_RULES[framework] == OWN_SCHEDULE:
        return replace(layout, fixed=True)
    if FRAMEWORK_RULES[framework] == ANY_COUNTS:
        return replace(layout, lengths_alone=True)
    most_sequences = -(-layout.num_sequences // layout.num_dp_ranks)
    return replace(layout, most_sequences=most_sequences, padding_samples=padding_samples, lengths_alone=True)


def framework_layout(
    name: str,
    lengths: NDArray[np.int64],
    *,
    num_dp_ranks: int,
    token_budget: int,
    multiple_of: int = 1,
    model: MoeModelSpec | None = None,
) -> BatchLayout:
    """Return the layout of that name, its number of micro-batches a multiple of `multiple_of` (virtual stages).

    Raises `InvalidInputError` for an unknown name and for a sequence longer than `token_budget`.
    """
    require_known(name, FRAMEWORK_LAYOUTS, f"--layout {name!r} is unknown.")
    options: dict[str, object] = {} if name == "in-order" else {"multiple_of": multiple_of}
    if name == "slime":
        options["model"] = model
    return FRAMEWORK_LAYOUTS[name](lengths, num_dp_ranks=num_dp_ranks, token_budget=token_budget, **options)
