"""The figures are what their definitions say, on traces whose answer is known."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing_statistics import (
    cold_experts,
    expert_counts,
    hottest_expert,
    kind_statistics,
    main,
    micro_batches,
    rank_imbalance,
    reuse,
    statistics,
    std_ratio_to_iid,
    total_variation,
)
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import write_trace

E = 32


def independent_routes(rng: np.random.Generator, rows: int, layers: int = 2, top_k: int = 4) -> np.ndarray:
    return np.argsort(rng.random((rows, layers, E)), axis=2)[:, :, :top_k]


def test_counts_leave_rows_without_a_route_out(rng: np.random.Generator) -> None:
    sequences = [independent_routes(rng, rows) for rows in (3, 0, 5)]
    valid = [np.ones(len(routes), np.bool_) for routes in sequences]
    valid[2][-1] = False
    trace = RoutingTrace.from_sequences(sequences, num_experts=E, valid=valid)
    counts = expert_counts(trace)
    assert counts.sum(axis=2).tolist() == [[12, 12], [0, 0], [16, 16]]
    want = np.bincount(sequences[2][:-1, 1].ravel(), minlength=E)
    np.testing.assert_array_equal(counts[2, 1], want)


def test_micro_batches_hold_every_sequence_once_within_the_limit(rng: np.random.Generator) -> None:
    lengths = rng.integers(1, 100, 57)
    batches = micro_batches(lengths, 256)
    assert sorted(itertools.chain.from_iterable(batch.tolist() for batch in batches)) == list(range(57))
    assert all(lengths[batch].sum() <= 256 for batch in batches)
    assert micro_batches(np.array([500]), 256)[0].tolist() == [0]


def test_all_to_one_rank_is_the_worst_imbalance_and_equal_load_the_best() -> None:
    counts = np.zeros((3, 2, E), np.int64)
    counts[:, :, :4] = 7
    assert rank_imbalance(counts, 8) == 8.0
    assert rank_imbalance(counts, 32) == 8.0
    assert rank_imbalance(np.full((3, 2, E), 5), 8) == 1.0
    assert hottest_expert(counts[0]) == 8.0
    assert cold_experts(counts[0]) == [28, 28]
    with pytest.raises(InvalidInputError, match=r"ep_size \(5\) does not divide the experts \(32\)"):
        rank_imbalance(counts, 5)


def test_total_variation_is_zero_for_equal_and_one_for_disjoint_load() -> None:
    left = np.zeros((1, E), np.int64)
    right = left.copy()
    left[0, :4], right[0, 4:6] = 3, 9
    assert total_variation(left, 5 * left) == 0.0
    assert total_variation(left, right) == pytest.approx(1.0)


def test_independent_pairs_vary_as_independent_pairs(rng: np.random.Generator) -> None:
    """400 micro-batches of multinomial counts: the ratio's standard error is below 1 / sqrt(2 * 400)."""
    counts = rng.multinomial(2000, np.full(E, 1 / E), size=(400, 1))
    assert std_ratio_to_iid(counts) == pytest.approx(1.0, abs=3 / np.sqrt(2 * 400))


def test_reuse_is_full_for_a_constant_route_and_chance_for_random_ones(rng: np.random.Generator) -> None:
    constant = [np.tile(np.arange(4) + 4 * index, (9, 1, 1)) for index in range(2)]
    same = reuse(RoutingTrace.from_sequences(constant, num_experts=E))
    assert same["next_token"] == same["same_sequence"] == 1.0
    rows = 4000
    mixed = reuse(RoutingTrace.from_sequences([independent_routes(rng, rows)], num_experts=E))
    # Hypergeometric share of 4 of 32 hit by another 4 of 32: variance per row below p / 4.
    bound = 4 * np.sqrt(0.125 / 4 / rows)
    assert all(value == pytest.approx(4 / E, abs=bound) for value in mixed.values())


def test_all_figures_of_a_trace(rng: np.random.Generator) -> None:
    sequences = [independent_routes(rng, 20) for _ in range(8)]
    trace = RoutingTrace.from_sequences(
        sequences, num_experts=E, group_id=np.arange(8) // 2, step=np.arange(8, dtype=np.int32) // 4
    )
    figures = statistics(trace, 64)
    assert figures["tokens"] == 160
    assert figures["rank_imbalance"].keys() == {"EP8", "EP16", "EP32"}
    assert len(figures["total_variation_between_steps"]) == 1
    kinds = kind_statistics(trace, ["code", "prose", "code", "prose"])
    assert kinds["tokens_of_kind"] == {"code": 80, "prose": 80}
    with pytest.raises(InvalidInputError, match="2 kinds for 4 prompt groups"):
        kind_statistics(trace, ["code", "prose"])


def test_the_figures_print_for_a_trace_by_kind_of_prompt(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    sequences = [independent_routes(rng, 20) for _ in range(8)]
    trace = RoutingTrace.from_sequences(sequences, num_experts=E, group_id=np.arange(8) // 2)
    written = write_trace(
        [trace], tmp_path / "t.moetrace", num_experts=E, moe_layer_ids=trace.moe_layer_ids, top_k=trace.top_k
    )
    main([str(written.path), "--ep-group-tokens", "64", "--group-kinds", "2"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["rank_imbalance"]["EP8"] >= figures["rank_imbalance_of_all"]["EP8"] >= 1.0
    assert figures["tokens_of_kind"] == {"0": 80, "1": 80}


@pytest.mark.parametrize(
    ("arguments", "sentence"), [(("nothing",), "is not a trace"), (("nothing", "--group-kinds", "0"), "at least 1")]
)
def test_wrong_input_is_told_in_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(list(arguments))
    assert sentence in capsys.readouterr().err
