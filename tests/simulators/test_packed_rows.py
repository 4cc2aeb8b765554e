"""Core attention over packed rows: of models with attention sinks it computes whole rows, of others each sequence."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import HARDWARE, model_spec

from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.topology import ClusterTopology
from moe_rl.report.tuned_settings import ParallelLayout
from moe_rl.simulators.balanced import BalancedBatch, cost_of_lengths
from moe_rl.simulators.base_time import SourceWork, core_attention_seconds
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.rl_update import trainer_seconds
from moe_rl.simulators.setting import StepSetting, TrainingRun
from moe_rl.study.shape_task import ShapeTask

MODEL = model_spec(num_experts=4, num_layers=2, top_k=1)
SINKS = replace(MODEL, attention_sinks=True, sliding_window=4, num_sliding_window_layers=1)
PACKED = StepSetting(packed_sequences=True)
RUN = TrainingRun(model=SINKS, topology=ClusterTopology(hardware=HARDWARE, ep_size=2), setting=PACKED)

cut_rows = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def step_of(run: TrainingRun, first_row: list[int], second_row: list[int]) -> TrainingStep:
    """One micro-batch: a row of sequences of these lengths on each of two ranks."""
    rank = np.repeat(np.arange(2, dtype=np.int32), [len(first_row), len(second_row)])
    lengths = np.array([*first_row, *second_row], np.int64)
    tokens = np.array([sum(first_row), sum(second_row)], np.int64)
    pairs = np.zeros((1, 1, 2, 2, 4), np.int32)
    pairs[..., 0] = tokens
    layout = BatchLayout(
        micro_batch=np.zeros(len(lengths), np.int32),
        dp_rank=rank,
        order=np.concatenate([np.arange(len(first_row)), np.arange(len(second_row))]).astype(np.int32),
        num_micro_batches=1,
        num_dp_ranks=2,
    )
    load = StepLoad(pairs=pairs, tokens=tokens[None, None], top_k=1)
    return TrainingStep(
        load=load, layout=layout, lengths=lengths, model=run.model, topology=run.topology, setting=run.setting
    )


@settings(max_examples=25)
@given(cut_rows, cut_rows)
def test_a_row_costs_the_same_however_it_is_cut(first_row: list[int], second_row: list[int]) -> None:
    """All pairs of a row are computed: sequences of 2 and 3 tokens cost the 25 of one of 5, windows save nothing."""
    work = SourceWork.of(step_of(RUN, first_row, second_row))
    assert work.attention_squares[0, 0].tolist() == [sum(first_row) ** 2, sum(second_row) ** 2]
    apart = SourceWork.of(step_of(replace(RUN, setting=StepSetting()), first_row, second_row))
    assert (apart.attention_squares <= work.attention_squares).all()


@settings(max_examples=25)
@given(cut_rows, cut_rows)
def test_packing_is_no_matter_to_a_model_without_sinks(first_row: list[int], second_row: list[int]) -> None:
    works = [
        SourceWork.of(step_of(replace(RUN, model=MODEL, setting=setting), first_row, second_row))
        for setting in (PACKED, StepSetting())
    ]
    assert np.array_equal(works[0].attention_squares, works[1].attention_squares)
    rates = [core_attention_seconds(MODEL, HARDWARE, setting, backward=False) for setting in (PACKED, StepSetting())]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("backward", [False, True])
def test_packed_rows_of_a_model_with_sinks_are_slower_per_pair(backward: bool) -> None:
    packed, apart = (
        core_attention_seconds(SINKS, HARDWARE, setting, backward=backward) for setting in (PACKED, StepSetting())
    )
    assert packed > 10 * apart


def test_the_packer_prices_a_sequence_by_the_row_that_it_shares() -> None:
    """Of rows of 64 tokens a sequence of 16 attends to all 64, one of 32 costs twice as much."""
    rows, alone = (
        cost_of_lengths(replace(RUN, setting=setting), np.array([16, 32]), tokens_per_rank=64.0)
        for setting in (PACKED, StepSetting())
    )
    short, long_one = rows.sequence_s.sum(axis=0)
    assert long_one == pytest.approx(2 * short)
    assert short > alone.sequence_s.sum(axis=0)[0]


def test_a_balanced_batch_attends_to_rows_of_its_sequence_length() -> None:
    packed, apart = (
        BalancedBatch.of(replace(RUN, setting=setting), tokens_per_rank=64, sequence_length=64)
        for setting in (PACKED, StepSetting())
    )
    assert packed.work.attention_squares[0, 0, 0] == 64 * 64
    assert packed.step(4).step_time_s > apart.step(4).step_time_s


# The same tokens in sequences of 16 and of 64, which fill rows of 512 tokens.
SHORT, LONG = np.full(128, 16, np.int64), np.full(32, 64, np.int64)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_a_search_of_layouts_prices_rows_and_not_the_sequences_in_them(tensor_ranks: int) -> None:
    def seconds(setting: StepSetting, lengths: NDArray[np.int64]) -> float:
        task = ShapeTask(
            shapes=(), model=SINKS, hardware=HARDWARE, base=setting, lengths=lengths, gpus=4, ranks_per_node=4
        )
        shape = ParallelLayout(
            expert_model_parallel_size=2, tensor_model_parallel_size=tensor_ranks, context_parallel_size=1,
            pipeline_model_parallel_size=1, num_virtual_stages=1, dispatcher="alltoall",
        )  # fmt: skip
        setting = replace(setting, tensor_model_parallel_size=tensor_ranks)
        return float(lengths.sum()) / task.priced(shape, setting, 512).tokens_per_s_per_gpu

    assert seconds(PACKED, SHORT) == pytest.approx(seconds(PACKED, LONG))
    assert seconds(StepSetting(), SHORT) < seconds(StepSetting(), LONG) < seconds(PACKED, LONG)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_an_update_of_lengths_alone_prices_rows_and_not_the_sequences_in_them(tensor_ranks: int) -> None:
    def seconds(setting: StepSetting, lengths: NDArray[np.int64]) -> float:
        setting = replace(setting, tensor_model_parallel_size=tensor_ranks)
        _, update_s = trainer_seconds(
            SINKS, HARDWARE, setting, lengths, train_gpus=4, ep_size=2, micro_batch_tokens=512
        )
        return update_s

    assert seconds(PACKED, SHORT) == pytest.approx(seconds(PACKED, LONG))
    assert seconds(StepSetting(), SHORT) < seconds(StepSetting(), LONG) < seconds(PACKED, LONG)
