"""slime: Megatron's arguments beside slime's and `--sglang-*` ones, in bash arrays.

Keys: THUDM/slime:slime/utils/arguments.py, slime/ray/actor_group.py.
"""

import re

from moe_rl.doctor.keys import Keys, Known, Reader, Rule, has_rank, is_on, named_modules, when
from moe_rl.doctor.settings import Setting, defaults
from moe_rl.doctor.sources import RawRun
from moe_rl.frameworks.megatron import settings as megatron

OWN = re.compile(
    r"sglang_|rollout_|use_rollout_|n_samples_per_prompt$|hf_checkpoint$|actor_num_nodes$|advantage_estimator$"
)
"""Keys that only slime and miles have."""


def _copies(value: object) -> object:
    return when(float(str(value)) > 0, True)


def _named_fp8(value: object) -> object:
    return when("fp8" in str(value).lower(), True)


def option(key: str) -> str | None:
    """Return Megatron's name of a flag; None for those of slime and of the rollout engine."""
    return None if OWN.match(key) else megatron.option(key)


KEYS: Keys = {
    **megatron.KEYS,
    "use_routing_replay": Rule("replay", lambda on: when(is_on(on), "R2")),
    "data_pad_size_multiplier": Rule("pad_multiple"),
    "train_backend": Rule("trainer", lambda name: when(str(name) != "megatron", name)),
    "qkv_format": Rule("packed", lambda layout: layout == "thd"),
    "enable_mtp_training": Rule("mtp_training"),
    "lora_rank": Rule("lora", has_rank),
    "target_modules": Rule("lora_targets", named_modules),
    "hf_checkpoint": Rule("rollout_fp8", _named_fp8, by_part=True),
    "sglang_quantization": Rule("rollout_fp8", _named_fp8),
    "sglang_enable_eplb": Rule("rollout_eplb"),
    "sglang_ep_num_redundant_experts": Rule("rollout_eplb", _copies),
    "use_tis": Rule("rollout_correction"),
    "custom_tis_function_path": Rule("rollout_correction", bool),
    "use_rollout_logprobs": Rule("rollout_correction"),
}
R3 = "use_rollout_routing_replay"


def with_rollout_replay(keys: Keys) -> Keys:
    """Return the keys with R3, which switches R2's flag on as well and is what is replayed."""
    return {**keys, R3: Rule("rollout_returns_routes")}


def complete(known: Known, raw: RawRun, framework: str) -> Known:
    """Return the settings with defaults, and R3 where the rollout engine returns its routes."""
    routes = known.get("rollout_returns_routes")
    if routes is not None and routes.value:
        known["replay"] = Setting(value="R3", written=routes.written, where=routes.where)
    own = defaults(framework, packed=True, pad_multiple=128, fp8_fp32_scales=True, rollout_engine="sglang")
    return megatron.argument_defaults(own | known, raw)


def recognizes(raw: RawRun) -> bool:
    """Return whether the run has arguments that only slime and miles know."""
    return any(OWN.match(entry.key) for entry in raw.entries)


READER = Reader(
    name="slime",
    title="slime",
    recognizes=recognizes,
    keys=with_rollout_replay(KEYS),
    option=option,
    complete=lambda known, raw: complete(known, raw, "slime"),
)
