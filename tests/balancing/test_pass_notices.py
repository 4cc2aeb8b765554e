"""A run's log says each thing once, on one rank, and again when it has changed."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from moe_rl.balancing import pass_notices
from moe_rl.balancing.pass_notices import PassNotices


@pytest.fixture(params=[0, 1])
def speaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether this is the rank that speaks."""
    monkeypatch.setattr(pass_notices.dist, "get_rank", lambda: request.param)
    return request.param == 0


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """Return what a call adds to the log, as (level, words)."""
    caplog.set_level(logging.INFO)

    def call(function: Any, *args: Any, **words: Any) -> list[tuple[int, str]]:
        caplog.clear()
        function(*args, **words)
        return [(record.levelno, record.getMessage()) for record in caplog.records]

    return call


def test_a_source_is_said_when_it_is_another(speaks: bool, said: Any) -> None:
    notices = PassNotices()
    sources = ("history", "history", "log-probs", "log-probs", "history")
    heard = [len(said(notices.say_source, source)) for source in sources]
    assert heard == ([1, 0, 1, 0, 1] if speaks else [0] * 5)
    if speaks:
        [(level, words)] = said(notices.say_source, "routes")
        assert (level, words) == (
            logging.INFO,
            "moe_rl: updates are planned from the routes that were passed to moe_rl.",
        )


def test_a_memory_peak_is_said_when_it_fits_no_longer_or_is_another_ranks(said: Any) -> None:
    class Forecast(SimpleNamespace):
        def __str__(self) -> str:
            return f"rank {self.fullest_rank}"

    notices = PassNotices()
    # Of one that fits it does not matter whose it is: that changes from update to update.
    heard = [
        said(notices.say_memory, Forecast(fits=fits, fullest_rank=rank), ep_rank=0)
        for fits, rank in ((True, 2), (True, 3), (False, 3), (False, 3), (False, 1), (True, 1), (True, 0), (False, 0))
    ]
    levels = [[level for level, _ in records] for records in heard]
    info, warning = [logging.INFO], [logging.WARNING]
    assert levels == [info, [], warning, [], warning, info, [], warning]
    assert heard[4] == [(logging.WARNING, "moe_rl: rank 1.")]


def test_memory_is_said_by_the_first_ep_rank_and_only_if_it_is_known(said: Any) -> None:
    notices = PassNotices()
    assert not said(notices.say_memory, None, ep_rank=0)
    assert not said(notices.say_memory, SimpleNamespace(fits=False, fullest_rank=0), ep_rank=1)
    assert said(notices.say_memory, SimpleNamespace(fits=False, fullest_rank=0), ep_rank=0)


def test_a_lever_that_is_idle_is_said_until_its_subject_changes(speaks: bool, said: Any) -> None:
    notices = PassNotices()
    notes_of_passes = (
        ("no replicas: 1.30", "no moves: none pays"),
        ("no replicas: 1.12", "no moves: none pays"),  # other figures, the same subjects
        (),
        ("no moves: none pays",),
        ("no moves: none pays", "no replicas: 1.05"),
    )
    heard = [said(notices.say_notes, notes) for notes in notes_of_passes]
    words = [[text for _, text in records] for records in heard]
    first, again = "moe_rl: no replicas: 1.30", "moe_rl: no moves: none pays"
    assert words == ([[first, again], [], [], [again], ["moe_rl: no replicas: 1.05"]] if speaks else [[]] * 5)
    assert {level for records in heard for level, _ in records} <= {logging.WARNING}


@pytest.mark.parametrize(("announced", "ran", "consequence"), [(4, 2, "missing"), (2, 3, "additional"), (3, 3, None)])
def test_other_micro_batches_than_planned_are_said_once(
    announced: int, ran: int, consequence: str | None, speaks: bool, said: Any
) -> None:
    notices = PassNotices()
    heard = said(notices.say_micro_batches, announced, ran)
    assert len(heard) == (speaks and consequence is not None)
    for level, words in heard:
        assert level == logging.WARNING
        assert f"planned for {announced} micro-batches but ran {ran}, " in words
        assert ("missing" in words, "additional" in words) == (consequence == "missing", consequence == "additional")
    if consequence is not None:
        assert not said(notices.say_micro_batches, announced, announced + 1), "once in a run"


def test_a_pass_as_planned_does_not_use_up_the_warning(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(pass_notices.dist, "get_rank", lambda: 0)
    notices = PassNotices()
    assert not said(notices.say_micro_batches, 3, 3)
    assert said(notices.say_micro_batches, 3, 4)
