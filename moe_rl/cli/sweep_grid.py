"""The points of `moe-rl sweep`: every combination of the values given with `--sweep`."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_rl.cli.options import Shown, StudyOptions, TraceOptions
from moe_rl.config import checked
from moe_rl.core.errors import InvalidInputError, nearest_name, require

Value = int | float | str | bool | None

NOT_SWEPT = frozenset({*TraceOptions.model_fields, "policy", "policy_option", "objective"})
"""How the trace is read, lists, and what decides which figures there are."""


def flags() -> dict[str, str]:
    """Return the options that can be swept, by every name that `--sweep` takes for them."""
    known = {}
    for field, info in StudyOptions.model_fields.items():
        if field not in NOT_SWEPT and not isinstance(info.default, list):
            shown = next(item for item in info.metadata if isinstance(item, Shown))
            for name in (field, *shown.names):
                known[name.removeprefix("--").replace("-", "_")] = field
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Swept options with their values, in the order given."""

    values: Mapping[str, tuple[Value, ...]]
    options: tuple[StudyOptions, ...]
    """One per point; the last option varies fastest."""

    @property
    def points(self) -> list[dict[str, Value]]:
        """The swept values of every point."""
        return [{name: getattr(options, name) for name in self.values} for options in self.options]


def parse_grid(given: Sequence[str], base: StudyOptions) -> Grid:
    """Return the grid that `name=value,value` entries span over `base`; every value is checked as the option is.

    "none" stands for an option that is not given.
    """
    require(len(given) > 0, "--sweep names no option, e.g. --sweep expert_model_parallel_size=8,16.")
    known, texts = flags(), {}
    for entry in given:
        name, equals, rest = entry.partition("=")
        field = known.get(name.strip().removeprefix("--").replace("-", "_"))
        require(bool(equals and rest.strip()), f"--sweep {entry!r} must read name=value,value.")
        if field is None:
            raise InvalidInputError(f"--sweep {name!r} is no option to sweep.{nearest_name(name, known)}")
        require(field not in texts, f"--sweep names {field} twice.")
        texts[field] = [text.strip() for text in rest.split(",") if text.strip()]
    # Only what was said: a default that follows from another option must follow from the point's.
    said = base.model_dump(exclude_unset=True)
    options = [
        _point(said | dict(zip(texts, combination, strict=True))) for combination in itertools.product(*texts.values())
    ]
    values = {name: tuple(dict.fromkeys(getattr(one, name) for one in options)) for name in texts}
    for name, texts_of_name in texts.items():
        require(len(values[name]) == len(texts_of_name), f"--sweep gives a value of {name} twice.")
    return Grid(values=values, options=tuple(options))


def _point(content: Mapping[str, object]) -> StudyOptions:
    return checked({name: None if value == "none" else value for name, value in content.items()}, StudyOptions)
