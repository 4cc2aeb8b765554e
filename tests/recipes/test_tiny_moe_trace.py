"""The script runs from text to trace, the trace is whole, and the same seed gives the same bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.recipes import routing_statistics, tiny_moe_trace
from moe_rl.recipes.byte_pairs import EOS_ID, PAD_ID
from moe_rl.recipes.stdlib_text import KINDS
from moe_rl.recipes.tiny_moe import (
    WINDOW_TOKENS,
    TrainingRun,
    build_model,
    left_padded,
    mean_logprobs,
    sample,
    train,
    windows,
)
from moe_rl.recipes.tiny_moe_trace import PROMPT_TOKENS, QUICK, batches_of
from moe_rl.replay import TraceReader


@pytest.fixture(scope="module")
def quick_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "quick.moetrace"
    tiny_moe_trace.main(["--quick", "--out", str(path)])
    return path


def test_the_trace_is_whole(quick_trace: Path) -> None:
    reader = TraceReader(quick_trace)
    reader.validate()
    trace = reader.load()
    assert isinstance(trace, RoutingTrace)
    groups = QUICK.num_steps * QUICK.prompts_per_kind * len(KINDS)
    assert trace.num_sequences == groups * QUICK.group_size
    assert (np.bincount(trace.group_id) == QUICK.group_size).all()
    assert reader.steps == tuple(range(QUICK.num_steps))
    assert len(np.unique(trace.sample_id)) == trace.num_sequences
    assert (trace.num_experts, trace.num_layers, trace.top_k, trace.provenance) == (64, 6, 4, "R3")
    assert trace.sequence_lengths.max() < PROMPT_TOKENS[1] + QUICK.answer_tokens
    kinds = str(reader.manifest.origin["prompt_kinds"]).split(",")
    assert sorted(kinds) == sorted(list(KINDS) * (groups // len(KINDS)))


def test_the_same_seed_gives_the_same_trace(quick_trace: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.moetrace"
    tiny_moe_trace.main(["--quick", "--out", str(again)])
    want, got = TraceReader(quick_trace).load(), TraceReader(again).load()
    np.testing.assert_array_equal(got.cu_seqlens, want.cu_seqlens)
    np.testing.assert_array_equal(got.routed_experts, want.routed_experts)


def test_the_figures_print_for_a_trace(quick_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routing_statistics.main([str(quick_trace), "--ep-group-tokens", "128"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["rank_imbalance"]["EP8"] >= figures["rank_imbalance_of_all"]["EP8"] >= 1.0
    assert set(figures["tokens_of_kind"]) == set(KINDS)


def test_a_path_without_a_trace_is_told_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        routing_statistics.main([str(tmp_path / "nothing")])
    assert "is not a trace" in capsys.readouterr().err


def test_an_existing_trace_is_not_replaced(quick_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (quick_trace / "manifest.json").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        tiny_moe_trace.main(["--quick", "--out", str(quick_trace)])
    assert "exists already" in capsys.readouterr().err
    assert (quick_trace / "manifest.json").read_bytes() == before


def test_training_lowers_the_loss_on_a_text_that_repeats() -> None:
    model = build_model(300, seed=0)
    stream = np.tile(np.arange(2, 12), 60)
    run = TrainingRun(num_updates=12, batch_windows=2)
    losses = list(train(model, windows({"count": stream}, {"count": 1.0}, 2, seed=0), run))
    assert losses[-1] < losses[0] / 2
    counting = mean_logprobs(model, [[4, 5, 6]], [[7, 8, 9]])
    jumping = mean_logprobs(model, [[4, 5, 6]], [[9, 3, 5]])
    assert counting[0] > jumping[0]


def test_the_balancing_loss_is_taken_with_the_given_weight() -> None:
    """Two runs from the same start differ in their first loss by the weight times a loss of at least top-k."""
    losses = []
    for weight in (0.0, 1.0):
        run = TrainingRun(num_updates=1, batch_windows=1, router_aux_loss_coef=weight)
        batches = windows({"count": np.tile(np.arange(2, 12), 60)}, {"count": 1.0}, 1, seed=0)
        losses.append(next(train(build_model(300, seed=0), batches, run)))
    assert losses[1] - losses[0] >= 4 * (1 - 1e-3)


def test_a_stream_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="code has 256 tokens: too few"):
        next(windows({"code": np.arange(WINDOW_TOKENS)}, {"code": 1.0}, 1, seed=0))


def test_answers_end_at_the_end_token_or_the_limit() -> None:
    model = build_model(300, seed=0)
    prompts = [[2] * 40, [3]]
    for answer in sample(model, prompts, max_new_tokens=30, seed=0):
        assert EOS_ID not in answer[:-1]
        assert answer[-1] == EOS_ID or len(answer) == 30
    assert left_padded(prompts).tolist()[1] == [PAD_ID] * 39 + [3]


def test_fine_tuning_batches_hold_every_sequence_once_per_pass() -> None:
    sequences = [[2] * length for length in (1, 5, 9, 20, WINDOW_TOKENS)]
    batches = batches_of(sequences, 2, seed=0)
    one_pass = torch.cat([next(batches) for _ in range(3)])
    assert sorted((one_pass != PAD_ID).sum(dim=1).tolist()) == [1, 5, 9, 20, WINDOW_TOKENS]
