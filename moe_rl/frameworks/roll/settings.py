"""ROLL: a YAML file with a section per worker, of which the one that trains the policy counts.

Keys: alibaba/ROLL:roll/configs and examples (8eb27cc); `strategy_config` goes to mcore_adapter's TransformerConfig.
"""

import re
from dataclasses import replace
from pathlib import Path

from moe_rl.frameworks.megatron import settings as megatron
from moe_rl.launch.keys import Keys, Known, Reader, last_entry, other_trainer, rules_of, with_model
from moe_rl.launch.sources import RawRun
from moe_rl.yaml_files import read_yaml

# Names of the worker that trains the policy, by pipeline.
WORKERS = ("actor_train", "sft_train", "student", "student_train")
STRATEGY, CONFIG, MODEL = "strategy_args.strategy_name", "strategy_args.strategy_config.", "model_args."

FACTS = read_yaml(Path(__file__).with_suffix(".yaml"))
KEYS: Keys = {**megatron.keys_in(CONFIG), **rules_of(FACTS)}


def _worker(raw: RawRun) -> str:
    """Return which worker trains; empty where none of them has a strategy."""
    return next((worker for worker in WORKERS if last_entry(raw, f"{worker}.{STRATEGY}") is not None), "")


def _of_worker(raw: RawRun) -> RawRun:
    """Return the run with the section of the worker that trains dropped from its keys."""
    prefix = _worker(raw) + "."
    return replace(raw, entries=[replace(entry, key=entry.key.removeprefix(prefix)) for entry in raw.entries])


def _trainer_gpus(raw: RawRun) -> int | None:
    """Return the devices of the worker that trains: of `list(range(0, 16))`, which ROLL evaluates, or of a list."""
    mapping = last_entry(raw, "device_mapping")
    if mapping is None or mapping.missing:
        return None
    if isinstance(mapping.value, list):
        return len(mapping.value)
    span = re.fullmatch(r"list\(range\((?:(\d+), *)?(\d+)\)\)", str(mapping.value).strip())
    return None if span is None else int(span[2]) - int(span[1] or 0)


def _complete(settings: Known, raw: RawRun) -> Known:
    settings = with_model(settings | other_trainer(last_entry(raw, STRATEGY)), raw, "pretrain")
    return with_model(settings, raw, MODEL + "model_name_or_path")


READER = Reader(
    name="roll",
    title="ROLL",
    recognizes=lambda raw: bool(_worker(raw)),
    batch=FACTS["batch"],
    keys=KEYS,
    option=megatron.option_in(CONFIG, CONFIG + "additional_configs."),
    complete=_complete,
    verdict_only=True,
    trainer_gpus=_trainer_gpus,
    prepare=_of_worker,
)
