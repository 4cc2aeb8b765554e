"""Rows of a rank under tensor, sequence and context parallelism, from what frameworks carry."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron.routed_rows import RowSlice, packed_rows, padded_rows, padded_sequences, replayed_rows


def named(batch: int, length: int) -> np.ndarray:
    """[B, S, 1, 2] ids that name their place: (b, s)."""
    b, s = np.meshgrid(np.arange(batch), np.arange(length), indexing="ij")
    return np.stack([b, s], axis=2)[:, :, None]


def slices(tp_size: int, cp_size: int) -> list[RowSlice]:
    return [
        RowSlice(tp_size=tp_size, tp_rank=tp, cp_size=cp_size, cp_rank=cp)
        for cp in range(cp_size)
        for tp in range(tp_size)
    ]


def test_a_padded_batch_is_read_position_by_position() -> None:
    rows = padded_rows(named(2, 3), row_slice=RowSlice())
    assert rows[:, 0].tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]


def test_context_parallel_ranks_hold_an_early_and_a_late_chunk_and_tensor_parallel_ranks_halves_of_that() -> None:
    held = [padded_rows(named(1, 8), row_slice=where)[:, 0, 1].tolist() for where in slices(2, 2)]
    assert held == [[0, 1], [6, 7], [2, 3], [4, 5]]


@given(
    tp_size=st.sampled_from([1, 2, 4]),
    cp_size=st.sampled_from([1, 2, 3]),
    batch=st.integers(1, 3),
    chunks=st.integers(1, 3),
)
def test_the_ranks_hold_every_token_once(tp_size: int, cp_size: int, batch: int, chunks: int) -> None:
    length = 2 * cp_size * tp_size * chunks
    held = [padded_rows(named(batch, length), row_slice=where)[:, 0] for where in slices(tp_size, cp_size)]
    assert {len(rows) for rows in held} == {batch * length // (tp_size * cp_size)}
    everything = np.concatenate(held).tolist()
    assert sorted(everything) == [[b, s] for b in range(batch) for s in range(length)]


def test_padding_has_no_route() -> None:
    rows = padded_rows(
        torch.ones(2, 2, 3, 1, dtype=torch.uint8), row_slice=RowSlice(), attention_mask=torch.tensor([[1, 1], [0, 1]])
    )
    assert rows[:, 0, 0].tolist() == [1, -1, 1, 1]


@given(tp_size=st.sampled_from([1, 2]), cp_size=st.sampled_from([1, 2]), batch=st.integers(1, 3))
def test_sequences_of_a_padded_batch_lie_as_its_routes(tp_size: int, cp_size: int, batch: int) -> None:
    """The route of every token says which sequence it is of, and padding has none."""
    length = 2 * cp_size * tp_size
    mask = np.arange(length) < np.arange(length, length - batch, -1)[:, None]
    tokens = np.arange(batch * length).reshape(batch, length)
    for where in slices(tp_size, cp_size):
        rows = padded_sequences(torch.from_numpy(tokens), row_slice=where, attention_mask=mask)
        sequence = padded_rows(named(batch, length), row_slice=where, attention_mask=mask)[:, 0, 0]
        assert rows.sequence_of_row.tolist() == np.where(sequence < 0, batch, sequence).tolist()
        assert rows.keys.tolist() == SequenceRows.of_padded(tokens, mask).keys.tolist()


def test_packed_sequences_follow_each_other_and_their_last_token_has_no_route() -> None:
    sequences = [np.full((3, 1, 1), 5), np.full((1, 1, 1), 6)]
    rows = packed_rows(sequences, cu_seqlens_padded=torch.tensor([0, 4, 8]), row_slice=RowSlice())
    assert rows.ravel().tolist() == [5, 5, 5, -1, 6, -1, -1, -1]


def test_packed_sequences_are_each_cut_for_context_parallelism() -> None:
    sequences = [np.arange(4).reshape(4, 1, 1), np.arange(10, 14).reshape(4, 1, 1)]
    held = [packed_rows(sequences, cu_seqlens_padded=[0, 4, 8], row_slice=w).ravel().tolist() for w in slices(2, 2)]
    assert held == [[0, 3], [10, 13], [1, 2], [11, 12]]


def test_replayed_layers_stand_where_the_model_has_them() -> None:
    """Layers 3 and 1 of four, in the order in which the rank holds them; the others are of other stages."""
    targets = {3: torch.tensor([[30, 31], [32, 33]]), 1: torch.tensor([[10, 11], [12, 13]])}
    layers = [
        SimpleNamespace(router=SimpleNamespace(router_replay=SimpleNamespace(replay_backward_list=[held, held + 100])))
        for held in targets.values()
    ]
    routes = replayed_rows(layers, layer_ids=list(targets), num_layers=4)
    nothing = [-1, -1]
    assert routes[0].tolist() == [[nothing, [10, 11], nothing, [30, 31]], [nothing, [12, 13], nothing, [32, 33]]]
    assert routes[1][:, [1, 3]].tolist() == [[[110, 111], [130, 131]], [[112, 113], [132, 133]]]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: padded_rows(named(1, 6), row_slice=RowSlice(cp_size=2)), "divides every sequence into 4 equal chunks"),
        (lambda: padded_rows(named(1, 3), row_slice=RowSlice(tp_size=2)), "must be a multiple of 2, got 3"),
        (lambda: padded_rows(np.zeros((1, 2, 3)), row_slice=RowSlice()), "integers with 4 dimensions"),
        (
            lambda: padded_rows(named(2, 2), row_slice=RowSlice(), attention_mask=np.ones((1, 2))),
            "must have shape [2, 2]",
        ),
        (lambda: packed_rows([np.zeros((3, 1, 1), int)], cu_seqlens_padded=[0, 2], row_slice=RowSlice()), "3 tokens"),
        (lambda: packed_rows([], cu_seqlens_padded=[0], row_slice=RowSlice()), "has no sequences"),
        (lambda: RowSlice(tp_size=2, tp_rank=2), "tp_rank must be 0 to 1 (tp_size - 1)"),
    ],
)
def test_what_does_not_fit_is_refused(call: object, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        call()  # type: ignore[operator]
    assert sentence in str(refused.value)
