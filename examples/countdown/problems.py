"""Countdown: combine the given numbers, each exactly once, with + - * / into an expression that equals the target.

The task of RSPO's and TinyZero's experiments, made easier for a tiny model: every problem has a solution that takes the
numbers in the order in which they are given (an answer may take them in any).

Problems can be of several kinds, as the data of RL runs is: of different lengths, and in several scripts, each with
symbols of its own, which is to a model with one token per character what several languages are.

Problems are drawn by number, so that a run resumes at any of them and no file holds them; training and held-out
problems are disjoint because a hash of the problem decides which it is. Answers are read and evaluated with exact
fractions.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

from moe_rl.core.errors import InvalidInputError, require

Split = Literal["train", "held-out"]

_HELD_OUT_BUCKETS = 64
_BUCKETS = 256
_DRAWS = 10_000
_COMMON = "0123456789+-*/()=,"
_SCRIPTS = (_COMMON, "ABCDEFGHIJKLMNOPQR", "abcdefghijklmnopqr", "stuvwxyzSTUVWXYZ&%")
"""The symbols of every script, in the order of the common ones."""
_SYMBOLS = "".join(_SCRIPTS)
_TO_SCRIPT = tuple(str.maketrans(_COMMON, symbols) for symbols in _SCRIPTS)
# The symbols of other scripts mean nothing: they become a character that no expression has.
_FROM_SCRIPT = tuple(
    str.maketrans(dict.fromkeys(_SYMBOLS, " ") | dict(zip(symbols, _COMMON, strict=True))) for symbols in _SCRIPTS
)
EOS_ID = 0
"""Id of the one token that is not a character: it ends an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountdownSpec:
    """Which problems there are."""

    num_numbers: int = 3
    extra_numbers: int = 0
    """Some problems have up to this many numbers more, every count as often."""
    num_scripts: int = 1
    """Problem number n is written in script n % num_scripts; script 0 is the one that people read."""
    max_number: int = 9
    """Numbers are 1 .. max_number."""
    max_target: int = 99
    """Targets are 0 .. max_target."""
    operators: str = "+-"
    """Those the hidden solution is made of; an answer may use any of + - * /."""

    def __post_init__(self) -> None:
        require(2 <= self.num_numbers <= 6, f"num_numbers must be between 2 and 6, got {self.num_numbers}.")
        require(
            0 <= self.extra_numbers <= 6 - self.num_numbers,
            f"extra_numbers must be between 0 and {6 - self.num_numbers} (6 numbers in all), got {self.extra_numbers}.",
        )
        require(
            1 <= self.num_scripts <= len(_SCRIPTS),
            f"num_scripts must be between 1 and {len(_SCRIPTS)}, got {self.num_scripts}.",
        )
        require(1 <= self.max_number <= 999, f"max_number must be between 1 and 999, got {self.max_number}.")
        require(0 <= self.max_target <= 99_999, f"max_target must be between 0 and 99999, got {self.max_target}.")
        known = set(self.operators) <= set("+-*/") and len(set(self.operators)) == len(self.operators) > 0
        require(known, f"operators must be some of + - * /, each once, got {self.operators!r}.")

    @property
    def most_numbers(self) -> int:
        """Numbers of the longest problems."""
        return self.num_numbers + self.extra_numbers

    @property
    def vocabulary_size(self) -> int:
        """Tokens there are: the end, and the symbols of the scripts in use."""
        return 1 + len(_COMMON) * self.num_scripts

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompts; leading zeros make those of as many numbers equally long."""
        return self.most_numbers * (len(str(self.max_number)) + 1) + len(str(self.max_target)) + 1

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest hidden solution, its end token included."""
        return self.most_numbers * len(str(self.max_number)) + 3 * (self.most_numbers - 1) - 2 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Numbers to combine and the value to reach."""

    problem_id: int
    """Its number in its split: what `draw_problem` takes."""
    numbers: tuple[int, ...]
    target: int
    solution: str
    """One expression that solves it, for the supervised start."""
    prompt: str
    """What the model reads: `07,12,05,14=`."""
    script: int = 0
    """In which prompt and solution are written, and the answer has to be."""


def draw_problem(spec: CountdownSpec, split: Split, seed: int, problem_id: int) -> Problem:
    """Return problem number `problem_id` of the split: always the same one for the same arguments.

    Raises `InvalidInputError` if the spec has (next to) no problem with a target in its range.
    """
    rng = random.Random(f"{seed} {split} {problem_id}")
    script = problem_id % spec.num_scripts
    num_numbers = spec.num_numbers + random.Random(f"{seed} {split} {problem_id} length").randint(0, spec.extra_numbers)
    for _ in range(_DRAWS):
        numbers = tuple(rng.randint(1, spec.max_number) for _ in range(num_numbers))
        value, solution, _ = _random_expression(rng, list(numbers), spec)
        in_range = value is not None and value.denominator == 1 and 0 <= value <= spec.max_target
        if in_range and value is not None and split_of(numbers, int(value)) == split:
            return Problem(
                problem_id=problem_id,
                numbers=numbers,
                target=int(value),
                solution=solution.translate(_TO_SCRIPT[script]),
                prompt=_prompt(numbers, int(value), spec).translate(_TO_SCRIPT[script]),
                script=script,
            )
    raise InvalidInputError(f"no {split} problem of {spec} was found in {_DRAWS} draws: widen max_target.")


def draw_problems(spec: CountdownSpec, split: Split, seed: int, problem_ids: Sequence[int]) -> list[Problem]:
    """Return the problems of the given numbers."""
    return [draw_problem(spec, split, seed, problem_id) for problem_id in problem_ids]


def random_answer(problem: Problem, spec: CountdownSpec, rng: random.Random) -> str:
    """Return some expression of the problem's numbers with the spec's operators, whatever its value."""
    return _random_expression(rng, list(problem.numbers), spec)[1].translate(_TO_SCRIPT[problem.script])


def sum_of(problem: Problem, spec: CountdownSpec) -> str:
    """Return the sum of the problem's numbers in their order, whatever the target is."""
    terms = (_written(number, spec.max_number) for number in problem.numbers)
    return "+".join(terms).translate(_TO_SCRIPT[problem.script])


def split_of(numbers: Sequence[int], target: int) -> Split:
    """Return the split of a problem; the order of its numbers does not matter, so no permutation of one leaks."""
    key = f"{sorted(numbers)} {target}".encode()
    return "held-out" if hashlib.sha256(key).digest()[0] < _HELD_OUT_BUCKETS else "train"


def encode(text: str) -> list[int]:
    """Return the token id of every character."""
    unknown = set(text) - set(_SYMBOLS)
    require(not unknown, f"{text!r} contains {sorted(unknown)}, which are not Countdown symbols ({_SYMBOLS}).")
    return [_SYMBOLS.index(symbol) + 1 for symbol in text]


def decode(ids: Sequence[int]) -> str:
    """Return the text before the first end token."""
    ids = list(ids)
    kept = ids[: ids.index(EOS_ID)] if EOS_ID in ids else ids
    return "".join(_SYMBOLS[token - 1] for token in kept)


def solves(problem: Problem, answer: str) -> bool:
    """Return whether the answer uses every number exactly once and equals the target, in exact arithmetic."""
    read = _Reader.read(answer.translate(_FROM_SCRIPT[problem.script]))
    return read is not None and read.value == problem.target and sorted(read.numbers) == sorted(problem.numbers)


def uses_numbers(problem: Problem, answer: str) -> bool:
    """Return whether the answer is an expression of every number exactly once, whatever its value."""
    read = _Reader.read(answer.translate(_FROM_SCRIPT[problem.script]))
    return read is not None and sorted(read.numbers) == sorted(problem.numbers)


def reward(problem: Problem, answer: str, format_reward: float) -> float:
    """Return 1 for a solution, `format_reward` for another expression of the right numbers, else 0 (TinyZero's)."""
    if solves(problem, answer):
        return 1.0
    return format_reward if uses_numbers(problem, answer) else 0.0


def _prompt(numbers: Sequence[int], target: int, spec: CountdownSpec) -> str:
    return "".join(_written(number, spec.max_number) + "," for number in numbers) + (
        _written(target, spec.max_target) + "="
    )


def _written(value: int, largest: int) -> str:
    return str(value).zfill(len(str(largest)))


def _random_expression(rng: random.Random, numbers: list[int], spec: CountdownSpec) -> tuple[Fraction | None, str, str]:
    """Return (value, text, outermost operator) of a random tree over the numbers in their order.

    The value is None for a division by zero.
    """
    if len(numbers) == 1:
        return Fraction(numbers[0]), _written(numbers[0], spec.max_number), ""
    cut = rng.randint(1, len(numbers) - 1)
    left, left_text, left_operator = _random_expression(rng, numbers[:cut], spec)
    right, right_text, right_operator = _random_expression(rng, numbers[cut:], spec)
    operator = rng.choice(spec.operators)
    if operator in "*/" and left_operator in ("+", "-"):
        left_text = f"({left_text})"
    if right_operator and (operator in "*/" or (operator == "-" and right_operator in "+-")):
        right_text = f"({right_text})"
    return _apply(operator, left, right), left_text + operator + right_text, operator


def _apply(operator: str, left: Fraction | None, right: Fraction | None) -> Fraction | None:
    if left is None or right is None or (operator == "/" and right == 0):
        return None
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left / right


@dataclass(slots=True)
class _Reader:
    """Recursive descent: `sum := product (+|- product)*`, `product := atom (*|/ atom)*`, `atom := number | (sum)`."""

    text: str
    numbers: list[int]
    value: Fraction | None = None
    at: int = 0

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return the reader after the whole text was read, or None if it is not an expression or has no value."""
        reader = cls(text, [])
        reader.value = reader._chain("+-")
        return reader if reader.value is not None and reader.at == len(text) else None

    def _chain(self, operators: str) -> Fraction | None:
        """Read operands joined from the left by the operators; None if there is no operand or no value."""
        value = self._chain("*/") if operators == "+-" else self._atom()
        while value is not None and self._next() in operators and self._next():
            operator = self._take()
            value = _apply(operator, value, self._chain("*/") if operators == "+-" else self._atom())
        return value

    def _atom(self) -> Fraction | None:
        if self._next() == "(":
            self._take()
            value = self._chain("+-")
            return value if self._take() == ")" else None
        digits = ""
        while self._next() in "0123456789" and self._next():
            digits += self._take()
        if not digits:
            return None
        self.numbers.append(int(digits))
        return Fraction(int(digits))

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self) -> str:
        symbol = self._next()
        self.at += 1
        return symbol
