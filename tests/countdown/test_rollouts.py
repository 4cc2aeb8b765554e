"""Rollouts refuse what does not fit together; selecting, joining and tracing keep every row with its sequence."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.countdown.rollouts import Rollouts
from moe_rl.core.errors import InvalidInputError

PROMPT, LAYERS, TOP_K, EXPERTS = 3, 2, 2, 8


def rollouts(response_lengths: list[int], group_size: int = 2, seed: int = 0) -> Rollouts:
    """Random rollouts; token ids, log-probabilities and routes differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(response_lengths, dtype=torch.int64) + PROMPT
    num_tokens, num_sequences = int(lengths.sum()), len(lengths)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    position = torch.cat([torch.arange(int(n)) for n in lengths] or [torch.zeros(0, dtype=torch.int64)])
    last = position == torch.repeat_interleave(lengths, lengths) - 1
    is_response = position >= PROMPT
    routes = torch.rand(num_tokens, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].to(torch.uint8)
    return Rollouts(
        tokens=torch.randint(0, 19, (num_tokens,), generator=generator),
        cu_seqlens=bounds,
        prompt_lengths=torch.full((num_sequences,), PROMPT),
        problem_id=torch.arange(num_sequences) // group_size + 10 * seed,
        logprobs=-torch.rand(num_tokens, generator=generator) * is_response,
        response_mask=is_response,
        routed_experts=routes * ~last[:, None, None],
        routed=~last,
        router_logprobs=-torch.rand(num_tokens, LAYERS, TOP_K, generator=generator),
        rewards=torch.rand(num_sequences, generator=generator),
        policy_version=torch.full((num_tokens,), seed),
        temperature=1.0,
        num_experts=EXPERTS,
    )


def same(left: Rollouts, right: Rollouts) -> bool:
    """Whether all fields are equal, bit for bit."""
    other = right.state()
    return all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in left.state().items()
    )


LENGTHS = st.lists(st.integers(1, 5), min_size=2, max_size=8).filter(lambda lengths: len(lengths) % 2 == 0)


@given(LENGTHS, LENGTHS)
def test_selecting_the_parts_of_joined_rollouts_gives_them_back(first: list[int], second: list[int]) -> None:
    parts = [rollouts(first, seed=1), rollouts(second, seed=2)]
    joined = Rollouts.concatenate(parts)
    assert joined.num_sequences == len(first) + len(second)
    assert same(joined.select(torch.arange(len(first))), parts[0])
    assert same(joined.select(torch.arange(len(first), joined.num_sequences)), parts[1])
    reversed_twice = joined.select(torch.arange(joined.num_sequences).flip(0))
    assert same(reversed_twice.select(torch.arange(joined.num_sequences).flip(0)), joined)


def test_rollouts_may_be_empty() -> None:
    empty = rollouts([])
    assert (empty.num_sequences, len(empty.tokens)) == (0, 0)
    assert same(Rollouts.concatenate([empty, rollouts([2, 1])]), rollouts([2, 1]))
    assert same(rollouts([2, 1]).select(torch.zeros(0, dtype=torch.int64)), replace(empty, problem_id=empty.problem_id))


def test_the_state_rebuilds_them() -> None:
    made = rollouts([1, 4, 2, 2])
    assert same(Rollouts(**made.state()), made)  # type: ignore[arg-type]


def test_the_trace_holds_every_route_and_marks_the_rows_without_one() -> None:
    made = rollouts([2, 4, 1, 3], seed=3)
    trace = made.trace(model="m", step=7)
    trace.check_routes()
    np.testing.assert_array_equal(trace.routed_experts, made.routed_experts.numpy())
    np.testing.assert_array_equal(np.flatnonzero(~trace.valid), trace.cu_seqlens[1:] - 1)
    np.testing.assert_array_equal(trace.group_id, [30, 30, 31, 31])
    assert trace.policy_version is not None
    assert set(trace.step) == {7}
    assert set(trace.policy_version) == {3}


@pytest.mark.parametrize(
    ("field", "change", "sentence"),
    [
        ("tokens", lambda value: value.int(), "tokens must be a torch.int64"),
        ("logprobs", lambda value: value[:-1], "one row per token"),
        ("logprobs", lambda value: value - 1, "0 for prompt tokens"),
        ("rewards", lambda value: value[:-1], "rewards must be"),
        ("cu_seqlens", lambda value: value + 1, "run from 0 to the number"),
        ("prompt_lengths", lambda value: value * 0, "each prompt length must be between"),
        ("prompt_lengths", lambda value: value + 1, "response_mask"),
        ("problem_id", lambda value: torch.tensor([0, 1, 0, 1]), "must be adjacent"),
        ("routed", lambda value: torch.ones_like(value), "routed must be False"),
        ("routed_experts", lambda value: value + EXPERTS, "outside 0 .. 7"),
        ("router_logprobs", lambda value: value[..., :1], r"both be \[T, L, K\]"),
        ("temperature", lambda value: 0.0, "temperature must be above 0"),
        ("num_experts", lambda value: 300, "num_experts must be between"),
    ],
)
def test_what_does_not_fit_is_refused(field: str, change: Any, sentence: str) -> None:
    made = rollouts([2, 1, 3, 2])
    with pytest.raises(InvalidInputError, match=sentence):
        replace(made, **{field: change(getattr(made, field))})


def test_rollouts_of_two_temperatures_are_not_joined() -> None:
    made = rollouts([2, 1])
    with pytest.raises(InvalidInputError, match="different temperatures"):
        Rollouts.concatenate([made, replace(rollouts([2, 1], seed=1), temperature=0.5)])
    with pytest.raises(InvalidInputError, match="no rollouts"):
        Rollouts.concatenate([])
