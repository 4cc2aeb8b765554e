"""What a trap is: a check, and the words around it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moe_rl.doctor.environment import Environment
from moe_rl.doctor.settings import RunSettings, Setting

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
ALL = ("megatron", "verl", "slime", "miles", "nemo_rl")
RL = ("verl", "slime", "miles", "nemo_rl")
ENVIRONMENT = ("environment",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a check looks at."""

    settings: RunSettings
    environment: Environment | None = None
    """None where the machine is not to be looked at, or has no Megatron."""
    attach: bool = False
    """Whether the run is to be balanced by `moe_rl.megatron.attach`."""

    @property
    def replays(self) -> Setting[str] | None:
        """The setting that switches routing replay on."""
        replay = self.settings.replay
        return replay if replay is not None and replay.value != "off" else None

    @property
    def is_moe(self) -> bool:
        """Whether the run says that its model has experts."""
        experts, ranks = self.settings.num_moe_experts, self.settings.expert_model_parallel_size
        return bool((experts and experts.value > 1) or (ranks and ranks.value > 1) or self.replays)


@dataclass(frozen=True, slots=True)
class Found:
    """One occurrence of a trap."""

    sentence: str
    """Says what the user's values are, with their places."""
    settings: tuple[Setting[Any], ...] = ()
    severity: str | None = None
    """Where it differs from the trap's own."""
    remedy: str | None = None
    """Where it differs from the trap's own."""


Check = Callable[[Case], Iterable[Found]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """One way in which a run goes wrong, and how to find it."""

    name: str
    severity: str
    """The most severe that it can be."""
    title: str
    why: str
    remedy: str
    source: str
    frameworks: tuple[str, ...]
    """Readers whose runs are checked."""
    check: Check


def trap(
    *,
    name: str,
    severity: str,
    title: str,
    remedy: str,
    source: str,
    frameworks: tuple[str, ...] = ALL,
) -> Callable[[Check], Trap]:
    """Make a trap of the check that follows; the check's docstring says why."""

    def made(check: Check) -> Trap:
        return Trap(
            name=name,
            severity=severity,
            title=title,
            why=" ".join((check.__doc__ or "").split()),
            remedy=remedy,
            source=source,
            frameworks=frameworks,
            check=check,
        )

    return made


def is_on(setting: Setting[bool] | None) -> bool:
    """Return whether a flag is known to be on."""
    return setting is not None and setting.value


def above(setting: Setting[int] | None, bound: int) -> bool:
    """Return whether a number is known to be above `bound`."""
    return setting is not None and setting.value > bound
