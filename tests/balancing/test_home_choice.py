"""Which passes choose homes, when experts move to them, and which proposals are taken back: without a model."""

import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from moe_rl.balancing import home_choice
from moe_rl.balancing.home_choice import ExpertMoves, HomeChoice, ProposedHomes, UpdateCounts
from moe_rl.balancing.homes import GradientsWaitError
from moe_rl.balancing.pass_request import PassRequest


class Homes:
    """Notes where experts went; gradients wait where the test says so."""

    def __init__(self) -> None:
        self.gradients_wait = False
        self.went: list[Any] = []

    def reorder(self, placement: Any) -> int:
        if self.gradients_wait:
            raise GradientsWaitError("gradients wait")
        self.went.append(placement)
        return 7


class Run:
    """A run whose planner answers at once: the n-th request gets placement n."""

    def __init__(self, *, reorders: bool = True, resident_slots: int = 0) -> None:
        self.config = SimpleNamespace(
            homes=SimpleNamespace(reorders=reorders), slots=SimpleNamespace(resident_slots=resident_slots)
        )
        self.homes: Homes | None = Homes()
        self.why_homes_stay: str | None = None
        self.placement: Any = "as they are"
        self.layers = SimpleNamespace(of_all_stages=lambda placement: ("of all stages", placement))
        self.requests: list[PassRequest] = []
        self.thread = SimpleNamespace(submit=self._submit)
        self.planner = SimpleNamespace(plan_pass=None)

    def _submit(self, function: Any, request: PassRequest, reader: Any) -> Future[Any]:
        self.requests.append(request)
        answer: Future[Any] = Future()
        note = f"homes: by request {len(self.requests)}"
        answer.set_result(SimpleNamespace(plan=SimpleNamespace(placement=len(self.requests), notes=(note,))))
        return answer


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_choice, "gathered", lambda own: [own])
    monkeypatch.setattr(home_choice, "CountingRows", lambda loads: loads)
    monkeypatch.setattr(home_choice.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(home_choice, "PassRequest", lambda **facts: SimpleNamespace(**facts))


def rows(*keys: int) -> Any:
    return [SimpleNamespace(sequence_keys=frozenset(keys))]


def choice_of(run: Run) -> HomeChoice[Any]:
    return HomeChoice(run)  # type: ignore[arg-type]


def log_probs(choice: HomeChoice[Any], *keys: int) -> None:
    choice.after_pass(rows(*keys), Future(), forward_only=True)


def update(choice: HomeChoice[Any], *keys: int) -> None:
    choice.after_pass(rows(*keys), Future(), forward_only=False)


def test_without_log_prob_passes_every_update_says_the_homes_of_the_next() -> None:
    run = Run()
    choice = choice_of(run)
    assert choice.move()
    assert not run.homes.went, "nothing was proposed"
    for number in (1, 2):
        update(choice, 1, 2)
        assert choice.searches
        assert choice.move()
        assert not choice.searches, "what has been carried out is due no more"
        assert choice.move()
        assert run.homes.went == [("of all stages", index + 1) for index in range(number)]
    assert choice.moves.received_bytes == 7
    assert choice.moves.seconds >= 0
    assert choice.moves != ExpertMoves()
    plan = SimpleNamespace(notes=("homes: of this pass", "copies: none pays"))
    assert choice.notes_of(plan) == ("homes: by request 2", "copies: none pays")  # type: ignore[arg-type]


def test_with_log_prob_passes_these_say_them_and_updates_do_not() -> None:
    run = Run()
    choice = choice_of(run)
    for rollout in (1, 2, 3):
        log_probs(choice, 1, 2)
        assert len(run.requests) == rollout
        assert not choice.settle(rows(1)), "the last pass was over the update's sequences"
        assert choice.move()
        update(choice, 1)
        assert not choice.settle(rows(2)), "asked once per rollout"
        update(choice, 2)
        assert not choice.searches
    assert [request.updates for request in run.requests] == [1, 2, 2], "homes have as many updates to pay back in"
    assert all(request.of_stage and request.placement == "as they are" for request in run.requests)
    assert all(request.may.move_homes and not request.may.choose_residents for request in run.requests)


def test_a_validation_pass_behind_the_rollouts_changes_nothing() -> None:
    run = Run()
    choice = choice_of(run)
    log_probs(choice, 1, 2)
    log_probs(choice, 8, 9)
    assert choice.settle(rows(2))
    assert choice.move()
    assert run.homes.went == [("of all stages", 1)], "the homes of the rollout's pass"


def test_validation_passes_alone_are_as_if_they_had_not_been() -> None:
    run = Run()
    choice = choice_of(run)
    update(choice, 1)
    due, counts = choice.proposed, choice._updates
    log_probs(choice, 8)
    log_probs(choice, 9)
    assert choice.proposed != due
    assert choice.settle(rows(1))
    assert (choice.proposed, choice._updates) == (due, counts)
    update(choice, 1)
    assert choice.searches, "updates say the homes of the next again"


def test_where_nobody_knows_the_updates_sequences_or_nothing_moves_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(own: Any) -> Any:
        raise AssertionError("a collective")

    for change in ({"rows": []}, {"homes": None}, {"reorders": False}, {"passes": False}):
        run = Run(reorders=change.get("reorders", True))
        choice = choice_of(run)
        if change.get("passes", True):
            log_probs(choice, 1)
        run.homes = change.get("homes", run.homes)
        with monkeypatch.context() as patch:
            patch.setattr(home_choice, "gathered", asked)
            assert not choice.settle(change.get("rows", rows(2)))


def test_homes_wait_while_gradients_do_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    choice = choice_of(run)
    update(choice, 1)
    proposed = choice.proposed.fresh
    run.homes.gradients_wait = True
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not choice.move()
            assert choice.proposed == ProposedHomes(postponed=proposed)
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "moe_rl: experts cannot move to other ranks now"
    ]
    run.homes.gradients_wait = False
    assert choice.move()
    assert run.homes.went == [("of all stages", 1)]
    assert not choice.searches


@pytest.mark.parametrize(
    ("resident_slots", "why_homes_stay", "levers"),
    [(0, None, (True, False)), (2, None, (True, True)), (2, "guarded", (False, True)), (0, "guarded", None)],
)
def test_only_levers_that_a_run_has_are_searched(
    resident_slots: int, why_homes_stay: str | None, levers: tuple[bool, bool] | None
) -> None:
    run = Run(resident_slots=resident_slots)
    run.why_homes_stay = why_homes_stay
    choice = choice_of(run)
    update(choice, 1)
    may = [(request.may.move_homes, request.may.choose_residents) for request in run.requests]
    assert may == ([] if levers is None else [levers])
    assert choice.searches == (levers is not None)


def test_updates_of_a_rollout_are_counted_between_its_log_prob_passes() -> None:
    counts, found = UpdateCounts(), []
    for forward_only in (True, False, False, True, True, False, True):
        counts = counts.after(forward_only=forward_only)
        found.append((counts.since_log_probs, counts.of_last_rollout))
    assert found == [(0, 1), (1, 1), (2, 1), (0, 2), (0, 2), (1, 2), (0, 1)]
