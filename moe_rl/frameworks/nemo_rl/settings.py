"""NeMo-RL with Megatron policy workers: YAML, and overrides in a launch script.

Keys: NVIDIA-NeMo/RL:examples/configs/grpo_math_1B.yaml, docs/guides/router-replay.md.
"""

from pathlib import Path, PurePath

from moe_rl.core.mappings import without
from moe_rl.frameworks.megatron import settings as megatron
from moe_rl.launch import keys
from moe_rl.launch.batch import read_batch
from moe_rl.launch.keys import Keys, Known, Reader, is_on, last_entry, rules_of, sets_key_under
from moe_rl.launch.settings import defaults, said_by
from moe_rl.launch.sources import RawRun
from moe_rl.yaml_files import read_yaml

POLICY = "policy.megatron_cfg."
FP8 = ("fp8", "fp8_recipe")
FP8_SWITCH = POLICY + "fp8_cfg.enabled"
MEGATRON_SWITCH = POLICY + "enabled"
COLOCATED = "policy.generation.colocated.enabled"
GENERATION_NODES = "policy.generation.colocated.resources.num_nodes"

FACTS = read_yaml(Path(__file__).with_suffix(".yaml"))
KEYS: Keys = {**megatron.keys_in(POLICY), **rules_of(FACTS)}


def _complete(settings: Known, raw: RawRun) -> Known:
    switch = keys.last_entry(raw, MEGATRON_SWITCH)
    if switch is not None and not switch.missing and not is_on(switch.value):
        return {"trainer": said_by(switch, "DTensor")}
    if starts_from_base(raw):
        if switch is None and not any("megatron" in name for name in raw.absent):
            return defaults("NeMo-RL", trainer="DTensor")
        settings = defaults("NeMo-RL", **FACTS["set_by_bases"]) | settings
    settings = defaults("NeMo-RL", **FACTS["defaults"]) | megatron.built_by_bridge(settings)
    # NeMo-RL's base configuration names an FP8 format and recipe that `fp8_cfg.enabled` alone switches on.
    if _switched_off(raw, FP8_SWITCH):
        settings = without(settings, FP8)
    if settings.get("rollout_fp8") is not None and settings["rollout_fp8"].value:
        settings = defaults("NeMo-RL", rollout_fp32_scales=True) | settings
    left_out = keys.variable(raw, "NRL_ROUTER_REPLAY_EXCLUDE_MTP", lambda text: not is_on(text))
    if left_out is not None:
        settings["replay_covers_mtp"] = left_out
    return keys.with_model(settings, raw, "policy.model_name")


def knows(name: str) -> bool:
    """Return whether a file is one of NeMo-RL's own base configurations."""
    return PurePath(name).stem in FACTS["bases"]


def starts_from_base(raw: RawRun) -> bool:
    """Return whether all that is not there are NeMo-RL's own base configurations."""
    return bool(raw.absent) and all(map(knows, raw.absent))


def _switched_off(raw: RawRun, key: str) -> bool:
    value = keys.last_value(raw, key)
    return value is not None and not is_on(value)


def _trainer_gpus(raw: RawRun) -> int | None:
    """Return the GPUs of the cluster that no rollout engine has to itself; None where the files do not say.

    Example: of 4 nodes of 8 with `colocated.enabled` false and `resources.num_nodes` 1 the trainer has 24.
    """
    facts = read_batch(raw, FACTS["batch"], FACTS["batch_defaults"])
    if facts.gpus is None or facts.shares_gpus != 0:
        return None
    return facts.gpus - (facts.separate_rollout_gpus or 0)


def _knows_trainer_gpus(raw: RawRun) -> bool:
    """Return whether no teacher, reward model or service takes nodes, and rollout engines only a known number."""
    colocated = last_entry(raw, COLOCATED)
    if colocated is not None and colocated.missing:
        return False
    counted = ("cluster.num_nodes", GENERATION_NODES)
    return not any(
        entry.key.endswith(("num_nodes", "num_gpu_nodes")) and entry.key not in counted and entry.value
        for entry in raw.entries
    )


def _remarks(raw: RawRun) -> tuple[str, ...]:
    off = _switched_off(raw, MEGATRON_SWITCH)
    return ("policy.megatron_cfg is off, so the policy trains without Megatron, and no setting was checked.",) * off


def _recognizes(raw: RawRun) -> bool:
    names_model = last_entry(raw, "policy.model_name") is not None
    trains = sets_key_under(raw, POLICY, "policy.generation.", "policy.dtensor_cfg.")
    return trains or (names_model and sets_key_under(raw, "grpo."))


READER = Reader(
    name="nemo_rl",
    title="NeMo-RL",
    recognizes=_recognizes,
    batch=FACTS["batch"],
    batch_defaults=FACTS["batch_defaults"],
    trainer_gpus=_trainer_gpus,
    knows_trainer_gpus=_knows_trainer_gpus,
    keys=KEYS,
    option=megatron.option_in(POLICY, POLICY + "distributed_data_parallel_config.", POLICY + "optimizer."),
    knows=knows,
    complete=_complete,
    remarks=_remarks,
)
