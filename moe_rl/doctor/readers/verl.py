"""verl with its Megatron engine: Hydra overrides in a launch script, or a YAML file.

Keys: verl-project/verl:verl/trainer/config (engine/megatron.yaml, rollout/rollout.yaml, algorithm/).
"""

from moe_rl.doctor.readers import megatron
from moe_rl.doctor.readers.keys import (
    Keys,
    Known,
    Reader,
    Rule,
    add_model,
    is_on,
    last_value,
    when,
)
from moe_rl.doctor.settings import default
from moe_rl.doctor.sources import RawRun

ACTOR = "actor_rollout_ref.actor."
ENGINE = ACTOR + "megatron."
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
    ENGINE + "override_ddp_config.overlap_param_gather": Rule("overlap_param_gather"),
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
    "moe_rl.policy": Rule("balancing_policy"),
}


def _complete(known: Known, raw: RawRun) -> Known:
    known = {
        "sequence_parallel": default(True, "verl"),
        "packed": default(True, "verl"),
        "rollout_log_probs": default(False, "verl"),
        "rollout_returns_routes": default(False, "verl"),
    } | known
    add_model(known, raw, "actor_rollout_ref.model.path")
    return known


def _recognizes(raw: RawRun) -> bool:
    return any(entry.key.startswith("actor_rollout_ref.") for entry in raw.entries) or any(
        word.startswith("verl.trainer") for word in raw.words
    )


def _remarks(raw: RawRun) -> tuple[str, ...]:
    strategy = last_value(raw, ACTOR + "strategy")
    if strategy in (None, "megatron"):
        return ()
    return (f"the actor trains with {strategy}: traps of Megatron's engine do not concern it.",)


READER = Reader(name="verl", title="verl", recognizes=_recognizes, keys=KEYS, complete=_complete, remarks=_remarks)
