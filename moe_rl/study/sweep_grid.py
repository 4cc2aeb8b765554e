"""The points of a sweep: every combination of the values of some options."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.report.sweep import Value
from moe_rl.study.options import SHOWN, SimulationOptions, TraceOptions
from moe_rl.yaml_files import checked

NOT_SWEPT = frozenset({*TraceOptions.model_fields, "policy", "policy_option", "objective"})
"""How the trace is read, lists, and what decides which figures there are."""


def flags() -> dict[str, str]:
    """Return the options that can be swept, by every name that they go by."""
    known = {}
    for field, info in SimulationOptions.model_fields.items():
        if field not in NOT_SWEPT and not isinstance(info.default, list):
            for name in SHOWN[field].flags:
                known[name.removeprefix("--").replace("-", "_")] = field
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Swept options with their values, in the order given."""

    values: Mapping[str, tuple[Value, ...]]
    options: tuple[SimulationOptions, ...]
    """One per point; the last option varies fastest."""

    @property
    def points(self) -> list[dict[str, Value]]:
        """The swept values of every point."""
        return [{name: getattr(options, name) for name in self.values} for options in self.options]


def parse_grid(given: Sequence[str], base: SimulationOptions) -> Grid:
    """Return the grid that `name=value,value` entries span over `base`; "none" stands for an option not given."""
    axes: list[tuple[str, list[Value]]] = []
    for entry in given:
        name, equals, rest = entry.partition("=")
        require(bool(equals and rest.strip()), f"--sweep {entry!r} must read name=value,value.")
        texts = [text.strip() for text in rest.split(",") if text.strip()]
        axes.append((name, [None if text == "none" else text for text in texts]))
    return span_grid(axes, base)


def span_grid(axes: Iterable[tuple[str, Sequence[Value]]], base: SimulationOptions) -> Grid:
    """Return every combination of the values of options over `base`; every value is checked as the option is."""
    known, values_of = flags(), dict[str, Sequence[Value]]()
    for name, values in axes:
        field = known.get(name.strip().removeprefix("--").replace("-", "_"))
        if field is None:
            raise InvalidInputError(f"--sweep {name!r} is not an option to sweep.{nearest_name(name, known)}")
        require(field not in values_of, f"--sweep names {field} twice.")
        require(
            isinstance(values, list | tuple | range) and len(values) > 0,
            f"--sweep of {field} needs a list of values, got {values!r}.",
        )
        values_of[field] = values
    require(len(values_of) > 0, "--sweep names no option, e.g. --sweep expert_model_parallel_size=8,16.")
    # Only what was said: a default that follows from another option must follow from the point's.
    said = base.model_dump(exclude_unset=True)
    options = [
        checked(said | dict(zip(values_of, combination, strict=True)), SimulationOptions)
        for combination in itertools.product(*values_of.values())
    ]
    values_seen = {name: tuple(dict.fromkeys(getattr(one, name) for one in options)) for name in values_of}
    for name, values in values_of.items():
        require(len(values_seen[name]) == len(values), f"--sweep gives a value of {name} twice.")
    return Grid(values=values_seen, options=tuple(options))
