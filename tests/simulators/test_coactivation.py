"""How often experts meet in a token: what the measure says of known routes, and generators made like a trace."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_runner import moe_rl, write_npz

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import open_source
from moe_rl.simulators.coactivation import HALVINGS, SAMPLE, SIGMAS, coactivation, like
from moe_rl.simulators.synthetic import PRESET_B, PRESET_C, SequenceModel, synthetic_trace

SMALL = SequenceModel(
    num_layers=3,
    num_experts=16,
    top_k=4,
    num_sequences=60,
    mean_length=80,
    expert_sigma=0.3,
    domain_sigma=0.3,
    sequence_sigma=0.3,
    token_persistence=0.3,
)


def trace_of(routes: np.ndarray, num_experts: int) -> RoutingTrace:
    """Sequences of 20 tokens."""
    return RoutingTrace.from_sequences(np.split(routes, len(routes) // 20), num_experts=num_experts)


def test_independent_choices_meet_by_chance_alone(rng: np.random.Generator) -> None:
    """Each half has n pairs over about E (E - 1) cells, so the product of two differences has deviation 1 / n times the
    root of that number of cells."""
    experts, tokens, top_k = 12, 8000, 3
    scores = rng.gumbel(size=(tokens, 1, experts))
    found = coactivation(trace_of(np.argsort(-scores, axis=2)[:, :, :top_k], experts))
    pairs_of_a_half = tokens / 2 * top_k * (top_k - 1) / 2
    assert abs(found) < 4 * np.sqrt(experts * (experts - 1)) / pairs_of_a_half


@pytest.mark.parametrize("experts", [16, 64])
def test_experts_that_meet_in_groups_alone_say_how_many_groups_there_are(
    rng: np.random.Generator, experts: int
) -> None:
    groups, tokens, each = 4, 6000, experts // 4
    group = rng.integers(0, groups, tokens)
    inside = np.argsort(rng.random((tokens, each)), axis=1)[:, :2]
    found = coactivation(trace_of((group[:, None] * each + inside)[:, None], experts))
    # Of the E - 1 others an expert meets E / b - 1 alone.
    assert found == pytest.approx((experts - 1) / (each - 1) - 1, rel=0.1)


def test_with_one_expert_per_token_none_meet(rng: np.random.Generator) -> None:
    assert coactivation(trace_of(rng.integers(0, 8, (400, 2, 1)), 8)) == 0


def test_topics_bring_experts_together() -> None:
    found = [
        coactivation(synthetic_trace(replace(one, num_layers=4, num_sequences=80))) for one in (PRESET_B, PRESET_C)
    ]
    assert found[0] < 0.1 < 0.5 < found[1]


def test_a_generator_is_made_like_a_trace_of_another_shape() -> None:
    """Half a step of the search below and above the spread that it found lie on both sides of the trace."""
    wanted = synthetic_trace(replace(SMALL, num_topics=6, topic_sigma=2.0))
    fitted = like(replace(SMALL, num_experts=32, top_k=5), wanted)
    assert (fitted.num_experts, fitted.num_layers, fitted.num_sequences) == (32, 3, 60)
    step = (SIGMAS[1] - SIGMAS[0]) / 2**HALVINGS
    sample = replace(fitted, num_layers=SAMPLE[0], num_sequences=SAMPLE[1])
    below, above = (
        coactivation(synthetic_trace(replace(sample, topic_sigma=fitted.topic_sigma + off))) for off in (-step, step)
    )
    assert below < coactivation(wanted) < above


def test_experts_that_meet_more_than_topics_can_bring_about_are_refused(rng: np.random.Generator) -> None:
    twins = rng.integers(0, 8, 4000)
    with pytest.raises(InvalidInputError, match="more often than 8 topics can produce"):
        like(SMALL, trace_of(np.stack([2 * twins, 2 * twins + 1], axis=1)[:, None], 16))


@pytest.mark.parametrize("native", ["0", "1"])
def test_tokens_keep_to_their_best_groups(monkeypatch: pytest.MonkeyPatch, native: str) -> None:
    free = replace(SMALL, num_sequences=8)
    limited = replace(free, num_expert_groups=4, expert_group_top_k=2)
    monkeypatch.setenv("MOE_RL_NATIVE", native)
    routes, ranked = (synthetic_trace(one).routed_experts for one in (limited, free))
    assert routes.shape == ranked.shape
    groups = np.sort(routes // 4, axis=2)
    assert (1 + (np.diff(groups, axis=2) > 0).sum(axis=2)).max() == 2
    assert (np.sort(routes, axis=2)[:, :, 1:] != np.sort(routes, axis=2)[:, :, :-1]).all()
    # The best expert of all is in one of them; where a token's free choice fits two groups it stays.
    assert (routes[:, :, 0] == ranked[:, :, 0]).all()
    fits = (1 + (np.diff(np.sort(ranked // 4, axis=2), axis=2) > 0).sum(axis=2)) <= 2
    assert (routes[fits] == ranked[fits]).all()


def test_groups_that_do_not_share_out_the_experts_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"num_expert_groups \(3\) does not divide num_experts \(16\)"):
        replace(SMALL, num_expert_groups=3)
    with pytest.raises(InvalidInputError, match=r"leaves each token 2 experts .* leaves at least 4 experts"):
        replace(SMALL, num_expert_groups=8, expert_group_top_k=1)


@pytest.mark.lengthy
def test_the_command_line_makes_a_trace_like_another(tmp_path: Path) -> None:
    given, made, counts = write_npz(tmp_path / "given.npz"), tmp_path / "made.moetrace", tmp_path / "c.moetrace"
    ran = moe_rl("trace", "synth", "preset_b", made, "--option", "num_sequences=10", "--like", given)
    assert ran.code == 0, ran.err
    assert "expert co-activation is fitted to" in ran.err
    assert open_source(made).num_sequences == 10
    assert moe_rl("trace", "convert", given, counts, "--num-experts", 8, "--counts-only").code == 0
    refused = moe_rl("trace", "synth", "preset_b", tmp_path / "n.moetrace", "--like", counts)
    assert refused.code == 2
    assert "contains only counts, but the routes of individual tokens are needed" in refused.err
    assert not (tmp_path / "n.moetrace").exists()
