"""The one exception that means "the value you gave is wrong"; the command line turns it into exit code 2."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin


class InvalidInputError(ValueError):
    """A value from outside is wrong; the message is one sentence about that value."""


def nearest_name(name: str, candidates: Iterable[str], *, listed_by: str = "") -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or the known names.

    Where they are too many for a sentence, `listed_by` is the command that lists them.
    """
    names = sorted(candidates)
    # One name: a user who mistyped wants the fix, not a choice.
    close_names = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close_names[0]!r}?" if close_names else f" Known: {listed_by or ', '.join(names)}."


def require(condition: bool, message: str) -> None:
    """Raise `InvalidInputError(message)` unless `condition` holds."""
    if not condition:
        raise InvalidInputError(message)


def require_known(name: str, candidates: Iterable[str], sentence: str) -> None:
    """Raise `sentence` with the nearest known name unless `name` is one of the known ones."""
    if name not in candidates:
        raise InvalidInputError(f"{sentence}{nearest_name(str(name), candidates)}")


def require_least(holder: object, *, whose: str = "", **least: float) -> None:
    """Raise unless each named field of `holder` is None or at least the number beside its name."""
    for name, lowest in least.items():
        value = getattr(holder, name)
        require(value is None or value >= lowest, f"{whose}{name} must be at least {lowest}, got {value}.")


def require_shapes(holder: object, sizes: Mapping[str, int], *, whose: str = "", **letters: str) -> None:
    """Raise unless each named array of `holder` is None or has the shape that its letters give, such as "TLK"."""
    for name, dimensions in letters.items():
        array, expected_shape = getattr(holder, name), [sizes[letter] for letter in dimensions]
        shape = expected_shape if array is None else list(array.shape)
        require(
            shape == expected_shape,
            f"{whose}{name} must have shape [{', '.join(dimensions)}] = {expected_shape}, got {shape}.",
        )


def require_positive(holder: object, *names: str, whose: str = "") -> None:
    """Raise unless each named field of `holder` is None or finite and above 0."""
    for name in names:
        value = getattr(holder, name)
        require(value is None or 0 < value < math.inf, f"{whose}{name} must be positive, got {value}.")


def require_shares(holder: object, *names: str, whose: str = "") -> None:
    """Raise unless each named field of `holder` lies in [0, 1]."""
    for name in names:
        value = getattr(holder, name)
        require(0 <= value <= 1, f"{whose}{name} must lie in [0, 1], got {value}.")


def require_words(holder: object, *, whose: str = "", **words_by_name: Iterable[str]) -> None:
    """Raise, with the nearest word, unless each named field of `holder`, or each word of a list, is a known one."""
    for name, words in words_by_name.items():
        value = getattr(holder, name)
        for word in value if isinstance(value, tuple | list) else (value,):
            require_known(word, words, f"{whose}{name} {word!r} is unknown.")


def require_word_or_none(holder: object, name: str, words: Iterable[str]) -> None:
    """Raise, with the nearest word, unless the field `name` of `holder` is None or a known word."""
    word = getattr(holder, name)
    if word is not None:
        require_known(word, words, f"{name} {word!r} is unknown.")


@contextmanager
def located(where: object) -> Iterator[None]:
    """Put `where` in front of the sentence of every `InvalidInputError` that is raised inside."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from error


def require_kind(name: str, value: object, kind: Any) -> None:
    """Raise unless `holder` is of the annotated `kind`: bool, int, float (finite), str, or a Literal of words."""
    # True is an int in Python; an option that takes a number must not take it.
    number = value if not isinstance(value, bool) and isinstance(value, Real) else None
    if get_origin(kind) is Literal:
        fits, wanted = value in get_args(kind), f"one of {', '.join(get_args(kind))}"
    elif kind is bool:
        fits, wanted = isinstance(value, bool), "true or false"
    elif kind is int:
        fits, wanted = isinstance(number, Integral), "a whole number"
    elif kind is float:
        fits, wanted = number is not None and math.isfinite(number), "a number"
    else:
        fits, wanted = isinstance(value, kind), "a word"
    require(fits, f"{name} must be {wanted}, got {value!r}.")
