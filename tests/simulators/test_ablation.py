"""What published rows carry: terms that are left out come back, and every fitted constant has its rows."""

import pytest

from benchmarks.validate_model.ablation import NOTHING, TERMS, Ablation, class_errors
from benchmarks.validate_model.compare import PUBLISHED
from benchmarks.validate_model.constants import FABRIC, PACKED, SOFTWARE, VENDOR, carried_constants
from benchmarks.validate_model.fit import CONSTANTS
from benchmarks.validate_model.forecasts import user_runs
from moe_rl.core.software import TYPICAL

pytestmark = pytest.mark.lengthy

MOST_FITTED = 16


def test_a_term_counts_by_the_class_that_it_worsens_most() -> None:
    assert Ablation(term="t", worse={"vendor": -0.01, "EFA": 0.0031}).stays
    assert not Ablation(term="t", worse={"vendor": 0.0029, "EFA": -0.2}).stays
    assert len({term.name for term in TERMS}) == len(TERMS)


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
