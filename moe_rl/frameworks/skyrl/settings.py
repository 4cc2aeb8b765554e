"""SkyRL: overrides of its configuration in a launch script, or a YAML file.

Keys: NovaSky-AI/SkyRL:skyrl/train/config/config.py (a956457); its Megatron workers build the model by Megatron-Bridge.
"""

from pathlib import Path

from moe_rl.frameworks.megatron import settings as megatron
from moe_rl.launch.keys import Keys, Known, Reader, last_entry, other_trainer, rules_of, sets_key_under, with_model
from moe_rl.launch.settings import defaults
from moe_rl.launch.sources import RawRun
from moe_rl.yaml_files import read_yaml

POLICY = "trainer.policy."
ENGINE = POLICY + "megatron_config."
TRANSFORMER = ENGINE + "transformer_config_kwargs."
SECTIONS = (TRANSFORMER, ENGINE + "ddp_config.", ENGINE + "optimizer_config_kwargs.", ENGINE)

FACTS = read_yaml(Path(__file__).with_suffix(".yaml"))
KEYS: Keys = {**megatron.keys_in(*SECTIONS), **rules_of(FACTS)}


def _complete(settings: Known, raw: RawRun) -> Known:
    strategy = last_entry(raw, "trainer.strategy")
    settings |= other_trainer(strategy) if strategy is not None else defaults("SkyRL", trainer="FSDP")
    settings = megatron.built_by_bridge(defaults("SkyRL", **FACTS["defaults"]) | settings)
    return with_model(settings, raw, POLICY + "model.path")


READER = Reader(
    name="skyrl",
    title="SkyRL",
    recognizes=lambda raw: sets_key_under(raw, POLICY, "trainer.placement."),
    batch=FACTS["batch"],
    keys=KEYS,
    option=megatron.option_in(*SECTIONS),
    complete=_complete,
    verdict_only=True,
)
