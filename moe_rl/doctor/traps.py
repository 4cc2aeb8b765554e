"""What a trap is: a check, and the words around it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moe_rl.doctor.environment import Environment
from moe_rl.launch.keys import Reader
from moe_rl.launch.settings import RunSettings, Setting

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a check looks at."""

    settings: RunSettings
    environment: Environment | None = None
    """None if the machine should not be checked, or has no Megatron."""
    attach: bool = False
    """Whether the run is to be balanced by `moe_rl.megatron.attach`."""
    trains_by_rl: bool = False
    """Whether the run's framework trains on what its own rollouts generate."""

    @property
    def replays(self) -> Setting[str] | None:
        """The setting that switches routing replay on."""
        replay = self.settings.replay
        if not (replay and replay.value != "off"):
            return None
        return replay

    @property
    def learns(self) -> bool:
        """Whether the run trains on routes of a rollout."""
        return self.trains_by_rl or self.replays is not None

    @property
    def flex_backend(self) -> Setting[str] | None:
        """The setting that names the backend of the flex dispatcher; None with another dispatcher."""
        dispatcher = self.settings.moe_token_dispatcher_type
        if not (dispatcher and dispatcher.value == "flex"):
            return None
        return self.settings.moe_flex_dispatcher_backend

    @property
    def router_recompute(self) -> Setting[str] | None:
        """The setting that makes routers run again in the backward pass."""
        recompute, modules = self.settings.recompute_granularity, self.settings.recompute_modules
        covers = recompute and (recompute.value == "full" or (modules and "moe" in modules.value))
        return recompute if covers else None

    @property
    def is_moe(self) -> bool:
        """Whether the run says that its model has experts."""
        sizes = self.settings.num_moe_experts, self.settings.expert_model_parallel_size
        return any(above(size, 1) for size in sizes) or self.replays is not None


class Found:
    """One occurrence of a trap: a sentence with {} for every setting, or text of the user's, that it is about.

    Give `severity` and `remedy` only if they differ from the trap's own.
    """

    def __init__(self, sentence: str, *about: object, severity: str | None = None, remedy: str | None = None) -> None:
        # The user's own text may hold braces: it is inserted, never formatted.
        self.sentence = sentence.format(*about)
        self.settings = [item for item in about if isinstance(item, Setting)]
        self.severity, self.remedy = severity, remedy


Check = Callable[[Case], Iterable[Found]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """One way in which a run goes wrong, and how to find it; everything except the check comes from traps.yaml."""

    check: Check
    name: str
    severity: str
    """The highest severity that it can have."""
    title: str
    remedy: str
    source: str
    only: Sequence[str] = ()
    """If set, only runs recognized by these readers are checked; otherwise runs of all frameworks."""
    rl_only: bool = False
    """Whether only runs of frameworks that train by RL are checked."""
    of_installation: bool = False
    """Whether the trap is also checked without a run."""

    @property
    def why(self) -> str:
        """What happens and why: the check's docstring."""
        return " ".join((self.check.__doc__ or "").split())

    def concerns(self, reader: Reader | None) -> bool:
        """Return whether the trap is checked in runs of that reader or, if None, in an installation without a run."""
        if reader is None:
            return self.of_installation
        if reader.verdict_only:  # few keys of these runs are read: check only the traps that name them
            return self.of_installation or reader.name in self.only
        return reader.name in self.only if self.only else reader.trains_by_rl or not self.rl_only


# GPUs of a node if no file says how many: HGX H100, H200, B200, and the EP groups that DeepEP calls "intranode".
USUAL_GPUS_PER_NODE = 8


def spans_nodes(case: Case) -> bool:
    """Return whether the ranks of an EP group are known not to fit into one node."""
    ranks, node = case.settings.ranks_of_ep_group, case.settings.gpus_per_node
    return ranks is not None and ranks > (node.value if node and above(node, 0) else USUAL_GPUS_PER_NODE)


def above(setting: Setting[int] | Setting[float] | None, bound: int) -> bool:
    """Return whether a number is known to be above `bound`."""
    return setting is not None and setting.value > bound
