"""verl with its Megatron engine: Hydra overrides in a launch script, or a YAML file.

Keys: verl-project/verl:verl/trainer/config (engine/megatron.yaml, rollout/rollout.yaml, algorithm/).
"""

from moe_rl.doctor.keys import (
    Keys,
    Known,
    Reader,
    Rule,
    add_model,
    has_rank,
    is_on,
    last_entry,
    last_value,
    named_modules,
    when,
)
from moe_rl.doctor.settings import Setting, default
from moe_rl.doctor.sources import RawRun
from moe_rl.frameworks.megatron import settings as megatron

ACTOR = "actor_rollout_ref.actor."
ENGINE = ACTOR + "megatron."
OPTIMIZER = ACTOR + "optim.override_optimizer_config."
TRANSFORMER = ENGINE + "override_transformer_config."
ROLLOUT = "actor_rollout_ref.rollout."
CORRECTION = "algorithm.rollout_correction."


def _mode(value: object) -> object:
    mode = str(value)
    return mode if mode in ("R2", "R3") else "off"


KEYS: Keys = {
    **{ENGINE + name: rule for name, rule in megatron.KEYS.items()},
    **{TRANSFORMER + name: rule for name, rule in megatron.KEYS.items()},
    ACTOR + "router_replay.mode": Rule("replay", _mode),
    ENGINE + "router_replay.mode": Rule("replay", _mode),
    ENGINE + "optimizer_offload": Rule("optimizer_cpu_offload"),
    ENGINE + "offload.optimizer.target": Rule("optimizer_cpu_offload", lambda target: target == "cpu"),
    OPTIMIZER + "optimizer_cpu_offload": Rule("optimizer_cpu_offload"),
    ENGINE + "override_ddp_config.overlap_param_gather": Rule("overlap_param_gather"),
    ENGINE + "override_ddp_config.use_megatron_fsdp": Rule("use_megatron_fsdp"),
    ENGINE + "use_remove_padding": Rule("packed"),
    "actor_rollout_ref.model.use_remove_padding": Rule("packed"),
    "actor_rollout_ref.model.mtp.enable": Rule("mtp_num_layers", lambda on: when(is_on(on), 1)),
    "actor_rollout_ref.model.mtp.enable_train": Rule("mtp_training"),
    ROLLOUT + "enable_rollout_routing_replay": Rule("rollout_returns_routes"),
    ROLLOUT + "name": Rule("rollout_engine"),
    ROLLOUT + "quantization": Rule("rollout_fp8", lambda name: "fp8" in str(name).lower()),
    ROLLOUT + "calculate_log_probs": Rule("rollout_log_probs"),
    ROLLOUT + "engine_kwargs.sglang.enable_eplb": Rule("rollout_eplb"),
    ROLLOUT + "engine_kwargs.vllm.enable_eplb": Rule("rollout_eplb"),
    CORRECTION + "rollout_is": Rule("rollout_correction", lambda level: bool(level)),
    CORRECTION + "rollout_rs": Rule("rollout_correction", lambda level: bool(level)),
    ACTOR + "tis_imp_ratio_cap": Rule("rollout_correction", lambda cap: when(float(str(cap)) > 0, True)),
    "actor_rollout_ref.model.lora_rank": Rule("lora", has_rank),
    "actor_rollout_ref.model.lora.rank": Rule("lora", has_rank),
    "actor_rollout_ref.model.lora.target_modules": Rule("lora_targets", named_modules),
    "moe_rl.policy": Rule("balancing_policy"),
}


def _trainer(raw: RawRun) -> Setting[str] | None:
    """Return what trains the actor where that is not Megatron: by `actor.strategy`, `model_engine`, or the default."""
    strategy = last_entry(raw, ACTOR + "strategy")
    if strategy is not None and not strategy.missing:
        named: Setting[str] | None = Setting(value=str(strategy.value), written=strategy.shown(), where=strategy.where)
    else:
        said = [word.partition("=")[2] for word in raw.words if word.startswith("model_engine=")]
        named = Setting(value=said[-1], written=f"model_engine={said[-1]}") if said else None
    if named is not None:
        return None if named.value == "megatron" else named
    configured = str(last_value(raw, "config_name"))
    is_megatron = "megatron" in configured or any(entry.key.startswith(ENGINE) for entry in raw.entries)
    return None if is_megatron else default("FSDP", "verl")


def _complete(known: Known, raw: RawRun) -> Known:
    if (trainer := _trainer(raw)) is not None:
        known = {**known, "trainer": trainer}
    known = megatron.built_by_bridge(known)
    defaults: Known = {
        "sequence_parallel": default(True, "verl"),
        "moe_router_load_balancing_type": default("none", "verl"),
        "packed": default(True, "verl"),
        "rollout_log_probs": default(False, "verl"),
        "rollout_returns_routes": default(False, "verl"),
    }
    known = defaults | known
    add_model(known, raw, "actor_rollout_ref.model.path")
    return known


def _recognizes(raw: RawRun) -> bool:
    return any(entry.key.startswith("actor_rollout_ref.") for entry in raw.entries) or any(
        word.startswith("verl.trainer") for word in raw.words
    )


def _remarks(raw: RawRun) -> tuple[str, ...]:
    trainer = _trainer(raw)
    return (f"the actor trains with {trainer.value}: traps of Megatron's engine do not concern it.",) if trainer else ()


def option(key: str) -> str | None:
    """Return Megatron's name of a key of the model, its DDP or its optimizer."""
    for section in (TRANSFORMER, ENGINE + "override_ddp_config.", ENGINE + "override_mcore_model_config.", OPTIMIZER):
        if key.startswith(section):
            return key.removeprefix(section)
    name = key.removeprefix(ENGINE)
    return name if name != key and "." not in name else None


READER = Reader(
    name="verl",
    title="verl",
    recognizes=_recognizes,
    keys=KEYS,
    option=option,
    complete=_complete,
    remarks=_remarks,
)
