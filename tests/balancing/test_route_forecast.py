"""What is heard of sequences in one pass is what is expected of them in another, however they are packed."""

import dataclasses

import numpy as np
import pytest
import torch

from moe_rl.balancing.pass_source import CountedRows, ExpectedOrReplayedRows
from moe_rl.balancing.route_counter import RouteCounter
from moe_rl.balancing.route_forecast import MicroBatchRoutes, RouteForecast
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError

LAYERS, EXPERTS, TOP_K = 2, 6, 2
SHAPE = LAYERS, EXPERTS, TOP_K
Sample = tuple[np.ndarray, np.ndarray]


def samples(rng: np.random.Generator, lengths: list[int]) -> list[Sample]:
    """(tokens, routes [tokens, L, K]) of sequences; expert 0 is met most and expert 5 least."""
    drawn = [rng.exponential(2.0 ** np.arange(EXPERTS), (n, LAYERS, EXPERTS)) for n in lengths]
    return [(rng.integers(0, 99, len(each)), np.argsort(each, axis=2)[:, :, :TOP_K]) for each in drawn]


def heard(
    batches: list[list[Sample]], *, as_map: bool, padding: int = 0, held: list[SequenceRows] | None = None
) -> list:
    """Let a counter hear the layers of micro-batches, each followed by rows of padding that take experts 0 and 1."""
    if held is None:
        held = [held_of(batch, padding) for batch in batches]
    counter = RouteCounter(held, SHAPE, torch.device("cpu"))
    for micro_batch, batch in enumerate(batches):
        filler = np.tile(np.arange(TOP_K), (padding, LAYERS, 1))
        ids = torch.from_numpy(np.concatenate([*(routes for _, routes in batch), filler]))
        for layer in range(LAYERS):
            chosen = ids[:, layer]
            if as_map:
                chosen_map = torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
                counter.count_map(micro_batch, layer, chosen_map)
            else:
                counter.count_ids(micro_batch, layer, chosen)
    return counter.start_fetch(lambda _: None).micro_batches()


def held_of(batch: list[Sample], padding: int = 0) -> SequenceRows:
    rows = np.concatenate([*(np.full(len(tokens), i) for i, (tokens, _) in enumerate(batch)), np.full(padding, -1)])
    return SequenceRows.of_tokens([tokens for tokens, _ in batch], rows)


def counted(batch: list[Sample]) -> np.ndarray:
    routes = np.concatenate([each for _, each in batch])
    return np.stack([np.bincount(routes[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])


@pytest.mark.parametrize("as_map", [True, False])
@pytest.mark.parametrize("padding", [0, 3])
def test_another_packing_of_the_same_sequences_is_known_exactly(
    rng: np.random.Generator, as_map: bool, padding: int
) -> None:
    found = samples(rng, [5, 9, 1, 30, 7])
    known = RouteForecast(SHAPE)
    loads = known.record(heard([found[:2], found[2:]], as_map=as_map, padding=padding), is_update=False)
    assert loads.rows.tolist() == [14 + padding, 38 + padding]
    packed = [[found[3], found[0]], [found[4]], [found[2], found[1]]]
    expected = known.predict([held_of(batch, padding) for batch in packed])
    filler = counted([(np.zeros(0), np.tile(np.arange(TOP_K), (padding, LAYERS, 1)))]) if padding else 0
    np.testing.assert_array_equal(expected.pairs, [counted(batch) + filler for batch in packed])
    assert expected.known == 1.0
    assert expected.source == "log-probs"
    for drawn, batch in zip(expected.routes, packed, strict=True):
        rows = {tuple(np.sort(row, axis=-1).ravel()) for _, routes in batch for row in routes}
        assert len(drawn) == sum(len(tokens) for tokens, _ in batch)
        assert {tuple(np.sort(row, axis=-1).ravel()) for row in drawn.astype(np.int64)} <= rows


def test_unknown_sequences_are_guessed_from_the_mean_row(rng: np.random.Generator) -> None:
    known = RouteForecast(SHAPE)
    first, other = samples(rng, [40]), samples(rng, [10, 20])
    assert known.predict([held_of(other)]).source == "nothing"
    known.record(heard([first], as_map=True), is_update=True)
    guessed = known.predict([held_of(other)])
    assert (guessed.known, guessed.source) == (0.0, "history")
    assert np.abs(guessed.pairs[0] - counted(first) * 30 / 40).max() <= 0.5
    known.record(heard([[*first, other[0]]], as_map=True), is_update=False)
    assert known.predict([held_of(other)]).known == pytest.approx(10 / 30)


def test_rows_that_nobody_announced_count_as_the_mean_micro_batch(rng: np.random.Generator) -> None:
    known, batches = RouteForecast(SHAPE), [samples(rng, [10]), samples(rng, [30])]
    unknown = [SequenceRows.unannounced()] * 2
    loads = known.record(heard(batches, as_map=True, held=unknown), is_update=True)
    np.testing.assert_array_equal(loads.pairs, [counted(batch) for batch in batches])
    assert loads.rows.tolist() == [10, 30]
    again = known.predict([SequenceRows.unannounced()] * 3)
    assert again.rows.tolist() == [20] * 3
    assert np.abs(again.pairs - np.mean([counted(batch) for batch in batches], axis=0)).max() <= 1


def test_a_rollouts_log_prob_passes_add_up_until_its_update(rng: np.random.Generator) -> None:
    found = samples(rng, [10, 20, 30])
    known = RouteForecast(SHAPE)
    for one in found:
        known.record(heard([[one]], as_map=True), is_update=False)
    assert known.predict([held_of(found)]).known == 1
    known.record(heard([found], as_map=True), is_update=True)
    known.record(heard([found[:1]], as_map=True), is_update=False)
    known.record(heard([found[:1]], as_map=True), is_update=True)
    assert known.predict([held_of(found)]).known == pytest.approx(10 / 60), "the next rollout begins from nothing"


def test_drift_scales_what_was_foretold_to_what_came(rng: np.random.Generator) -> None:
    """The routers moved: every token of expert 0 now goes to expert 5; the next update is foretold so."""
    # So long that expert 5, which the factor is measured on, has some 60 pairs in a sequence: 13 % of noise each.
    found = samples(rng, [2000, 2000])
    known = RouteForecast(SHAPE)
    known.record(heard([found], as_map=True), is_update=False)
    moved = [(tokens, np.where(routes == 0, 5, np.where(routes == 5, 0, routes))) for tokens, routes in found]
    foretold = known.predict([held_of(moved[:1])])
    known.record(heard([moved[:1]], as_map=True), prediction=foretold, is_update=True)
    error = np.abs(known.predict([held_of(moved[1:])]).pairs[0] - counted(moved[1:])).sum()
    assert error < np.abs(counted(found[1:]) - counted(moved[1:])).sum() / 3
    known.record(heard([found[1:]], as_map=True), is_update=False)
    np.testing.assert_array_equal(known.predict([held_of(found[1:])]).pairs[0], counted(found[1:]))
    known.record(heard([found[1:]], as_map=True), is_update=True)
    assert known.predict([held_of(found[:1])]).known == 0, "the rollout before is forgotten"


def test_a_pass_over_other_sequences_changes_nothing_of_what_an_update_is_expected_to_be(
    rng: np.random.Generator,
) -> None:
    """Validation in the middle of a rollout, and in a run without log-prob passes."""
    rollout, validation = samples(rng, [200, 200]), samples(rng, [90, 150])
    undisturbed, disturbed = RouteForecast(SHAPE), RouteForecast(SHAPE)
    for known in (undisturbed, disturbed):
        known.record(heard([rollout], as_map=True), is_update=False)
        foretold = known.predict([held_of(rollout[:1])])
        known.record(heard([rollout[:1]], as_map=True), prediction=foretold, is_update=True)
    disturbed.record(heard([validation], as_map=True), is_update=False)
    for _ in range(2):
        one, other = (known.predict([held_of(rollout[1:])]) for known in (undisturbed, disturbed))
        np.testing.assert_array_equal(one.pairs, other.pairs)
        assert other.known == 1
        for known in (undisturbed, disturbed):
            known.record(heard([rollout[1:]], as_map=True), prediction=one, is_update=True)
    strangers = samples(rng, [60])
    disturbed.record(heard([validation], as_map=True), is_update=False)
    one, other = (known.predict([held_of(strangers)]) for known in (undisturbed, disturbed))
    np.testing.assert_array_equal(one.pairs, other.pairs)
    assert other.source == "history"


def test_a_change_goes_on_half_as_fast_as_it_went_in_the_next_rollout_too() -> None:
    """Of 2,000 tokens expert 5 takes 100, and twice as many after every update."""
    tokens = np.arange(2000)
    drawn = np.zeros((len(SequenceRows.of_tokens([tokens]).sampled_rows), SHAPE[0], SHAPE[2]), np.int16)

    def of(pairs: int) -> list[MicroBatchRoutes]:
        counts = np.zeros((2, SHAPE[0], SHAPE[1]), np.int32)
        counts[0, :, 0], counts[0, :, 5] = 2000 * SHAPE[2] - pairs, pairs
        return [MicroBatchRoutes(rows=SequenceRows.of_tokens([tokens]), counts_SLE=counts, sampled_ids_ULK=drawn)]

    known = RouteForecast(SHAPE)
    for rollout in range(2):
        known.record(of(100), is_update=False)
        for update, pairs in enumerate([100, 200, 400]):
            foretold = known.predict([SequenceRows.of_tokens([tokens])])
            expected = (100, 141 if rollout else 100, 283)[update]
            assert foretold.pairs[0, 0, 5] == pytest.approx(expected, rel=0.02)
            known.record(of(pairs), prediction=foretold, is_update=True)


def test_a_part_of_a_sequence_is_a_part_of_its_counts(rng: np.random.Generator) -> None:
    """Sequence parallelism: all ranks know the sum, each holds some rows."""
    found = samples(rng, [64])
    known = RouteForecast(SHAPE)
    known.record(heard([found], as_map=True), is_update=False)
    half = SequenceRows.of_tokens([found[0][0]], np.zeros(32))
    assert np.abs(known.predict([half]).pairs[0] - counted(found) / 2).max() <= 0.5


def test_replayed_routes_give_way_where_whole_sequences_were_heard(rng: np.random.Generator) -> None:
    found, other = samples(rng, [8, 5]), samples(rng, [4])
    known = RouteForecast(SHAPE)
    known.record(heard([found], as_map=True), is_update=False)
    replayed = CountedRows(known.predict([held_of(other)]))
    in_full = ExpectedOrReplayedRows(known, [held_of(found[::-1])], replayed)
    np.testing.assert_array_equal(in_full.read().pairs[0], counted(found))
    every_row = CountedRows(dataclasses.replace(replayed.read(), known=1.0))
    assert ExpectedOrReplayedRows(known, [held_of(found)], every_row).read() is every_row.read()
    half = SequenceRows.of_tokens([found[0][0]], np.zeros(4))
    for held in (held_of([*found, *other]), half):
        assert ExpectedOrReplayedRows(known, [held], replayed).read() is replayed.read()


@pytest.mark.parametrize("first", [4, 9])
@pytest.mark.parametrize("second", [0, 4, 9])
def test_an_update_may_pad_otherwise_than_the_log_prob_pass(rng: np.random.Generator, first: int, second: int) -> None:
    whole, other = samples(rng, [8, 5]), samples(rng, [4])
    forecast = RouteForecast(SHAPE)
    batches = [held_of(whole, first), held_of(other, 4)]
    for batch, rows in zip((whole, other), batches, strict=True):
        forecast.record(
            heard([batch], as_map=True, padding=len(rows.sequence_of_row) - sum(len(s[0]) for s in batch), held=[rows]),
            is_update=False,
        )
    replayed = CountedRows(forecast.predict([held_of(samples(rng, [3]))]))
    update = ExpectedOrReplayedRows(forecast, [held_of(whole, second)], replayed).read()
    padding_LE = np.zeros((LAYERS, EXPERTS), np.int64)
    padding_LE[:, :TOP_K] = second
    np.testing.assert_array_equal(update.pairs[0], counted(whole) + padding_LE)


def test_rows_that_replayed_routes_leave_out_are_no_drift(rng: np.random.Generator) -> None:
    batch = samples(rng, [8, 5])
    forecast = RouteForecast(SHAPE)
    forecast.record(heard([batch], as_map=True), is_update=False)
    replayed = dataclasses.replace(forecast.predict([held_of(batch)]), source="routes")
    forecast.record(heard([batch], as_map=True, padding=50), prediction=replayed, is_update=True)
    np.testing.assert_array_equal(forecast.predict([held_of(batch)]).pairs[0], counted(batch))


@pytest.mark.parametrize("lengths", [[0, 4], [3]])
def test_no_rows_and_empty_sequences(rng: np.random.Generator, lengths: list[int]) -> None:
    known, found = RouteForecast(SHAPE), samples(rng, lengths)
    known.record(heard([found], as_map=False), is_update=False)
    np.testing.assert_array_equal(known.predict([held_of(found)]).pairs, [counted(found)])
    known.record([], is_update=True)


def test_rows_that_do_not_match_what_was_announced_are_an_error(rng: np.random.Generator) -> None:
    with pytest.raises(InvalidInputError, match="4 tokens were announced for micro-batch 0, but the routers got 5"):
        heard([samples(rng, [5])], as_map=True, held=[held_of(samples(rng, [4]))])
