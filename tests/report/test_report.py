"""The figures of a report, and how numbers are written."""

from typing import Any

import numpy as np
import pytest
from report_samples import BOUNDS, SETTING, forecast, prediction, printed, report

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import imbalance
from moe_rl.report.html import render_html
from moe_rl.report.ranking import ranking_sentences
from moe_rl.report.simulation import PolicyLoads
from moe_rl.report.units import (
    GIB,
    counted,
    format_bytes,
    format_count,
    format_time,
    listed,
    sequences_of,
    ticks,
    time_unit,
)
from moe_rl.simulators.sensitivity import PerturbedRanking


def test_loads_are_reduced_to_shares_and_curves() -> None:
    rows = np.array([[[[4, 0], [2, 2]], [[0, 4], [3, 1]]]])
    reduced = PolicyLoads.from_rank_loads(rows)
    assert reduced.rank_share.tolist() == [[1.0, 1.0], [1.25, 0.75]]
    assert reduced.imbalance_by_micro_batch.tolist() == [(2.0 + 1.0) / 2, (2.0 + 1.5) / 2]


def test_a_layer_and_a_micro_batch_without_rows_count_as_balanced() -> None:
    rows = np.zeros((1, 2, 2, 4), np.int64)
    rows[0, 0, 0] = [8, 0, 0, 0]
    reduced = PolicyLoads.from_rank_loads(rows)
    assert reduced.rank_share[1].tolist() == [1.0] * 4
    assert reduced.imbalance_by_micro_batch.tolist() == [2.5, 1.0]


def test_one_micro_batch_has_the_imbalance_of_the_step() -> None:
    rows = np.random.default_rng(0).integers(0, 100, (2, 1, 5, 8))
    assert PolicyLoads.from_rank_loads(rows).imbalance_by_micro_batch[0] == pytest.approx(imbalance(rows), rel=1e-6)


@pytest.mark.parametrize("key", ["ep_size", "tokens_per_rank", "dispatcher", "recompute", "scaled"])
def test_a_result_without_its_conditions_is_refused(key: str) -> None:
    with pytest.raises(InvalidInputError, match=f"setting of a report lacks {key}"):
        report(setting={name: value for name, value in SETTING.items() if name != key})


def test_a_report_needs_distinct_policies_and_their_loads() -> None:
    static = prediction("static", 10.0, load=2.0)
    with pytest.raises(InvalidInputError, match="twice"):
        report(static, static)
    with pytest.raises(InvalidInputError, match="loads of every policy"):
        report(static, loads={})


def test_the_json_holds_memory_and_bounds_of_every_policy() -> None:
    memory = {name: forecast(60.0) for name in ("static", "ultraep", "forced_balance")}
    document: Any = report(memory=memory, bounds=BOUNDS).as_json()
    assert document["policies"]["ultraep"]["memory"]["fits"] is True
    assert sum(document["policies"]["static"]["memory"]["parts_bytes"].values()) == 60 * GIB
    assert "memory" in document["yardsticks"]["forced_balance"]
    assert "memory" not in document["yardsticks"]["ideal"]
    assert document["policies"]["static"]["bounds"] == {"lb0": 1.0, "node": 1.05, "placement": 2.2}


def rankings(*turned: tuple[str, str]) -> tuple[PerturbedRanking, ...]:
    speedups = {"static": 1.0, "ultraep": 1.4}
    return (
        PerturbedRanking(constants="RDMA", factor=0.7, speedup_vs_static=speedups, turned=()),
        PerturbedRanking(constants="HBM", factor=1.3, speedup_vs_static=speedups | {"ultraep": 1.5}, turned=turned),
    )


def test_a_ranking_that_holds_is_said_to_hold() -> None:
    shown = report(sensitivity=rankings())
    assert ranking_sentences(shown) == (
        "The ranking of the policies holds with every constant 30 % lower or higher; ultraep is 1.40x to 1.50x as fast "
        "as static.",
    )
    document: Any = shown.as_json()
    assert document["sensitivity"]["holds"] is True


def test_a_flip_is_named_with_its_constant() -> None:
    shown = report(sensitivity=rankings(("ultraep", "static")))
    (sentence,) = ranking_sentences(shown)
    assert "change the ranking of the policies: with HBM x1.3, static passes ultraep." in sentence
    assert sentence in " ".join(printed(shown, 100).split())
    page = render_html(shown)
    assert sentence in page
    assert page.count('<tr class="flips">') == 1
    document: Any = shown.as_json()
    assert [case["holds"] for case in document["sensitivity"]["perturbed"]] == [True, False]
    assert document["sensitivity"]["perturbed"][1]["turned"] == (("ultraep", "static"),)


@pytest.mark.parametrize("width", [60, 100])
def test_whether_the_ranking_holds_is_printed_without_explain(width: int) -> None:
    """Three cautions take the eight lines below the table; who asks for --sensitivity has its sentence all the same."""
    cautions = tuple(f"caution {number} " * 12 for number in range(3))
    text = " ".join(printed(report(sensitivity=rankings(), cautions=cautions), width).split())
    assert "The ranking of the policies holds with every constant 30 % lower or higher" in text
    assert "more sentences: --explain" in text


def test_what_was_not_perturbed_is_not_mentioned() -> None:
    assert ranking_sentences(report()) == ()
    assert "sensitivity" not in report().as_json()
    assert "depend on the constants" not in render_html(report())


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (format_time(1.236), "1.24 s"),
        (format_time(0.0231), "23.1 ms"),
        (format_time(0.00031), "310 us"),
        (format_count(74_470), "74.5k"),
        (format_count(8192), "8,192"),
        (format_count(3_100_000), "3.1M"),
        (format_count(12.5), "12.5"),
        (format_bytes(0), "0"),
        (counted(1, "micro-batch", "micro-batches"), "1 micro-batch"),
        (counted(0, "micro-batch", "micro-batches"), "0 micro-batches"),
        (
            sequences_of({"sequence_length": 348.2, "sequence_length_mean": 156.4}),
            "sequences of 348 tokens (weighted by tokens; plain mean 156)",
        ),
        (sequences_of({"sequence_length": 4096}), "sequences of 4,096 tokens"),
        (format_bytes(3_000_000_000), "3 GB"),
        (format_bytes(1.66e12), "1.66 TB"),
        (listed(range(3)), "0, 1, 2"),
        (listed(range(48)), "0, 1 .. 47"),
        (time_unit([0.2, 3.0])[0], "s"),
        (time_unit([0.2])[0], "ms"),
    ],
)
def test_numbers_are_written_as_people_read_them(written: str, expected: str) -> None:
    assert written == expected


@pytest.mark.parametrize("top", [1e-4, 0.07, 1.0, 2.3, 9.99, 1234.5])
def test_ticks_start_at_zero_reach_the_top_and_are_few(top: float) -> None:
    marks = ticks(top, at_most=6)
    assert marks[0] == 0.0
    assert marks[-1] >= top * (1 - 1e-9)
    assert 2 <= len(marks) <= 7
    assert np.allclose(np.diff(marks), marks[1])
