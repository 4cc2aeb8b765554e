"""What a trap is: a check, and the words around it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.doctor.environment import Environment
from moe_rl.doctor.keys import Reader
from moe_rl.doctor.settings import RunSettings, Setting

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a check looks at."""

    settings: RunSettings
    environment: Environment | None = None
    """None where the machine is not to be looked at, or has no Megatron."""
    attach: bool = False
    """Whether the run is to be balanced by `moe_rl.megatron.attach`."""
    trains_by_rl: bool = False
    """Whether the run's framework trains on what its own rollouts generate."""

    @property
    def replays(self) -> Setting[str] | None:
        """The setting that switches routing replay on."""
        replay = self.settings.replay
        return replay if replay is not None and replay.value != "off" else None

    @property
    def flex_backend(self) -> Setting[str] | None:
        """The setting that names the backend of the flex dispatcher; None with another dispatcher."""
        dispatcher = self.settings.moe_token_dispatcher_type
        flex = dispatcher is not None and dispatcher.value == "flex"
        return self.settings.moe_flex_dispatcher_backend if flex else None

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
    """One way in which a run goes wrong, and how to find it; all but the check is from traps.yaml."""

    check: Check
    name: str
    severity: str
    """The most severe that it can be."""
    title: str
    remedy: str
    source: str
    only: Sequence[str] = ()
    """Readers whose runs alone are checked; those of all frameworks without it."""
    rl_only: bool = False
    """Whether only runs of frameworks that train by RL are checked."""
    of_installation: bool = False
    """Whether it is looked for without a run as well."""

    @property
    def why(self) -> str:
        """What happens and why: the check's docstring."""
        return " ".join((self.check.__doc__ or "").split())

    def concerns(self, reader: Reader | None) -> bool:
        """Return whether it is looked for in runs of that reader, or (None) in an installation without a run."""
        if reader is None or reader.verdict_only:
            return self.of_installation
        return reader.name in self.only if self.only else reader.trains_by_rl or not self.rl_only


def is_on(setting: Setting[bool] | None) -> bool:
    """Return whether a flag is known to be on."""
    return setting is not None and setting.value


def above(setting: Setting[int] | None, bound: int) -> bool:
    """Return whether a number is known to be above `bound`."""
    return setting is not None and setting.value > bound
