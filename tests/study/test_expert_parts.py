"""Experts in parts: every part of an expert gets its rows, and lies where Megatron puts it."""

import numpy as np
import pytest
from cli_runner import routes

import moe_rl
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import count_sequences
from moe_rl.study.expert_parts import PartsOfExperts, part_numbers
from moe_rl.study.traces import open_trace

EXPERTS, PARTS, EP = 8, 2, 4


def test_parts_are_numbered_by_the_ranks_that_hold_them() -> None:
    numbers = part_numbers(4, ep_size=2, parts=2)
    assert numbers.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    for parts in (1, 2, 4):
        of_all = part_numbers(EXPERTS, ep_size=EP, parts=parts)
        assert sorted(of_all.ravel()) == list(range(EXPERTS * parts))
        # Part p of an expert of EP rank r is on rank r * parts + p.
        rank = of_all // (EXPERTS // EP)
        expected = np.arange(EXPERTS)[:, None] // (EXPERTS // EP) * parts + np.arange(parts)
        assert np.array_equal(rank, expected)


def test_every_part_gets_the_rows_of_its_expert() -> None:
    trace = open_trace(RoutingTrace.from_sequences([routes(30, seed=index) for index in range(3)], num_experts=EXPERTS))
    split = PartsOfExperts.of(trace, ep_size=EP, parts=PARTS)
    (whole,), (piece,) = trace.parts(), split.parts()
    numbers = part_numbers(EXPERTS, ep_size=EP, parts=PARTS)
    before, after = count_sequences(whole).tokens_per_expert, count_sequences(piece).tokens_per_expert
    for part in range(PARTS):
        assert np.array_equal(after[:, :, numbers[:, part]], before)
    (counted,) = PartsOfExperts.of(open_trace(count_sequences(whole)), ep_size=EP, parts=PARTS).parts()
    assert np.array_equal(counted.tokens_per_expert, after)


def test_parts_that_do_not_divide_are_refused() -> None:
    trace = RoutingTrace.from_sequences([routes(30)], num_experts=EXPERTS)
    with pytest.raises(InvalidInputError, match=r"size \(5\) does not divide moe_ffn_hidden_size \(768\)"):
        moe_rl.simulate(trace, ep=2, expert_tensor_parallel_size=5, policy="static")
    with pytest.raises(InvalidInputError, match="--ep 3 does not divide the 8 experts"):
        moe_rl.simulate(trace, ep=3, expert_tensor_parallel_size=2, policy="static")
