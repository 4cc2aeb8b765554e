"""verl with its Megatron engine: Hydra overrides in a launch script, or a YAML file.

Keys: verl-project/verl:verl/trainer/config (engine/megatron.yaml, rollout/rollout.yaml, algorithm/).
"""

from pathlib import Path

from moe_rl.frameworks.megatron import settings as megatron
from moe_rl.frameworks.verl.micro_batch_losses import BY_LONGEST, why_micro_batches_matter
from moe_rl.launch import keys
from moe_rl.launch.keys import Keys, Known, Reader, rules_of, sets_key_under
from moe_rl.launch.settings import Setting, defaults, said_by
from moe_rl.launch.sources import RawRun
from moe_rl.yaml_files import read_yaml

ACTOR = "actor_rollout_ref.actor."
ENGINE = ACTOR + "megatron."
OPTIMIZER = ACTOR + "optim.override_optimizer_config."
TRANSFORMER = ENGINE + "override_transformer_config."


FACTS = read_yaml(Path(__file__).with_suffix(".yaml"))
KEYS: Keys = {**megatron.keys_in(ENGINE, TRANSFORMER), **rules_of(FACTS)}
DEFAULTS = defaults("verl", **FACTS["defaults"])


def _words(raw: RawRun) -> list[str]:
    """Return the command's words that are no settings; words behind `-m` are read as its values, so they are added."""
    behind_m = keys.last_value(raw, "m")
    return [*raw.words, *(behind_m if isinstance(behind_m, tuple) else ())]


def _program(raw: RawRun) -> str:
    """Return the module of verl's that the command runs, e.g. `verl.trainer.main_ppo`; empty if none is named."""
    return next((word for word in _words(raw) if word.startswith("verl.trainer")), "")


def _trainer(raw: RawRun) -> Known:
    """Return what trains the actor where that is not Megatron: by `actor.strategy`, `model_engine`, or the default."""
    if _program(raw).endswith("sft_trainer"):
        return {"trainer": Setting(value="sft", written=_program(raw))}
    strategy = keys.last_entry(raw, ACTOR + "strategy")
    if strategy is not None and not strategy.missing:
        return keys.other_trainer(strategy)
    engines = [word.partition("=")[2] for word in _words(raw) if word.startswith("model_engine=")]
    if engines:
        trainer = Setting(value=engines[-1], written=f"model_engine={engines[-1]}")
        if trainer.value == "megatron":
            return {}
        return {"trainer": trainer}
    configured = str(keys.last_value(raw, "config_name"))
    is_megatron = "megatron" in configured or sets_key_under(raw, ENGINE)
    if is_megatron:
        return {}
    return defaults("verl", trainer="FSDP")


def _micro_batch_loss(raw: RawRun) -> Known:
    """Return what makes the loss depend on its micro-batches; nothing where a setting that decides it is not known."""
    names = ("policy_loss.loss_mode", "loss_agg_mode", "loss_scale_factor")
    mode, aggregation, _ = entries = [keys.last_entry(raw, ACTOR + name) for name in names]
    if any(entry is not None and entry.missing for entry in entries):
        return {}
    reason = why_micro_batches_matter(*(None if entry is None else entry.value for entry in entries))
    decisive = aggregation if reason == BY_LONGEST else mode
    if reason is None or decisive is None:
        return {}
    return {"micro_batch_loss": said_by(decisive, reason)}


def _complete(settings: Known, raw: RawRun) -> Known:
    settings = DEFAULTS | megatron.built_by_bridge(settings | _trainer(raw) | _micro_batch_loss(raw))
    return keys.with_model(settings, raw, "actor_rollout_ref.model.path")


def _recognizes(raw: RawRun) -> bool:
    return sets_key_under(raw, "actor_rollout_ref.") or bool(_program(raw))


def _remarks(raw: RawRun) -> tuple[str, ...]:
    trainers = [trainer.value for trainer in _trainer(raw).values()]
    return tuple(f"the actor trains with {name}, so traps of Megatron's engine were not checked." for name in trainers)


READER = Reader(
    name="verl",
    title="verl",
    recognizes=_recognizes,
    batch=FACTS["batch"],
    batch_defaults=FACTS["batch_defaults"],
    keys=KEYS,
    option=megatron.option_in(
        TRANSFORMER, ENGINE + "override_ddp_config.", ENGINE + "override_mcore_model_config.", OPTIMIZER, ENGINE
    ),
    complete=_complete,
    remarks=_remarks,
)
