"""What slime's and miles' objects say of the micro-batches that come, in one process, on iterators of their shape."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from moe_rl.frameworks.slime import micro_batches
from moe_rl.frameworks.slime.micro_batches import CallData, next_routes, packed_part, replayed_routes
from moe_rl.megatron.routed_rows import RowSlice

TOKENS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11]]


def dynamic(indices: Sequence[Sequence[int]], offset: int = 0) -> Any:
    """slime's iterator: lists of samples, of which `offset` micro-batches have run."""
    return SimpleNamespace(
        rollout_data={"tokens": TOKENS}, micro_batch_indices=[*indices], micro_batch_size=None, offset=offset
    )


def of_size(size: int | None, offset: int = 0) -> Any:
    """miles' iterator without --use-dynamic-batch-size: samples in their order, of which `offset` have run."""
    return SimpleNamespace(
        rollout_data={"tokens": TOKENS}, micro_batch_indices=None, micro_batch_size=size, offset=offset
    )


def args(**words: Any) -> Any:
    return SimpleNamespace(**words)


def test_the_samples_of_the_micro_batches_that_come_follow_those_that_ran() -> None:
    indices = [[0], [4, 2], [1], [3]]
    assert CallData(args(), dynamic(indices), 2).tokens() == [[[1, 2, 3]], [[11], [5, 6]]]
    assert CallData(args(), [dynamic(indices, 1), None], 2).tokens() == [[[11], [5, 6]], [[4]]], "of the first chunk"
    assert CallData(args(), of_size(2), 2).tokens() == [[[1, 2, 3], [4]], [[5, 6], [7, 8, 9, 10]]]
    assert CallData(args(), of_size(1, 3), 2).tokens() == [[[7, 8, 9, 10]], [[11]]]


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ({"qkv_format": "bshd"}, dynamic([[0]])),
        ({"allgather_cp": True}, dynamic([[0]])),
        ({}, of_size(None)),
        ({}, iter([0])),
        ({}, dynamic([])),
    ],
)
def test_what_is_not_packed_or_not_listed_is_not_known(words: dict[str, Any], data: Any) -> None:
    call = CallData(args(**words), data, 1)
    assert call.tokens() is None
    assert call.sequences() is None
    assert call.packed == (not words)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_rows_say_of_which_sequence_they_are_and_padding_of_none(tp_rank: int, monkeypatch: Any) -> None:
    row_slice = RowSlice(tp_size=2, tp_rank=tp_rank)
    monkeypatch.setattr(micro_batches, "RowSlice", SimpleNamespace(current=lambda: row_slice))
    data = dynamic([[0, 1], [3], []])
    sequences = CallData(args(data_pad_size_multiplier=4), data, 3).sequences()
    assert sequences is not None
    of_rows = [rows.sequence_of_row.tolist() for rows in sequences]
    assert of_rows == ([[0, 0, 0, 1], [0] * 4, []] if tp_rank == 0 else [[2] * 4, [1] * 4, []])
    assert [len(rows.sequence_keys) for rows in sequences] == [2, 1, 0]
    assert len(CallData(args(), data, 3).rows([np.arange(3)])) == 128, "slime's own multiple, of each of two ranks"


def test_a_rank_has_two_chunks_of_every_sequence_under_context_parallelism() -> None:
    of_token = [np.arange(1, 9), np.array([9]), np.zeros(0, np.int64)]
    parts = [packed_part(of_token, 1, RowSlice(cp_size=2, cp_rank=rank)).tolist() for rank in range(2)]
    assert parts == [[1, 2, 7, 8, 9, -1], [3, 4, 5, 6, -1, -1]]
    assert packed_part(of_token, 1, RowSlice()).tolist() == list(range(1, 10))
    assert packed_part([], 4, RowSlice()).tolist() == []
    assert packed_part([np.arange(5)], 4, RowSlice()).tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


class Balancer:
    """Packs by turning micro-batches around; notes what it is asked."""

    def __init__(self, replay: Any = None) -> None:
        self.layers = [SimpleNamespace(router=SimpleNamespace(routing_replay=replay)), SimpleNamespace(router=object())]
        self.asked: list[Any] = []

    def packed(self, batches: Any, tokens: Any, *, token_budget: int) -> Any:
        self.asked.append((batches, tokens, token_budget))
        return batches[::-1]


def test_samples_change_their_micro_batch_in_the_shared_list_alone() -> None:
    data, balancer = dynamic([[4], [0, 2], [1], [3]], offset=1), Balancer()
    shared = data.micro_batch_indices
    words = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 10}
    CallData(args(**words), data, 2).pack(balancer)
    assert balancer.asked == [([[0, 1], [2]], [[1, 2, 3], [5, 6], [4]], 10)]
    assert data.micro_batch_indices is shared
    assert shared == [[4], [1], [0, 2], [3]]
    CallData(args(context_parallel_size=2, **words), data, 2).pack(balancer)
    assert balancer.asked[-1][2] == 20, "tokens of all ranks that share a sequence"


@pytest.mark.parametrize(
    ("change", "count", "replay"),
    [
        ({"use_dynamic_batch_size": False}, 2, None),
        ({"max_tokens_per_gpu": None}, 2, None),
        ({}, 1, None),
        ({}, 2, object()),
    ],
)
def test_micro_batches_stay_where_they_may_not_change(change: dict[str, Any], count: int, replay: Any) -> None:
    balancer, data = Balancer(replay), dynamic([[4], [0]])
    CallData(args(**({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 10} | change)), data, count).pack(balancer)
    assert (balancer.asked, data.micro_batch_indices) == ([], [[4], [0]])
    by_number = of_size(2)
    CallData(args(use_dynamic_batch_size=True, max_tokens_per_gpu=10), by_number, 2).pack(Balancer())
    assert by_number.micro_batch_indices is None


class Lazy:
    """Ids that are read once, by the router."""

    def materialize_for_routing_replay(self, stage: str) -> None:
        raise AssertionError(stage)


class ReadAgain(Lazy):
    def __init__(self, ids: Any) -> None:
        self._ids = ids

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._ids


def replay(*ids: Any, ran: int = 0) -> Any:
    return SimpleNamespace(top_indices_list=list(ids), forward_index=ran)


def test_routes_of_the_layers_of_this_stage_stand_at_their_place_in_the_model() -> None:
    first = [np.array([[0, 1], [2, 3], [4, 5]], np.uint8) + 10 * batch for batch in range(3)]
    second = [ids + 100 for ids in first]
    replays = [replay(*first, ran=1), replay(*map(ReadAgain, second), ran=1)]
    for _ in range(2):  # nothing is used up
        routes = next_routes(replays, layer_ids=(2, 0), num_layers=3, num_micro_batches=2)
        assert routes is not None
        assert len(routes) == 2
        for batch, ids in enumerate(routes, start=1):
            assert ids.shape == (3, 3, 2)
            np.testing.assert_array_equal(ids[:, 2], first[batch])
            np.testing.assert_array_equal(ids[:, 0], second[batch])
            assert (ids[:, 1] == -1).all(), "of another stage"
    run: Any = SimpleNamespace(
        layer_ids=(2, 0),
        balancer=SimpleNamespace(
            model=SimpleNamespace(num_moe_layers=3),
            layers=[SimpleNamespace(router=SimpleNamespace(routing_replay=each)) for each in replays],
        ),
    )
    for found, ids in zip(replayed_routes(run, 2) or [], routes, strict=True):
        np.testing.assert_array_equal(found, ids)


@pytest.mark.parametrize("what", ["a layer without", "too few", "lazy", "none", "no layer"])
def test_routes_that_cannot_be_read_beforehand_are_not_known(what: str) -> None:
    ids = np.zeros((3, 2), np.int32)
    replays = {
        "a layer without": [replay(ids, ids), None],
        "too few": [replay(ids, ids, ran=1)],
        "lazy": [replay(ids, Lazy())],
        "none": [replay()],
        "no layer": [],
    }[what]
    count = 0 if what == "none" else 2
    assert next_routes(replays, layer_ids=range(len(replays)), num_layers=2, num_micro_batches=count) is None
