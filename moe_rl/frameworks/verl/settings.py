"""verl with its Megatron engine: Hydra overrides in a launch script, or a YAML file.

Keys: verl-project/verl:verl/trainer/config (engine/megatron.yaml, rollout/rollout.yaml, algorithm/).
"""

from moe_rl.doctor import keys
from moe_rl.doctor.keys import Keys, Known, Reader, Rule, has_rank, is_on, named_modules, when
from moe_rl.doctor.settings import Setting, defaults
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
    **megatron.keys_in(ENGINE, TRANSFORMER),
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


def _trainer(raw: RawRun) -> Known:
    """Return what trains the actor where that is not Megatron: by `actor.strategy`, `model_engine`, or the default."""
    strategy = keys.last_entry(raw, ACTOR + "strategy")
    if strategy is not None and not strategy.missing:
        return keys.other_trainer(strategy)
    engines = [word.partition("=")[2] for word in raw.words if word.startswith("model_engine=")]
    if engines:
        trainer = Setting(value=engines[-1], written=f"model_engine={engines[-1]}")
        return {} if trainer.value == "megatron" else {"trainer": trainer}
    configured = str(keys.last_value(raw, "config_name"))
    is_megatron = "megatron" in configured or any(entry.key.startswith(ENGINE) for entry in raw.entries)
    return {} if is_megatron else defaults("verl", trainer="FSDP")


DEFAULTS = defaults(
    "verl",
    sequence_parallel=True,
    moe_router_load_balancing_type="none",
    packed=True,
    rollout_log_probs=False,
    rollout_returns_routes=False,
)


def _complete(known: Known, raw: RawRun) -> Known:
    known = DEFAULTS | megatron.built_by_bridge(known | _trainer(raw))
    return keys.with_model(known, raw, "actor_rollout_ref.model.path")


def _recognizes(raw: RawRun) -> bool:
    return any(entry.key.startswith("actor_rollout_ref.") for entry in raw.entries) or any(
        word.startswith("verl.trainer") for word in raw.words
    )


def _remarks(raw: RawRun) -> tuple[str, ...]:
    trainers = [trainer.value for trainer in _trainer(raw).values()]
    return tuple(f"the actor trains with {name}: traps of Megatron's engine do not concern it." for name in trainers)


READER = Reader(
    name="verl",
    title="verl",
    recognizes=_recognizes,
    keys=KEYS,
    option=megatron.option_in(
        TRANSFORMER, ENGINE + "override_ddp_config.", ENGINE + "override_mcore_model_config.", OPTIMIZER, ENGINE
    ),
    complete=_complete,
    remarks=_remarks,
)
