"""What loops around Megatron's schedule say of the micro-batches that come, in one process, row for row."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from strategies import model_spec

pytest.importorskip("megatron.core")

from moe_rl.balancing import SequenceRows
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks import forward_backward
from moe_rl.frameworks.megatron.attach import looked_ahead, routes_of_nemo_rl, routes_of_padded, routes_of_skyrl
from moe_rl.megatron import routed_rows
from moe_rl.megatron.routed_rows import RowSlice

ROUTES = np.arange(2 * 6 * 1 * 2).reshape(2, 6, 1, 2)
"""[B, S, L, K] of two sequences of six tokens."""
MASK = np.arange(6) < np.array([[5], [3]])


@pytest.fixture
def row_slice(monkeypatch: pytest.MonkeyPatch) -> list[RowSlice]:
    """The slice that this process is said to hold."""
    held = [RowSlice()]
    current = classmethod(lambda cls: held[0])
    monkeypatch.setattr(routed_rows.RowSlice, "current", current)
    return held


def test_padded_routes_are_those_of_real_tokens_where_a_mask_says_so(row_slice: list[RowSlice]) -> None:
    batch = {"routed_experts": ROUTES, "mask": MASK}
    (every,) = routes_of_padded("routed_experts")([SimpleNamespace(data_dict=batch)]) or []
    (real,) = routes_of_padded("routed_experts", mask="mask")([batch]) or []
    np.testing.assert_array_equal(np.sort(every.ravel()), np.arange(ROUTES.size))
    missing = (real == -1).all(axis=(1, 2))
    assert missing.sum() == (~MASK).sum()
    np.testing.assert_array_equal(real[~missing], every[~missing])
    for other in ({"routed_experts": None}, {}):
        assert routes_of_padded("routed_experts")([batch, other]) is None


@pytest.mark.parametrize("padded", [False, True])
def test_nemo_rls_packed_routes_lie_by_the_padded_ends(padded: bool, row_slice: list[RowSlice]) -> None:
    ends = np.array([0, 5, 8])
    params = SimpleNamespace(cu_seqlens_q=ends, cu_seqlens_q_padded=np.array([0, 6, 10]) if padded else None)
    batch = {"routed_experts": ROUTES, "input_lengths": np.array([5, 3])}
    packed = SimpleNamespace(data_dict=batch, packed_seq_params=params)
    (found,) = routes_of_nemo_rl([packed]) or []
    tokens = [ROUTES[0, :5], ROUTES[1, :3]]
    if padded:
        gap = np.full((1, 1, 2), -1)
        tokens = [tokens[0], gap, tokens[1], gap]
    np.testing.assert_array_equal(found, np.concatenate(tokens))
    without = SimpleNamespace(data_dict={"input_lengths": np.array([5, 3])}, packed_seq_params=params)
    unpacked = SimpleNamespace(data_dict=batch, packed_seq_params=None)
    for other in (without, unpacked):
        assert routes_of_nemo_rl([packed, other]) is None
    (plain,) = routes_of_nemo_rl([unpacked]) or []
    np.testing.assert_array_equal(np.sort(plain.ravel()), np.arange(ROUTES.size))


@pytest.mark.parametrize(("tp", "cp", "lengths"), [(1, 1, (5, 3)), (4, 1, (8, 4)), (1, 2, (8, 4)), (2, 2, (8, 8))])
def test_skyrls_sequences_are_filled_up_to_what_cuts_them(
    tp: int, cp: int, lengths: tuple[int, int], row_slice: list[RowSlice]
) -> None:
    batch = {"rollout_expert_indices": ROUTES, "attention_mask": MASK}
    rows = []
    for tp_rank in range(tp):
        for cp_rank in range(cp):
            row_slice[0] = RowSlice(tp_size=tp, tp_rank=tp_rank, cp_size=cp, cp_rank=cp_rank)
            rows += routes_of_skyrl([batch]) or []
    everything = np.concatenate(rows)
    assert len({len(each) for each in rows}) == 1
    assert len(everything) == sum(lengths)
    real = everything[(everything >= 0).all(axis=(1, 2))]
    np.testing.assert_array_equal(np.sort(real.ravel()), np.sort(ROUTES[MASK].ravel()))
    if tp == cp == 1:
        np.testing.assert_array_equal(everything, ROUTES[MASK])
    for other in (batch | {"sub_seq_lengths": [[5], [3]]}, {"attention_mask": MASK}):
        assert routes_of_skyrl([batch, other]) is None


def balancer_of() -> Any:
    return Mock(model=model_spec(num_experts=8, num_layers=2, top_k=2, moe_layer_ids=(0, 1)))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("routed", [False, True])
def test_routes_and_sequences_of_every_micro_batch_reach_the_pass(again: bool, routed: bool) -> None:
    """Looked at together or one by one; without the routes of one of them by its sequences alone."""
    balancer, metrics = balancer_of(), list[Any]()
    rows = [SequenceRows.of_tokens([[number, 6, 7]]) for number in range(3)]

    def routes(batches: list[int]) -> list[Any] | None:
        if not routed and 1 in batches:
            return None
        return [np.full((3, 2, 2), batch) for batch in batches]

    run = forward_backward(
        lambda data_iterator, **_: list(data_iterator),
        balancer,
        routes,
        tokens=lambda batches: [rows[batch] for batch in batches],
        again=(lambda: iter(range(3))) if again else None,
        on_metrics=metrics.append,
    )
    assert run(data_iterator=iter(range(4)), num_microbatches=3, forward_only=True) == [0, 1, 2, 3]
    (source,), words = balancer.begin_pass.call_args
    assert words == {"forward_only": True}
    assert source.sequences == tuple(rows)
    assert (source.routes is not None) == routed
    if routed:
        assert [int(ids.max()) for ids in source.routes] == [0, 1, 2]
    assert metrics == [balancer.end_pass.return_value.as_dict.return_value]


def test_without_routes_and_sequences_the_number_of_micro_batches_is_known(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for again in (None, lambda: iter(range(2))):
        balancer = balancer_of()
        balancer.end_pass.return_value.as_dict.return_value = {"moe_rl/imbalance": 1.25}
        run = forward_backward(lambda **_: None, balancer, lambda batches: None, again=again)
        run(data_iterator=iter(range(2)), num_microbatches=2)
        (source,), words = balancer.begin_pass.call_args
        assert source.is_unknown
        assert (source.num_micro_batches, words) == (2, {"forward_only": False})
    assert "moe_rl: {'moe_rl/imbalance': 1.25}" in caplog.text


def test_routes_of_other_layers_in_one_micro_batch_are_refused() -> None:
    run = forward_backward(
        lambda **_: None, balancer_of(), lambda batches: [np.zeros((3, 2, 2), int), np.zeros((3, 1, 2), int)]
    )
    with pytest.raises(InvalidInputError, match=r"the same number of layers, got \[1, 2\]"):
        run(data_iterator=iter(range(2)), num_microbatches=2)


@pytest.mark.parametrize("there", [1, 3])
def test_too_few_micro_batches_are_refused_before_the_pass(there: int) -> None:
    """Of another iterator no more are read than the pass has, whatever it still holds."""
    balancer = balancer_of()
    run = forward_backward(lambda **_: None, balancer, lambda batches: None, again=lambda: iter(range(there)))
    if there == 1:
        with pytest.raises(InvalidInputError, match="`again` returned 1 micro-batches, but num_microbatches is 2"):
            run(data_iterator=iter(range(2)), num_microbatches=2)
    else:
        run(data_iterator=iter(range(2)), num_microbatches=2)
    assert balancer.begin_pass.called == (there != 1)


def test_what_was_looked_at_comes_again_before_the_rest_for_every_chunk() -> None:
    class Data(Iterator[int]):
        """An iterator with an attribute that a framework reads."""

        def __init__(self, first: int) -> None:
            self.offset, self._numbers = first, iter(range(first, first + 4))

        def __next__(self) -> int:
            return next(self._numbers)

    coming, data = looked_ahead([Data(0), Data(10)], 2)
    assert coming == [0, 1]
    assert [list(chunk) for chunk in data] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert [chunk.offset for chunk in data] == [0, 10]
    coming, one = looked_ahead(Data(5), 4)
    assert (coming, list(one)) == ([5, 6, 7, 8], [5, 6, 7, 8])
    with pytest.raises(InvalidInputError, match="has 4 micro-batches, but num_microbatches is 5"):
        looked_ahead(Data(5), 5)
    with pytest.raises(InvalidInputError, match="a data_iterator of type dict"):
        looked_ahead({}, 1)
