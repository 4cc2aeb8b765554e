"""How skewed and how restless a routing trace is: the figures by which traces are compared before any planning.

`python benchmarks/routing_statistics.py TRACE` prints them. T tokens, L MoE layers, K experts per token, E experts.
"""

import argparse
import json
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceReader

EP_SIZES = (8, 16, 32)


def expert_counts(trace: RoutingTrace) -> NDArray[np.int64]:
    """Return `[S, L, E]` token-expert pairs of every sequence."""
    num_experts, num_layers = trace.num_experts, trace.num_layers
    counts = np.zeros((trace.num_sequences, num_layers, num_experts), np.int64)
    offsets = np.arange(num_layers)[None, :, None] * num_experts
    for index, (start, end) in enumerate(pairwise(trace.cu_seqlens.tolist())):
        routes = trace.routed_experts[start:end][trace.valid[start:end]].astype(np.int64) + offsets
        counts[index] = np.bincount(routes.ravel(), minlength=num_layers * num_experts).reshape(num_layers, -1)
    return counts


def micro_batches(lengths: NDArray[np.int64], max_tokens: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """Return the sequences of each micro-batch: a random order, cut before `max_tokens` would be exceeded."""
    batches: list[list[int]] = []
    filled = max_tokens + 1
    for sequence in np.random.default_rng(seed).permutation(len(lengths)):
        if filled + lengths[sequence] > max_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(int(sequence))
        filled += int(lengths[sequence])
    return [np.array(batch) for batch in batches]


def rank_imbalance(counts: NDArray[np.int64], ep_size: int) -> float:
    """Return max over mean rank load under contiguous placement of `counts [M, L, E]`.

    Mean over layers of (sum over micro-batches of the maximum / sum of the mean).
    """
    num_experts = counts.shape[2]
    require(num_experts % ep_size == 0, f"ep_size ({ep_size}) does not divide the experts ({num_experts}).")
    load = counts.reshape(*counts.shape[:2], ep_size, -1).sum(axis=3)
    return float((load.max(axis=2).sum(axis=0) / load.mean(axis=2).sum(axis=0)).mean())


def hottest_expert(counts: NDArray[np.int64]) -> float:
    """Return max over mean expert load of `counts [L, E]`, mean over layers."""
    return float((counts.max(axis=1) / counts.mean(axis=1)).mean())


def cold_experts(counts: NDArray[np.int64]) -> list[int]:
    """Return how many experts of each layer of `counts [L, E]` get under a twentieth of the mean load."""
    return [int(number) for number in (20 * counts < counts.mean(axis=1, keepdims=True)).sum(axis=1)]


def total_variation(left: NDArray[np.int64], right: NDArray[np.int64]) -> float:
    """Return the total variation between the expert shares of two `[L, E]` counts, mean over layers."""
    shares = [counts / counts.sum(axis=1, keepdims=True) for counts in (left, right)]
    return float(np.abs(shares[0] - shares[1]).sum(axis=1).mean() / 2)


def std_ratio_to_iid(counts: NDArray[np.int64]) -> float:
    """Return how much more expert shares vary between micro-batches `[M, L, E]` than if tokens were independent.

    sum_e std over micro-batches of p_e / sum_e sqrt(mean p_e (1 - mean p_e) / (T K)), T K = mean pairs; mean over
    layers.
    """
    pairs = counts.sum(axis=2, keepdims=True)
    shares = counts / pairs
    expected = counts.sum(axis=0) / pairs.sum(axis=0)
    iid = np.sqrt(expected * (1 - expected) / pairs.mean(axis=0)).sum(axis=1)
    return float((shares.std(axis=0).sum(axis=1) / iid).mean())


def reuse(trace: RoutingTrace, seed: int = 0) -> dict[str, float]:
    """Return the share of a token's experts that the next token, another of its sequence and any token use too."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(trace.num_sequences), trace.sequence_lengths)
    rows = np.flatnonzero(trace.valid)
    rows = rows[(rows + 1 < trace.num_tokens) & (owner[np.minimum(rows + 1, trace.num_tokens - 1)] == owner[rows])]
    start, length = trace.cu_seqlens[owner[rows]], trace.sequence_lengths[owner[rows]]
    others = {
        "next_token": rows + 1,
        "same_sequence": start + rng.integers(0, length),
        "any_token": rng.integers(0, trace.num_tokens, len(rows)),
    }
    return {name: _overlap(trace, rows, other) for name, other in others.items()}


def statistics(trace: RoutingTrace, micro_batch_tokens: int) -> dict[str, object]:
    """Return the figures of a trace whose micro-batches are closed at `micro_batch_tokens`."""
    counts = expert_counts(trace)
    lengths = trace.sequence_lengths
    batches = micro_batches(lengths, micro_batch_tokens)
    per_batch = np.stack([counts[batch].sum(axis=0) for batch in batches])
    steps = np.unique(trace.step)
    per_step = [counts[trace.step == step].sum(axis=0) for step in steps]
    groups = [counts[trace.group_id == group].sum(axis=0) for group in np.unique(trace.group_id)]
    between_groups = [total_variation(a, b) for a, b in combinations(groups, 2)]
    return {
        "sequences": trace.num_sequences,
        "tokens": trace.num_tokens,
        "sequence_tokens_min_median_max": [int(lengths.min()), int(np.median(lengths)), int(lengths.max())],
        "hottest_expert": hottest_expert(counts.sum(axis=0)),
        "cold_experts": cold_experts(counts.sum(axis=0)),
        "micro_batch_tokens": float(np.mean([lengths[batch].sum() for batch in batches])),
        "rank_imbalance": {
            f"EP{ep_size}": rank_imbalance(per_batch, ep_size)
            for ep_size in EP_SIZES
            if trace.num_experts % ep_size == 0
        },
        "rank_imbalance_of_all": {
            f"EP{ep_size}": rank_imbalance(counts.sum(axis=0)[None], ep_size)
            for ep_size in EP_SIZES
            if trace.num_experts % ep_size == 0
        },
        "std_ratio_to_iid": std_ratio_to_iid(per_batch),
        "reuse": reuse(trace) | {"uniform": trace.top_k / trace.num_experts},
        "total_variation_between_prompts": float(np.mean(between_groups)) if between_groups else 0.0,
        "total_variation_between_steps": [total_variation(a, b) for a, b in pairwise(per_step)],
    }


def kind_statistics(trace: RoutingTrace, kinds: list[str]) -> dict[str, object]:
    """Return the figures by kind of prompt; `kinds` names the kind of every prompt group, in id order."""
    groups = np.unique(trace.group_id)
    require(len(groups) == len(kinds), f"{len(kinds)} kinds for {len(groups)} prompt groups.")
    counts = expert_counts(trace)
    kind_of_sequence = np.array(kinds)[np.searchsorted(groups, trace.group_id)]
    load = {kind: counts[kind_of_sequence == kind].sum(axis=0) for kind in sorted(set(kinds))}
    between = [total_variation(a, b) for a, b in combinations(load.values(), 2)]
    return {
        "tokens_of_kind": {kind: int(counts.sum() // trace.top_k // trace.num_layers) for kind, counts in load.items()},
        "hottest_expert_of_kind": {kind: hottest_expert(counts) for kind, counts in load.items()},
        "total_variation_between_kinds": float(np.mean(between)) if between else 0.0,
    }


def figures_of(path: Path | str, micro_batch_tokens: int, group_kinds: int = 1) -> dict[str, object]:
    """Return all figures of a `*.moetrace/` directory; `group_kinds` is how many kinds of prompts take turns in it."""
    require(group_kinds >= 1, f"--group-kinds must be at least 1, got {group_kinds}.")
    trace = TraceReader(path).load()
    if not isinstance(trace, RoutingTrace):
        raise InvalidInputError(f"{path} holds counts only: these figures need routes.")
    figures = statistics(trace, micro_batch_tokens)
    if group_kinds > 1:
        figures |= kind_statistics(trace, [str(group % group_kinds) for group in np.unique(trace.group_id)])
    return figures


def _overlap(trace: RoutingTrace, rows: NDArray[np.int64], other_rows: NDArray[np.int64]) -> float:
    usable = trace.valid[other_rows]
    routes = trace.routed_experts
    same = routes[rows[usable]][:, :, :, None] == routes[other_rows[usable]][:, :, None, :]
    return float(same.any(axis=3).mean())


def main(argv: list[str] | None = None) -> None:
    """Print the figures of a `*.moetrace/` directory as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace")
    parser.add_argument("--ep-group-tokens", type=int, default=2048, help="tokens at which a micro-batch is closed")
    parser.add_argument("--group-kinds", type=int, default=1, help="kinds of prompts; a group's is its id modulo this")
    options = parser.parse_args(argv)
    try:
        figures = figures_of(options.trace, options.ep_group_tokens, options.group_kinds)
    except InvalidInputError as error:
        parser.exit(2, f"{error}\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
