"""Settings of a parallel layout: their forecast speed and memory, and what an engine and levers add to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_rl.core.mappings import attributes
from moe_rl.core.step_words import Dispatcher, Recompute
from moe_rl.report.units import largest_shares

# Of settings whose forecasts differ by less the simplest comes first. Whether two settings can be told apart is a
# question to the interval of their ratio.
ALIKE = 0.03
SIZES = (
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How the GPUs are shared out."""

    expert_model_parallel_size: int
    tensor_model_parallel_size: int
    context_parallel_size: int
    pipeline_model_parallel_size: int
    num_virtual_stages: int
    dispatcher: Dispatcher
    expert_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dispatcher", Dispatcher(self.dispatcher))  # A file of results has the word.

    @property
    def expert_ranks(self) -> int:
        """Ranks that share one set of experts."""
        return self.expert_model_parallel_size * self.expert_tensor_parallel_size

    @property
    def slices(self) -> int:
        """TP x CP."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def name(self) -> str:
        """The parallel layout in a few letters."""
        return " ".join([f"EP{self.expert_model_parallel_size}", *self._degrees_beside_ep()])

    @property
    def num_kinds(self) -> int:
        """Kinds of parallelism beside EP and data parallelism."""
        return len(self._degrees_beside_ep())

    def _degrees_beside_ep(self) -> list[str]:
        """Return e.g. ["TP2", "CP4"]."""
        sizes = {
            "ETP": self.expert_tensor_parallel_size,
            "TP": self.tensor_model_parallel_size,
            "CP": self.context_parallel_size,
            "PP": self.pipeline_model_parallel_size,
            "VP": self.num_virtual_stages,
        }
        return [f"{letters}{size}" for letters, size in sizes.items() if size > 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSetting(ParallelLayout):
    """One setting of a shape, priced."""

    micro_batch_tokens: int
    """Token budget of a data-parallel rank."""
    num_micro_batches: int
    recompute: Recompute
    tokens_per_s_per_gpu: float
    peak_gib: float
    parts: Mapping[str, float]
    """Shares of the step by part."""
    packing_gain: float = 1.0
    """Step on the framework's layout over the step on the packed one, by lengths."""
    resident_slots: int = 0
    """Copies of experts per rank and layer for which the peak has room; balanced routing gains nothing from them."""
    tokens_per_s_interval: tuple[float, float] | None = None
    """Both ends of the 80 % interval; None far behind the fastest."""
    behind_fastest: tuple[float, float] | None = None
    """The same of this setting's step over the fastest's: where it holds 1, the two are not told apart."""
    peak_interval_gib: tuple[float, float] | None = None
    cp_comm_type: str | None = None
    """How the CP ranks exchange keys and values; None without context parallelism."""

    def __post_init__(self) -> None:
        ParallelLayout.__post_init__(self)
        object.__setattr__(self, "recompute", Recompute(self.recompute))

    @property
    def shape(self) -> ParallelLayout:
        """The layout alone."""
        return ParallelLayout(**attributes(self, ParallelLayout.__slots__))

    @property
    def told_apart(self) -> bool:
        """Whether the fastest setting is called faster than this one."""
        return self.behind_fastest is not None and self.behind_fastest[0] > 1.0

    @property
    def limits(self) -> str:
        """The largest parts of the step."""
        return largest_shares(self.parts)

    def lines(self, framework: str) -> str:
        """Return what a run of this framework sets: `megatron`, `verl`, `slime` or `nemo-rl`."""
        return PASTED[framework](self)


LEVERS = ("static", "engine", "packing", "homes", "resident copies", "moe-rl replicas")
"""In the order in which each is added to those before; the replicas of `moe-rl` take the engine's place."""


def fastest_lever(speeds: Mapping[str, float]) -> str:
    """Return the fastest of speeds by lever; of equal ones the first."""
    return max(speeds, key=lambda lever: speeds[lever])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeLevers:
    """A setting's tokens/s/GPU under the routes of a trace, as an engine and the levers of `moe-rl` are added."""

    setting: TunedSetting
    engine: str | None
    """Value of `domain_balance`; None: the dispatcher has no engine, copies are ours."""
    resident_slots: int
    speeds: Mapping[str, float]
    """By lever, of `LEVERS`; those that the setting does not have are absent."""
    command: str = ""
    """The line that simulates the fastest combination, or of today's setting the fastest of moe_rl; empty: priced on a
    sample of layers alone."""

    @property
    def lever(self) -> str:
        """The last lever of the fastest combination; of equal ones the first."""
        return fastest_lever(self.speeds)

    @property
    def fastest(self) -> float:
        """Tokens/s/GPU of the fastest combination."""
        return self.speeds[self.lever]

    @property
    def name(self) -> str:
        """Layout, dispatcher, engine and levers of the fastest combination."""
        words = [self.setting.name, self.setting.dispatcher]
        for lever in self._added()[1:]:
            if lever == "engine":
                words.append(self.engine or "")
            elif lever == "resident copies":
                words.append(f"{self.resident_slots} resident copies per rank")
            else:
                words.append(lever)
        return ", ".join(words)

    @property
    def gains(self) -> dict[str, float]:
        """What each lever of the fastest combination adds to those before it, as a share."""
        gains, before = dict[str, float](), self.speeds["static"]
        for lever in self._added()[1:]:
            gains[lever] = self.speeds[lever] / before - 1.0
            before = self.speeds[lever]
        return gains

    def as_json(self) -> dict[str, Any]:
        """Return the shape and its speeds as JSON values."""
        document = {
            "name": self.setting.name,
            "dispatcher": self.setting.dispatcher,
            "engine": self.engine or "ours",
            "resident_slots": self.resident_slots,
            "tokens_per_s_per_gpu": dict(self.speeds),
            "best": self.lever,
        }
        if self.command:
            document["command"] = self.command
        return document

    def _added(self) -> list[str]:
        """Return the levers of the fastest combination, static first."""
        if self.lever == "moe-rl replicas":
            return ["static", "moe-rl replicas"]
        names = list(self.speeds)
        return names[: names.index(self.lever) + 1]


RECOMPUTE: dict[Recompute, dict[str, object]] = {
    Recompute.NONE: {},
    Recompute.MOE: {"recompute_granularity": "selective", "recompute_modules": "moe"},
    Recompute.FULL: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _sizes(row: TunedSetting) -> dict[str, object]:
    return attributes(row, SIZES)


def _others(row: TunedSetting) -> dict[str, object]:
    """Return what is not a parallel size, under the names of Megatron's configuration."""
    # p2p is Megatron's default.
    if row.cp_comm_type in (None, "p2p"):
        exchange = {}
    else:
        exchange = {"cp_comm_type": row.cp_comm_type}
    return RECOMPUTE[row.recompute] | row.dispatcher.as_options | exchange


def _megatron(row: TunedSetting) -> str:
    options = _sizes(row) | _others(row)
    if row.num_virtual_stages > 1:
        options["num_virtual_stages_per_pipeline_rank"] = row.num_virtual_stages
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    if row.tensor_model_parallel_size > 1:
        flags.append("--sequence-parallel")
    return " ".join(flags)


def _slime(row: TunedSetting) -> str:
    # slime counts the tokens of a GPU, and CP cuts each sequence over several.
    per_gpu = row.micro_batch_tokens // row.context_parallel_size
    return f"{_megatron(row)} --use-dynamic-batch-size --max-tokens-per-gpu {per_gpu}"


def _verl(row: TunedSetting) -> str:
    sizes, overrides = _sizes(row), _others(row)
    if row.num_virtual_stages > 1:
        sizes["virtual_pipeline_model_parallel_size"] = row.num_virtual_stages
    if "recompute_modules" in overrides:
        overrides["recompute_modules"] = f"[{overrides['recompute_modules']}]"
    batching = {
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": row.micro_batch_tokens // row.context_parallel_size,
    }
    actor = "actor_rollout_ref.actor"
    assignments = [
        *_assignments(f"{actor}.megatron", sizes),
        *_assignments(f"+{actor}.megatron.override_transformer_config", overrides),
        *_assignments(actor, batching),
    ]
    return " ".join(assignments)


def _nemo_rl(row: TunedSetting) -> str:
    options = _sizes(row) | {
        "sequence_parallel": _yaml_bool(row.tensor_model_parallel_size > 1),
        "activation_checkpointing": _yaml_bool(row.recompute.repeats_layer),
        "moe_token_dispatcher_type": row.dispatcher.as_options["moe_token_dispatcher_type"],
    }
    packing = {"enabled": _yaml_bool(True), "train_mb_tokens": row.micro_batch_tokens}
    assignments = _assignments("policy.megatron_cfg", options) + _assignments("policy.sequence_packing", packing)
    return " ".join(assignments)


def _assignments(section: str, values: Mapping[str, object]) -> list[str]:
    """Return "section.name=value" for every value."""
    return [f"{section}.{name}={value}" for name, value in values.items()]


def _yaml_bool(value: bool) -> str:
    return str(value).lower()


PASTED = {"megatron": _megatron, "verl": _verl, "slime": _slime, "nemo-rl": _nemo_rl}
