"""Options that check themselves: the bounds stand beside the default, the allowed words in the annotation."""

from dataclasses import field, fields
from typing import Any, Literal, get_args, get_origin

from moe_rl.core.errors import InvalidInputError, nearest_name, require


def option(default: Any, *, at_least: float | None = None, above: float | None = None) -> Any:
    """Declare a dataclass field with a default and a bound on its value; None, where it is allowed, has no bound."""
    return field(default=default, metadata={"at_least": at_least, "above": above})


def require_word(name: str, value: object, words: Any) -> None:
    """Raise with the nearest word unless `value` is one of the words of a `Literal`."""
    known = get_args(words)
    if value not in known:
        raise InvalidInputError(f"unknown {name} {value!r}.{nearest_name(str(value), known)}")


class Options:
    """Base of the option dataclasses: checks every field on construction."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for declared in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            name, value = declared.name, getattr(self, declared.name)
            words = [kind for kind in (declared.type, *get_args(declared.type)) if get_origin(kind) is Literal]
            if value is None:
                continue
            if words:
                require_word(name, value, words[0])
            at_least, above = declared.metadata.get("at_least"), declared.metadata.get("above")
            require(at_least is None or value >= at_least, f"{name} must be >= {at_least}, got {value}.")
            require(above is None or value > above, f"{name} must be > {above}, got {value}.")
