"""slime: Megatron's arguments beside slime's and `--sglang-*` ones, in bash arrays.

Keys: THUDM/slime:slime/utils/arguments.py, slime/ray/actor_group.py.
"""

import re
from pathlib import Path

from moe_rl.frameworks.megatron import settings as megatron
from moe_rl.launch.keys import Keys, Known, Reader, rules_of, with_model
from moe_rl.launch.settings import Setting, defaults
from moe_rl.launch.sources import RawRun
from moe_rl.yaml_files import read_yaml

# Keys that only slime and miles have.
OWN = re.compile(
    r"sglang_|rollout_|use_rollout_|n_samples_per_prompt$|hf_checkpoint$|actor_num_nodes$|advantage_estimator$"
)


def option(key: str) -> str | None:
    """Return Megatron's name of a flag; None for those of slime and of the rollout engine."""
    if OWN.match(key):
        return None
    return megatron.option(key)


FACTS = read_yaml(Path(__file__).with_suffix(".yaml"))
KEYS: Keys = {**megatron.KEYS, **rules_of(FACTS)}


def complete(settings: Known, raw: RawRun, framework: str) -> Known:
    """Return the settings with defaults, and R3 where the rollout engine returns its routes."""
    # One flag of slime's does both: the engine returns routes, and the trainer replays them.
    routes = settings.get("rollout_returns_routes")
    if routes is not None and routes.value:
        settings["replay"] = Setting(value="R3", written=routes.written, where=routes.where)
    settings = with_model(settings, raw, "hf_checkpoint")
    return megatron.argument_defaults(defaults(framework, **FACTS["defaults"]) | settings, raw)


def recognizes(raw: RawRun) -> bool:
    """Return whether the run has arguments that only slime and miles know."""
    return any(OWN.match(entry.key) for entry in raw.entries)


READER = Reader(
    name="slime",
    title="slime",
    recognizes=recognizes,
    batch=FACTS["batch"],
    batch_defaults=FACTS["batch_defaults"],
    keys=KEYS,
    option=option,
    complete=lambda settings, raw: complete(settings, raw, "slime"),
)
