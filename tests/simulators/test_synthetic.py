"""The sequence model: its published statistics, and each parameter does what it says."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.simulators.registry import SYNTHETIC
from moe_rl.simulators.synthetic import (
    PRESET_A,
    PRESET_B,
    SequenceModel,
    _policies,
    synthetic_pieces,
    synthetic_steps,
    synthetic_trace,
)
from moe_rl.simulators.token_routes import gumbel

SMALL = SequenceModel(
    num_layers=2,
    num_experts=16,
    top_k=2,
    num_sequences=40,
    mean_length=60,
    expert_sigma=0.5,
    domain_sigma=0.5,
    sequence_sigma=0.5,
    token_persistence=0.5,
)


def sequence_counts(trace: RoutingTrace) -> NDArray[np.int64]:
    """[S, L, E]"""
    counts = np.zeros((trace.num_sequences, trace.num_layers, trace.num_experts), np.int64)
    for sequence in range(trace.num_sequences):
        rows = trace.routed_experts[trace.cu_seqlens[sequence] : trace.cu_seqlens[sequence + 1]]
        for layer in range(trace.num_layers):
            counts[sequence, layer] = np.bincount(rows[:, layer].ravel(), minlength=trace.num_experts)
    return counts


def micro_batches(
    trace: RoutingTrace, counts: NDArray[np.int64], tokens: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], float]:
    """[M, L, E] counts and mean tokens of micro-batches that close at `tokens`, sequences shuffled."""
    closed, sizes = [], []
    current, size = np.zeros_like(counts[0]), 0
    for sequence in rng.permutation(trace.num_sequences):
        current, size = current + counts[sequence], size + int(trace.sequence_lengths[sequence])
        if size >= tokens:
            closed.append(current)
            sizes.append(size)
            current, size = np.zeros_like(counts[0]), 0
    return np.array(closed), float(np.mean(sizes))


def statistics(trace: RoutingTrace, num_domains: int, mb_tokens: int) -> dict[str, NDArray[np.float64]]:
    """Every statistic per layer, [L]."""
    counts = sequence_counts(trace)
    domain_of = np.arange(trace.num_sequences) % num_domains
    domain = np.array([counts[domain_of == d].sum(axis=0) for d in range(num_domains)])
    share = domain / domain.sum(axis=2, keepdims=True)
    total = counts.sum(axis=0)
    pairs = [(a, b) for a in range(num_domains) for b in range(a)]
    lengths = trace.sequence_lengths
    same = (counts * (counts - 1)).sum(axis=2) / (lengths * (lengths - 1) * trace.top_k)[:, None]
    batch, mean_tokens = micro_batches(trace, counts, mb_tokens, np.random.default_rng(0))
    p = batch / batch.sum(axis=2, keepdims=True)
    iid = np.sqrt(p.mean(axis=0) * (1 - p.mean(axis=0)) / (mean_tokens * trace.top_k))
    ranks = batch.reshape(*batch.shape[:2], 8, -1).sum(axis=3)
    return {
        "dom": (share.max(axis=2) * trace.num_experts).mean(axis=0),
        "mix": total.max(axis=1) / total.mean(axis=1),
        "tv": np.mean([np.abs(share[a] - share[b]).sum(axis=1) / 2 for a, b in pairs], axis=0),
        "same_sequence_reuse": np.average(same, axis=0, weights=lengths),
        "cv_ratio": p.std(axis=0).sum(axis=1) / iid.sum(axis=1),
        "ep8": (ranks.max(axis=2) / ranks.mean(axis=2)).mean(axis=0),
    }


@pytest.mark.parametrize(
    ("preset", "mb_tokens", "published"),
    [
        (
            PRESET_A,
            1024,
            {"dom": 4.27, "mix": 2.56, "tv": 0.40, "same_sequence_reuse": 0.19, "cv_ratio": 3.55, "ep8": 1.34},
        ),
        (
            PRESET_B,
            2048,
            {"dom": 3.15, "mix": 2.48, "tv": 0.28, "same_sequence_reuse": 0.30, "cv_ratio": 7.95, "ep8": 1.62},
        ),
    ],
    ids=["A", "B"],
)
def test_presets_have_the_statistics_they_were_fitted_for(
    preset: SequenceModel, mb_tokens: int, published: dict[str, float]
) -> None:
    # The published values are means of 3 draws of one layer. Ours are 24: 4 traces, so that lengths differ too.
    draws = [
        statistics(synthetic_trace(replace(preset, num_layers=6, seed=seed)), preset.num_domains, mb_tokens)
        for seed in range(4)
    ]
    for name, value in published.items():
        drawn = np.concatenate([draw[name] for draw in draws])
        standard_error = drawn.std(ddof=1) * np.sqrt(1 / 3 + 1 / len(drawn))
        rounding = 0.005
        assert abs(drawn.mean() - value) <= 3 * standard_error + rounding, (name, drawn.mean(), standard_error)
    # Ranges over all real traces that were measured
    means = {name: np.mean([draw[name].mean() for draw in draws]) for name in published}
    assert 2.5 <= means["dom"] <= 5.6
    assert 0.10 <= means["tv"] <= 0.47
    assert 1.3 <= means["ep8"] <= 1.8
    assert means["cv_ratio"] >= 3


def test_without_any_correlation_micro_batches_fluctuate_as_independent_tokens_do() -> None:
    model = replace(
        SMALL, num_layers=8, num_sequences=600, domain_sigma=0, sequence_sigma=0, expert_sigma=0, token_persistence=0
    )
    ratio = statistics(synthetic_trace(model), model.num_domains, 500)["cv_ratio"]
    # K distinct choices: an inclusion has variance q (1 - q), K times a share has q / K (1 - q / K) of it
    q = model.top_k / model.num_experts
    expected = np.sqrt((1 - q) / (1 - q / model.top_k))
    # the standard deviation of a standard deviation over M micro-batches and E experts is 1 / sqrt(2 M E)
    num_micro_batches = 600 * 70 / 500
    tolerance = 4 / np.sqrt(2 * num_micro_batches * model.num_experts * model.num_layers)
    # micro-batches of unequal size add the spread of 1 / T, second order in their 10 % spread
    assert abs(ratio.mean() / expected - 1) <= tolerance + 0.02


def test_equal_models_give_equal_traces_and_seeds_differ() -> None:
    first, again = synthetic_trace(SMALL), synthetic_trace(SMALL)
    np.testing.assert_array_equal(first.routed_experts, again.routed_experts)
    np.testing.assert_array_equal(first.cu_seqlens, again.cu_seqlens)
    assert not np.array_equal(first.cu_seqlens, synthetic_trace(replace(SMALL, seed=1)).cu_seqlens)


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (300, 8), (7, 3)])
def test_every_row_names_k_distinct_experts(shape: tuple[int, int]) -> None:
    num_experts, top_k = shape
    trace = synthetic_trace(replace(SMALL, num_experts=num_experts, top_k=top_k, num_sequences=5))
    if num_experts > 1:
        trace.check_routes()
    assert trace.routed_experts.dtype == (np.uint8 if num_experts <= 256 else np.uint16)
    assert trace.top_k == top_k
    assert trace.sequence_lengths.min() >= 20


def test_a_step_is_the_same_alone_and_in_the_whole_trace_and_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(SMALL, num_steps=3, step_drift=0.01, group_size=4, num_sequences=12)
    whole = synthetic_trace(model)
    steps = list(synthetic_steps(model))
    assert [int(step.step[0]) for step in steps] == [0, 1, 2]
    for index, step in enumerate(steps):
        mine = whole.select(np.flatnonzero(whole.step == index))
        np.testing.assert_array_equal(mine.routed_experts, step.routed_experts)
        np.testing.assert_array_equal(mine.group_id, step.group_id)
    assert len(np.unique(whole.sample_id)) == 36
    assert np.bincount(whole.group_id).tolist() == [4] * 9
    monkeypatch.setattr("moe_rl.simulators.synthetic.BATCH_VALUES", 1)
    for step in synthetic_steps(model):
        step.check_routes()
        assert step.num_sequences == 12


@pytest.mark.parametrize("most", [1, 4000, 1 << 40])
def test_pieces_are_the_step_and_no_larger_than_asked(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(SMALL, num_steps=2, group_size=4, num_sequences=12)
    whole = synthetic_trace(model)
    monkeypatch.setattr("moe_rl.simulators.synthetic.PIECE_BYTES", most)
    pieces = list(synthetic_pieces(model))
    assert all(piece.num_sequences == 1 or piece.routed_experts.nbytes <= most for piece in pieces)
    assert all(len(np.unique(piece.step)) == 1 for piece in pieces)
    assert len(pieces) == {1: 24, 4000: len(pieces), 1 << 40: 2}[most]
    np.testing.assert_array_equal(np.concatenate([piece.routed_experts for piece in pieces]), whole.routed_experts)
    for name in ("sequence_lengths", "sample_id", "group_id", "step"):
        joined = np.concatenate([getattr(piece, name) for piece in pieces])
        np.testing.assert_array_equal(joined, getattr(whole, name))


def test_the_last_group_may_be_short() -> None:
    trace = synthetic_trace(replace(SMALL, group_size=8, num_sequences=11))
    assert np.bincount(trace.group_id).tolist() == [8, 3]


def overlap(counts: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    share = counts / counts.sum(axis=2, keepdims=True)
    return float(np.minimum(share[first], share[second]).sum(axis=2).mean())


def test_samples_of_a_prompt_are_alike_by_the_share_they_have_in_common() -> None:
    within, across = {}, {}
    for share in (0.0, 0.5, 1.0):
        model = replace(SMALL, num_sequences=160, group_size=8, group_share=share, num_domains=1, sequence_sigma=1.0)
        counts = sequence_counts(synthetic_trace(model))
        index = np.arange(160)
        within[share] = overlap(counts, index, index ^ 1)
        across[share] = overlap(counts, index, (index + 8) % 160)
    assert within[0.0] < within[0.5] < within[1.0]
    # 160 pairs x 2 layers of overlaps that differ by less than .1: the mean is known to about .006
    assert abs(within[0.0] - across[0.0]) < 0.03
    assert within[1.0] > across[1.0] + 0.1


def test_persistence_makes_neighbors_alike_but_not_the_sequence_as_a_whole() -> None:
    reuse = {}
    for rho in (0.0, 0.6, 0.95):
        trace = synthetic_trace(replace(SMALL, token_persistence=rho, num_sequences=200))
        ids = trace.routed_experts
        inside = np.ones(len(ids) - 1, np.bool_)
        inside[trace.cu_seqlens[1:-1] - 1] = False
        shared = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(axis=3)[inside]
        reuse[rho] = shared.mean()
    assert reuse[0.0] < reuse[0.6] < reuse[0.95]


@pytest.mark.parametrize("drift", [0.003, 0.03])
def test_policies_drift_by_the_total_variation_asked_for(drift: float) -> None:
    model = replace(PRESET_B, num_layers=4, num_steps=2, step_drift=drift)
    before, after = _policies(model, np.random.default_rng(0))
    noise = gumbel(
        np.random.default_rng(1).standard_normal((20_000, 1, model.num_layers, model.num_experts), np.float32)
    )

    def shares(logits: NDArray[np.float32]) -> NDArray[np.float64]:
        chosen = np.argsort(logits[None] + noise, axis=3)[..., -model.top_k :]
        counts = np.zeros(logits.shape)
        for domain in range(model.num_domains):
            for layer in range(model.num_layers):
                counts[domain, layer] = np.bincount(chosen[:, domain, layer].ravel(), minlength=model.num_experts)
        return counts / counts.sum(axis=2, keepdims=True)

    moved = float((np.abs(shares(after) - shares(before)).sum(axis=2) / 2).mean())
    # The same noise on both sides leaves the shift itself. First order overstates: hot experts are chosen already.
    assert 0.6 * drift <= moved <= 1.1 * drift


def test_drift_keeps_the_spread_of_the_policy() -> None:
    model = replace(PRESET_B, num_layers=64, num_experts=64, num_steps=400, step_drift=0.05)
    spreads = [float(policy.std()) for policy in _policies(model, np.random.default_rng(0))]
    assert spreads[-1] == pytest.approx(model.policy_sigma, rel=0.05)
    assert spreads[0] == pytest.approx(model.policy_sigma, rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 17}, "top_k"),
        ({"num_sequences": 0}, "num_sequences must be at least 1"),
        ({"token_persistence": 1.0}, "token_persistence"),
        ({"group_share": 1.5}, "group_share"),
        ({"sequence_sigma": -1.0}, "sequence_sigma must be at least 0"),
        ({"step_drift": 0.9}, "step_drift"),
        ({"mean_length": 0}, "mean_length"),
    ],
)
def test_models_that_make_no_sense_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        replace(SMALL, **change)


def test_unknown_names_and_options_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'preset_a'"):
        SYNTHETIC["preseta"]
    with pytest.raises(InvalidInputError, match=r"no option 'num_layer'. Did you mean 'num_layers'"):
        SYNTHETIC["preset_a"].with_options(num_layer=3)
