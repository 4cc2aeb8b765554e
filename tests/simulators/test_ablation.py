"""What published rows carry: terms that are left out come back, and every fitted constant has its rows."""

from collections.abc import Sequence
from math import log

import pytest

from benchmarks.validate_model import ablation
from benchmarks.validate_model.ablation import NOTHING, TERMS, Ablation, Term, class_errors
from benchmarks.validate_model.compare import PUBLISHED
from benchmarks.validate_model.constants import FABRIC, PACKED, SOFTWARE, VENDOR, carried_constants
from benchmarks.validate_model.fit import CONSTANTS
from benchmarks.validate_model.forecasts import user_runs
from moe_rl.core.software import TYPICAL
from moe_rl.simulators.whole_runs import WholeRun

pytestmark = pytest.mark.lengthy

MOST_FITTED = 16


def test_a_term_counts_by_the_class_that_it_worsens_most() -> None:
    assert Ablation(term="t", worse={"vendor": -0.01, "EFA": 0.0031}).stays
    assert not Ablation(term="t", worse={"vendor": 0.0029, "EFA": -0.2}).stays
    assert len({term.name for term in TERMS}) == len(TERMS)


def test_a_term_that_no_class_carries_is_judged_by_fits_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two terms that worsen no class, the one of a cluster's constants and none of software is fitted again."""
    mixing = Term(name="mixing", hardware={"a2a_mixing": 0.0})

    def errors_by_mixing(runs: Sequence[WholeRun], *_: object) -> dict[str, tuple[list[WholeRun], list[float]]]:
        without = all(run.batch.topology.hardware.a2a_mixing == 0.0 for run in runs)
        return {"every cluster": (list(runs), [0.5, -0.5] if without else [0.1, -0.1])}

    monkeypatch.setattr(ablation, "class_errors", lambda *_: {"vendor": 0.04})
    monkeypatch.setattr(ablation, "held_out_errors", errors_by_mixing)
    left_out = ablation.ablations(PUBLISHED, (mixing, Term(name="overlap", software={"overlap_left": 0.0})))
    found = {each.term: each.held_out for each in left_out}
    assert found["mixing"] == pytest.approx((log(1.5) - log(0.5)) / 2 - (log(1.1) - log(0.9)) / 2)
    assert found["overlap"] is None


def test_terms_are_left_out_and_come_back() -> None:
    """Of runs over EFA without the host's time: far worse; with nothing left out again: as before."""
    runs = [(run, kind, TYPICAL) for run, kind in user_runs(PUBLISHED) if kind == "EFA"][:3]
    whole = class_errors(NOTHING, PUBLISHED, runs)
    host = next(term for term in TERMS if term.name == "host per layer")
    assert class_errors(host, PUBLISHED, runs)["EFA"] > whole["EFA"] + 0.1
    for term in TERMS:
        with term.left_out():
            pass
    assert class_errors(NOTHING, PUBLISHED, runs) == whole


def test_every_fitted_constant_has_rows_that_carry_it() -> None:
    found = list(carried_constants(PUBLISHED))
    fitted = [each for each in found if each.kind == VENDOR]
    assert [each.name for each in fitted] == list(CONSTANTS)
    assert len(fitted) <= MOST_FITTED
    assert all(each.rows > 0 for each in fitted)
    assert {each.kind for each in found} == {VENDOR, FABRIC, SOFTWARE, PACKED}
    assert all(each.rows > 0 for each in found if each.kind == PACKED)
    host = next(each for each in found if each.name == "host")
    assert host.rows > host.of / 2
