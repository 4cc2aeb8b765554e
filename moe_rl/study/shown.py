"""What an option says on the command line, and which values it takes: the entries of options.yaml."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from moe_rl.core.errors import require, require_known
from moe_rl.yaml_files import read_yaml

LARGEST = 2**31 - 1  # A larger count would overflow an int32 far from the option that was mistyped.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An option's entry in options.yaml."""

    name: str
    panel: str
    help: str
    also: str = ""
    """A second name on the command line, short."""
    choices: Sequence[str] = ()
    """Words that it takes; any without."""
    group: str = ""
    """Entry points by which other packages add words."""
    at_least: int | None = None
    repeated: bool = False
    """True: the option may be given several times."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Names on the command line, the long one first."""
        return (f"--{self.name.replace('_', '-')}", *filter(None, [self.also]))

    @property
    def told(self) -> str:
        """The help with the choices in it."""
        return self.help.replace("{choices}", (" or " if len(self.choices) == 2 else ", ").join(self.choices))

    def check(self, value: object) -> None:
        """Raise for a value outside the words or the range of the option; None is always inside."""
        flag = self.flags[0]
        if self.choices and value is not None and str(value) not in self.choices:
            added = [point.name for point in entry_points(group=self.group)] if self.group else []
            require_known(str(value), [*self.choices, *added], f"{flag} {value!r} is unknown.")
        if isinstance(value, int | float):
            is_inside = self.at_least is None or value >= self.at_least
            require(is_inside, f"{flag} must be at least {self.at_least}, got {value}.")
            require(not isinstance(value, int) or value <= LARGEST, f"{flag} must be at most {LARGEST:,}, got {value}.")
            require(math.isfinite(value), f"{flag} must be finite, got {value}.")


def _read_options(path: Path) -> dict[str, Shown]:
    """Return every option of the file by its name."""
    shown = {}
    for panel, options in read_yaml(path).items():
        for name, texts in options.items():
            if isinstance(texts, str):
                shown[name] = Shown(name=name, panel=panel, help=texts)
            else:
                shown[name] = Shown(name=name, panel=panel, **texts)
    return shown


SHOWN = _read_options(Path(__file__).with_name("options.yaml"))
