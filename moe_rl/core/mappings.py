"""Parts of mappings and of objects' fields, by name."""

from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def attributes(holder: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes of that name: `attributes(layout, ["order"])` is `{"order": layout.order}`."""
    return {name: getattr(holder, name) for name in names}


def subset(values: Mapping[K, V], keys: Iterable[K]) -> dict[K, V]:
    """Return the entries of these keys, all of which must be there, in the order of `keys`."""
    return {key: values[key] for key in keys}


def overlap(values: Mapping[K, V], keys: Iterable[K]) -> dict[K, V]:
    """Return the entries of those keys that are there: `overlap({"tp": 2}, ["tp", "cp"])` is `{"tp": 2}`."""
    return {key: values[key] for key in keys if key in values}


def without(values: Mapping[K, V], keys: Container[object]) -> dict[K, V]:
    """Return the entries of all other keys."""
    return {key: value for key, value in values.items() if key not in keys}


def in_words(values: Mapping[str, object], joint: str = " ") -> str:
    """Return the entries as text: `in_words({"top_k": 8, "layers": 2})` is "top_k 8, layers 2"."""
    return ", ".join(f"{key}{joint}{value}" for key, value in values.items())


def in_units(values: Mapping[K, float], size: float) -> dict[K, float]:
    """Return every value over `size`: `in_units({"attention": 3.0, "head": 1.0}, 4.0)` has the shares 0.75 and 0.25."""
    return {key: value / size for key, value in values.items()}


def not_none(values: Mapping[K, V | None]) -> dict[K, V]:
    """Return the entries that have a value."""
    return {key: value for key, value in values.items() if value is not None}
