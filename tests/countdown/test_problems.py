"""Every hidden solution solves its problem, the splits never meet, and the verifier computes exactly."""

import re
from dataclasses import replace
from fractions import Fraction
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.countdown.problems import (
    EOS_ID,
    CountdownSpec,
    Problem,
    decode,
    draw_problem,
    draw_problems,
    encode,
    reward,
    solves,
    split_of,
    uses_numbers,
)
from moe_rl.core.errors import InvalidInputError

SPECS = st.builds(
    CountdownSpec,
    num_numbers=st.integers(2, 4),
    extra_numbers=st.integers(0, 2),
    num_scripts=st.integers(1, 4),
    max_number=st.sampled_from([3, 9, 25]),
    max_target=st.sampled_from([30, 99, 999]),
    operators=st.sampled_from(["+", "+-", "-*", "+-*/"]),
)
EXPRESSIONS = st.recursive(
    st.integers(0, 12).map(str),
    lambda inner: st.one_of(inner.map("({})".format), st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join)),
    max_leaves=6,
)


def problem(numbers: tuple[int, ...], target: int) -> Problem:
    return Problem(problem_id=0, numbers=numbers, target=target, solution="", prompt="")


def value_of(text: str) -> Fraction | None:
    """Python's own arithmetic on fractions."""
    try:
        return Fraction(eval(re.sub(r"\d+", r"Fraction('\g<0>')", text), {"Fraction": Fraction}))
    except ZeroDivisionError:
        return None


@given(SPECS, st.sampled_from(["train", "held-out"]), st.integers(0, 10**6))
def test_a_drawn_problem_is_in_range_solved_by_its_solution_and_fits_its_token_counts(spec, split, number) -> None:
    drawn = draw_problem(spec, split, 0, number)
    assert drawn == draw_problem(spec, split, 0, number)
    assert solves(drawn, drawn.solution)
    assert reward(drawn, drawn.solution, 0.1) == 1
    assert all(1 <= value <= spec.max_number for value in drawn.numbers)
    assert 0 <= drawn.target <= spec.max_target
    assert spec.num_numbers <= len(drawn.numbers) <= spec.most_numbers
    assert len(encode(drawn.prompt)) <= spec.prompt_tokens
    assert (len(drawn.prompt) == spec.prompt_tokens) == (len(drawn.numbers) == spec.most_numbers)
    assert max(encode(drawn.prompt + drawn.solution)) < spec.vocabulary_size
    assert len(encode(drawn.solution)) + 1 <= spec.max_response_tokens


@given(SPECS, st.integers(0, 100))
def test_the_splits_are_disjoint_whatever_the_order_of_the_numbers(spec: CountdownSpec, seed: int) -> None:
    seen = {
        split: {(tuple(sorted(p.numbers)), p.target) for p in draw_problems(spec, split, seed, range(20))}
        for split in ("train", "held-out")
    }
    assert not seen["train"] & seen["held-out"]


def test_a_quarter_of_the_problems_is_held_out() -> None:
    keys = [(numbers, target) for numbers in combinations_with_replacement(range(1, 10), 3) for target in range(28)]
    held_out = sum(split_of(numbers, target) == "held-out" for numbers, target in keys)
    assert abs(held_out / len(keys) - 0.25) < 4 * (0.25 * 0.75 / len(keys)) ** 0.5


@given(EXPRESSIONS)
def test_the_verifier_agrees_with_exact_arithmetic(text: str) -> None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", text))
    value = value_of(text)
    assert uses_numbers(problem(numbers, 0), text) == (value is not None)
    if value is not None and value.denominator == 1:
        assert solves(problem(numbers, int(value)), text)
        assert not solves(problem(numbers, int(value) + 1), text)
        assert not solves(problem((*numbers, 1), int(value)), text)
        assert not solves(problem(numbers[1:], int(value)), text)


@pytest.mark.parametrize(
    "text", ["", "+", "1+", "-1+2", "1++2", "(1+2", "1+2)", "()", "1 2", "1(2)", "1+2=3", "1,2", "2/(1-1)", "1+2+"]
)
def test_what_is_no_expression_earns_nothing(text: str) -> None:
    for numbers in ((1, 2), (1,), (1, 2, 3), (2, 1, 1)):
        assert reward(problem(numbers, 3), text, 0.1) == 0


def test_exact_fractions_are_not_rounded() -> None:
    assert solves(problem((3, 3, 8, 8), 24), "8/(3-8/3)")
    assert not solves(problem((1, 3, 3), 0), "1/3*3-1")
    assert reward(problem((1, 3, 3), 5), "1/3+3", 0.1) == 0.1


def test_an_answer_in_the_symbols_of_another_script_is_none() -> None:
    spec = CountdownSpec(num_scripts=4)
    drawn, plain = (draw_problems(each, "train", 0, range(4)) for each in (spec, CountdownSpec()))
    assert [one.script for one in drawn] == [0, 1, 2, 3]
    for one, in_decimals in zip(drawn, plain, strict=True):
        for other in range(4):
            assert solves(replace(one, script=other), one.solution) == (other == one.script)
        mixed = in_decimals.solution[:3] + one.solution[3:]
        assert uses_numbers(one, mixed) == (one.script == 0)


def test_problems_of_one_kind_alone_are_those_without_kinds() -> None:
    """More scripts translate the problems, and lengths leave those of the least length as they are."""
    plain = draw_problems(CountdownSpec(), "train", 0, range(40))
    translated = draw_problems(CountdownSpec(num_scripts=4), "train", 0, range(40))
    assert [(one.numbers, one.target) for one in plain] == [(one.numbers, one.target) for one in translated]
    longer = draw_problems(CountdownSpec(extra_numbers=2), "train", 0, range(40))
    assert {len(one.numbers) for one in longer} == {3, 4, 5}
    assert all(one == other for one, other in zip(plain, longer, strict=True) if len(other.numbers) == 3)


@given(st.text("0123456789+-*/()=,", max_size=20), st.lists(st.integers(0, 18), max_size=4))
def test_decoding_gives_the_text_before_the_end_back(text: str, garbage: list[int]) -> None:
    assert decode([*encode(text), EOS_ID, *garbage]) == text
    assert all(0 < token < CountdownSpec().vocabulary_size for token in encode(text))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_numbers", 1),
        ("extra_numbers", -1),
        ("extra_numbers", 4),
        ("num_scripts", 5),
        ("max_number", 0),
        ("max_target", -1),
        ("operators", "+^"),
        ("operators", ""),
    ],
)
def test_a_wrong_spec_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=field):
        CountdownSpec(**{field: value})


def test_a_spec_without_problems_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no train problem"):
        draw_problem(CountdownSpec(num_numbers=6, operators="+", max_target=5), "train", 0, 0)


def test_an_unknown_symbol_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="not Countdown symbols"):
        encode("1 + 2")
