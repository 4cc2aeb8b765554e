"""SkyRL: overrides of its configuration in a launch script, or a YAML file.

Keys: NovaSky-AI/SkyRL:skyrl/train/config/config.py (a956457); its Megatron workers build the model by Megatron-Bridge.
"""

from moe_rl.doctor.keys import Keys, Known, Reader, Rule, has_rank, last_entry, named_modules, other_trainer, with_model
from moe_rl.doctor.settings import defaults
from moe_rl.doctor.sources import RawRun
from moe_rl.frameworks.megatron import settings as megatron

POLICY = "trainer.policy."
ENGINE = POLICY + "megatron_config."
TRANSFORMER = ENGINE + "transformer_config_kwargs."
SECTIONS = (TRANSFORMER, ENGINE + "ddp_config.", ENGINE + "optimizer_config_kwargs.", ENGINE)

KEYS: Keys = {
    **megatron.keys_in(*SECTIONS),
    ENGINE + "moe_enable_routing_replay": Rule("replay", lambda on: "R3" if str(on).lower() == "true" else None),
    POLICY + "model.lora.rank": Rule("lora", has_rank),
    POLICY + "model.lora.target_modules": Rule("lora_targets", named_modules),
    "trainer.remove_microbatch_padding": Rule("packed"),
    "trainer.use_sample_packing": Rule("packed"),
    "generator.inference_engine.enable_return_routed_experts": Rule("rollout_returns_routes"),
    "generator.inference_engine.backend": Rule("rollout_engine"),
}


def _complete(known: Known, raw: RawRun) -> Known:
    strategy = last_entry(raw, "trainer.strategy")
    known |= other_trainer(strategy) if strategy is not None else defaults("SkyRL", trainer="FSDP")
    known = megatron.built_by_bridge(defaults("SkyRL", sequence_parallel=True, packed=True) | known)
    return with_model(known, raw, POLICY + "model.path")


READER = Reader(
    name="skyrl",
    title="SkyRL",
    recognizes=lambda raw: any(entry.key.startswith((POLICY, "trainer.placement.")) for entry in raw.entries),
    keys=KEYS,
    option=megatron.option_in(*SECTIONS),
    complete=_complete,
    verdict_only=True,
)
