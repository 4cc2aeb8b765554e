"""One configuration in every framework: keywords, a YAML block `moe_rl:`, or `MOE_RL_*` variables.

MOE_RL=moe-rl                   the policy; this switches moe_rl on
MOE_RL=observe                  policy moe-rl, planned beside the run and not carried out: metrics moe_rl/would_be_*
MOE_RL=static                   nothing is planned or attached to layers: the metric moe_rl/imbalance alone
MOE_RL_UNTIL=40                 switch off after 40 updates, or by MOE_RL_UNTIL=/shared/off once that file is there
MOE_RL_REPLICA_SLOTS=2          any field of `BalancerConfig`, in capitals
MOE_RL_CONFIG=run.yaml          a file with a block `moe_rl:`, which the variables above go before
MOE_RL_RECORD=traces/run1       also record the routing of every training pass
MOE_RL_PLANS=/shared/plans      read the plans that a driver wrote there (slime)
MOE_RL_CHECK=1                  compare replayed routes with the routers' own choice, on a sample: metrics r3/*
MOE_RL_TELEMETRY=1              metrics of the experts' loads: moe_rl/expert_*, moe_rl/dead_experts, ...
MOE_RL_PROMETHEUS=9400          also serve all metrics to Prometheus, at this port plus the rank on its host
MOE_RL_ROUTER_SHIFT=0.8         weigh tokens by the router shift, this being its floor; alone it balances nothing
MOE_RL_STRICT=1                 stop where the run cannot be balanced, instead of going on without

A name or a value that is wrong raises `InvalidInputError` when the settings are read, not at the first step.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

import yaml

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import require_usable_policy
from moe_rl.config import load_cluster
from moe_rl.core.errors import InvalidInputError, located, nearest_name, require, require_kind
from moe_rl.core.mappings import attributes, without
from moe_rl.option_groups import words_of
from moe_rl.planner.others.static import StaticPlanner
from moe_rl.yaml_files import read_yaml

SWITCH = "MOE_RL"
PREFIX = "MOE_RL_"
# In place of a policy's name in `MOE_RL`.
OBSERVE = "observe"
# Variables, or beginnings of them, that other parts of moe_rl read.
ELSEWHERE = ("MOE_RL_NATIVE", "MOE_RL_ROUTES", "MOE_RL_REQUIRE_NATIVE", "MOE_RL_TEST_", "MOE_RL_BENCH_")


def switches_on(line: str) -> bool:
    """Return whether a line that a user writes sets `MOE_RL` to `observe`, in a shell or in JSON."""
    return f"{SWITCH}={OBSERVE}" in line or f'{SWITCH}\\": \\"{OBSERVE}' in line


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """When a run that is balanced switches that off, between two updates: one of the two."""

    updates: int | None = None
    """After so many updates."""
    file: Path | None = None
    """Once this file is there on the host of rank 0."""

    @classmethod
    def of(cls, value: int | str) -> "Until":
        """Return what a setting says: a number of updates, or a path.

        >>> Until.of(40).updates
        40
        """
        if isinstance(value, int) and not isinstance(value, bool):
            require(value >= 0, f"the setting `until` must be a number of updates (at least 0) or a file, got {value}.")
            return cls(updates=value)
        if not isinstance(value, str) or not value:
            raise InvalidInputError(f"the setting `until` must be a number of updates or a file, got {value!r}.")
        return cls(file=Path(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run inside a framework was told."""

    balancer: BalancerConfig
    record: Path | None = None
    """Folder for the routing of every training pass."""
    plans: Path | None = None
    """Folder with the plans of a driver."""
    check: bool = False
    """Compare replayed routes with the routers' own choice."""
    telemetry: bool = False
    """Report how the load is spread over experts."""
    prometheus: int = 0
    """Port of this node's first rank; 0: metrics go to the framework's logger alone."""
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Fields of `balancer` that somebody set; of the others the run chooses nodes, slots and reorders by itself."""
    strict: bool = False
    """Raise where the run cannot be balanced; else it goes on without, after one warning."""
    router_shift: float = 0.0
    """Floor of the router-shift weight gamma; 0: the loss has none."""
    balances: bool = True
    """False where the router shift is all that was asked for."""
    until: Until | None = None
    """When balancing is switched off; None: never."""

    @property
    def measures_alone(self) -> bool:
        """Whether the run only reports its imbalance: `static` is a policy of simulations, and plans nothing here."""
        return self.balances and self.balancer.policy == StaticPlanner.name

    def in_common(self) -> dict[str, Any]:
        """Return what, beside `balancer`, all ranks must have in common: paths and ports may be those of a host."""
        facts: dict[str, Any] = {"the names of settings": sorted(self.given)}
        facts |= attributes(self, ("strict", "check", "telemetry", "router_shift"))
        facts["whether routes are recorded"] = self.record is not None
        facts["whether a driver plans"] = self.plans is not None
        facts["until"] = None if self.until is None else (self.until.updates, self.until.file is not None)
        return facts


FLAGS = ("strict", "check", "telemetry")
RUN_FIELDS: dict[str, type] = dict.fromkeys(FLAGS, bool)
RUN_FIELDS |= {"record": str, "plans": str, "prometheus": int, "router_shift": float}
UNTIL = "until"  # a number or a path


def balancer_config(values: Mapping[str, Any]) -> BalancerConfig:
    """Return the configuration that `values` give; raise for a name, a kind, a policy or a cluster that is wrong."""
    words = words_of(BalancerConfig)
    for name, value in values.items():
        if name not in words:
            raise InvalidInputError(f"moe_rl has no setting {name!r}.{nearest_name(name, words)}")
        kind = words[name].field.annotation
        if get_origin(kind) is None:
            require_kind(name, value, kind)
        elif get_origin(kind) is Mapping:
            require(isinstance(value, Mapping), f"{name} must be a mapping from names to values, got {value!r}.")
    config = BalancerConfig(**values)
    require_usable_policy(config)
    load_cluster(config.pricing.cluster)
    return config


def settings_from_mapping(block: Mapping[str, Any]) -> Settings:
    """Return the settings of a block `moe_rl:`: fields of `BalancerConfig`, and `RUN_FIELDS`."""
    run_fields = {name: block[name] for name in RUN_FIELDS if block.get(name) is not None}
    until = block.get(UNTIL)
    for name, value in run_fields.items():
        require_kind(name, value, RUN_FIELDS[name])
    floor = run_fields.get("router_shift", 0.0)
    require(
        0.0 <= floor < 1.0,
        f"router_shift, the lower bound on the router-shift ratio gamma, must be 0 (off) or between 0 and 1 "
        f"(exclusive), got {floor}.",
    )
    run: dict[str, Any] = {
        name: Path(value) if isinstance(value, str) else value for name, value in run_fields.items() if value != ""
    }
    return Settings(
        balancer=balancer_config(without(block, (*RUN_FIELDS, UNTIL))),
        given=frozenset(block),
        until=None if until is None else Until.of(until),
        **run,
    )


def settings_from_environment(environment: Mapping[str, str] | None = None) -> Settings | None:
    """Return the settings of `MOE_RL` and `MOE_RL_*`; None without MOE_RL, MOE_RL_CONFIG and MOE_RL_ROUTER_SHIFT.

    Values are read as YAML: 2 is a number, true a truth value, {theta: 0.1} a mapping.
    """
    variables_of_process = os.environ if environment is None else environment
    config = variables_of_process.get(f"{PREFIX}CONFIG")
    if not (variables_of_process.get(SWITCH) or config or variables_of_process.get(f"{PREFIX}ROUTER_SHIFT")):
        return None
    block = _block_of_file(Path(config)) if config else {}
    names = {*words_of(BalancerConfig), *RUN_FIELDS, UNTIL}
    for variable, text in variables(variables_of_process).items():
        name = variable.removeprefix(PREFIX).lower()
        if variable == SWITCH or name == "config":
            continue
        # A name with a typing error would run with the default for days: it stops the start.
        if name not in names:
            nearest = nearest_name(variable, [PREFIX + name.upper() for name in names])
            raise InvalidInputError(f"moe_rl does not know the environment variable {variable}.{nearest}")
        with located(variable):
            # YAML reads 1 as a number, and in a shell it means yes.
            block[name] = _flag(text) if name in FLAGS else _value(text)
    if variables_of_process.get(SWITCH):
        require(
            "policy" not in block or variables_of_process.get(f"{PREFIX}POLICY") is None,
            "MOE_RL and MOE_RL_POLICY both choose the policy: set only one of them.",
        )
        if variables_of_process[SWITCH] == OBSERVE:
            block["observe"] = True
        else:
            block["policy"] = variables_of_process[SWITCH]
    return replace(settings_from_mapping(block), balances=bool(variables_of_process.get(SWITCH) or config))


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what of the environment `settings_from_environment` reads: what a driver must hand on to its workers."""
    variables_of_process = os.environ if environment is None else environment
    return {
        name: text
        for name, text in variables_of_process.items()
        if name == SWITCH or (name.startswith(PREFIX) and not name.startswith(ELSEWHERE))
    }


def _block_of_file(path: Path) -> dict[str, Any]:
    with located("MOE_RL_CONFIG"):
        block = read_yaml(path).get("moe_rl")
        require(isinstance(block, dict), f"{path} has no section `moe_rl:`.")
    return dict(block)  # type: ignore[arg-type]


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidInputError(f"{text!r} is not valid YAML: {error}.") from error


def _flag(text: str) -> bool:
    require(text in ("0", "1", "true", "false"), f"must be 0 or 1, got {text!r}.")
    return text in ("1", "true")
