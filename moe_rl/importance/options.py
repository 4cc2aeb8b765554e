"""Options that check themselves: the bounds stand beside the default, the allowed words in the annotation."""

import functools
from dataclasses import field, fields
from typing import Any, Literal, get_args, get_origin

import torch

from moe_rl.core.errors import InvalidInputError, nearest_name, require


def option(default: Any, *, at_least: float | None = None, above: float | None = None) -> Any:
    """Declare a dataclass field with a default and a bound on its value; None, where it is allowed, has no bound."""
    return field(default=default, metadata={"at_least": at_least, "above": above})


def require_word(name: str, value: object, words: Any) -> None:
    """Raise with the nearest word unless `value` is one of the words of a `Literal`."""
    allowed_words = words.__args__  # a graph can be traced through it, but not through get_args
    if value not in allowed_words:
        raise InvalidInputError(f"unknown {name} {value!r}.{nearest_name(str(value), allowed_words)}")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it no type
def _checks(options: type) -> tuple[tuple[str, tuple[str, ...], float | None, float | None], ...]:
    """Name, allowed words, least value and open lower bound of every field; a constant where a graph is traced."""
    return _declared(options)


@functools.cache
def _declared(options: type) -> tuple[tuple[str, tuple[str, ...], float | None, float | None], ...]:
    specs = []
    for declared in fields(options):
        words = [kind for kind in (declared.type, *get_args(declared.type)) if get_origin(kind) is Literal]
        bounds = declared.metadata
        specs.append((declared.name, get_args(words[0]) if words else (), bounds.get("at_least"), bounds.get("above")))
    return tuple(specs)


class Options:
    """Base of the option dataclasses: checks every field on construction."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, words, at_least, above in _checks(type(self)):
            value = getattr(self, name)
            if value is None:
                continue
            if words and value not in words:
                raise InvalidInputError(f"unknown {name} {value!r}.{nearest_name(str(value), words)}")
            require(at_least is None or value >= at_least, f"{name} must be >= {at_least}, got {value}.")
            require(above is None or value > above, f"{name} must be > {above}, got {value}.")
