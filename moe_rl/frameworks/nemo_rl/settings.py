"""NeMo-RL with Megatron policy workers: YAML, and overrides in a launch script.

Keys: NVIDIA-NeMo/RL:examples/configs/grpo_math_1B.yaml, docs/guides/router-replay.md.
"""

from pathlib import PurePath

from moe_rl.doctor import keys
from moe_rl.doctor.keys import Keys, Known, Reader, Rule, is_on, named_modules, when
from moe_rl.doctor.settings import defaults, said_by
from moe_rl.doctor.sources import RawRun
from moe_rl.frameworks.megatron import settings as megatron

POLICY = "policy.megatron_cfg."
GENERATION = "policy.generation."
FP8 = ("fp8", "fp8_recipe")
FP8_SWITCH = POLICY + "fp8_cfg.enabled"
MEGATRON_SWITCH = POLICY + "enabled"

KEYS: Keys = {
    **megatron.keys_in(POLICY),
    POLICY + "fp8_cfg.fp8": Rule("fp8"),
    POLICY + "fp8_cfg.fp8_recipe": Rule("fp8_recipe"),
    POLICY + "activation_checkpointing": Rule("recompute_granularity", lambda on: when(is_on(on), "full")),
    POLICY + "freeze_moe_router": Rule("freeze_moe_router"),
    POLICY + "distributed_data_parallel_config.overlap_param_gather": Rule("overlap_param_gather"),
    POLICY + "distributed_data_parallel_config.use_custom_fsdp": Rule("use_megatron_fsdp"),
    POLICY + "optimizer.optimizer_cpu_offload": Rule("optimizer_cpu_offload"),
    POLICY + "distributed_data_parallel_config.use_megatron_fsdp": Rule("use_megatron_fsdp"),
    "policy.router_replay.enabled": Rule("replay", lambda on: "R3" if is_on(on) else "off"),
    "policy.sequence_packing.enabled": Rule("packed"),
    GENERATION + "backend": Rule("rollout_engine"),
    GENERATION + "vllm_cfg.precision": Rule("rollout_fp8", lambda name: "fp8" in str(name).lower()),
    GENERATION + "vllm_cfg.pow2_weight_scaling_factors": Rule("rollout_fp32_scales", lambda on: not is_on(on)),
    GENERATION + "vllm_kwargs.enable_eplb": Rule("rollout_eplb"),
    GENERATION + "vllm_kwargs.enable_return_routed_experts": Rule("rollout_returns_routes"),
    "loss_fn.use_importance_sampling_correction": Rule("rollout_correction"),
    POLICY + "peft.enabled": Rule("lora"),
    POLICY + "peft.target_modules": Rule("lora_targets", named_modules),
    "moe_rl.policy": Rule("balancing_policy"),
}


BASES = ("grpo_math_1B", "dpo", "sft", "rm", "distillation_math", "grpo_math_1B_megatron", "distillation_math_megatron")
"""NeMo-RL's own configurations that recipes start from."""
SET_BY_BASES = {
    "freeze_moe_router": True,
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.0,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "grad_reduce_in_fp32": False,
    "use_precision_aware_optimizer": True,
}
"""What all of them set and a check looks at (grpo_math_1B.yaml at 00294d9)."""


def _complete(known: Known, raw: RawRun) -> Known:
    switch = keys.last_entry(raw, MEGATRON_SWITCH)
    if switch is not None and not switch.missing and not is_on(switch.value):
        return {"trainer": said_by(switch, "DTensor")}
    if starts_from_base(raw):
        if switch is None and not any("megatron" in name for name in raw.absent):
            return defaults("NeMo-RL", trainer="DTensor")
        known = defaults("NeMo-RL", **SET_BY_BASES) | known
    known = megatron.built_by_bridge(known)
    if _switched_off(raw, FP8_SWITCH):
        known = {name: setting for name, setting in known.items() if name not in FP8}
    if known.get("rollout_fp8") is not None and known["rollout_fp8"].value:
        known = defaults("NeMo-RL", rollout_fp32_scales=True) | known
    left_out = keys.variable(raw, "NRL_ROUTER_REPLAY_EXCLUDE_MTP", lambda text: not is_on(text))
    if left_out is not None:
        known["replay_covers_mtp"] = left_out
    return keys.with_model(known, raw, "policy.model_name")


def knows(name: str) -> bool:
    """Return whether a file is one of NeMo-RL's own base configurations."""
    return PurePath(name).stem in BASES


def starts_from_base(raw: RawRun) -> bool:
    """Return whether all that is not there are NeMo-RL's own base configurations."""
    return bool(raw.absent) and all(knows(name) for name in raw.absent)


def _switched_off(raw: RawRun, key: str) -> bool:
    value = keys.last_value(raw, key)
    return value is not None and not is_on(value)


def _remarks(raw: RawRun) -> tuple[str, ...]:
    off = _switched_off(raw, MEGATRON_SWITCH)
    return ("policy.megatron_cfg is off: the policy trains without Megatron, and nothing was checked.",) * off


def _recognizes(raw: RawRun) -> bool:
    keys = {entry.key for entry in raw.entries}
    return any(key.startswith((POLICY, "policy.generation.", "policy.dtensor_cfg.")) for key in keys) or (
        "policy.model_name" in keys and any(key.startswith("grpo.") for key in keys)
    )


READER = Reader(
    name="nemo_rl",
    title="NeMo-RL",
    recognizes=_recognizes,
    keys=KEYS,
    option=megatron.option_in(POLICY, POLICY + "distributed_data_parallel_config.", POLICY + "optimizer."),
    knows=knows,
    complete=_complete,
    remarks=_remarks,
)
