"""Megatron-LM: arguments in a script, its argument dump, or YAML (`--yaml-cfg`, `examples/moe_recipes`).

What stands on it and keeps its words is read here too: Megatron-Bridge (`model.x=...` of a command, `cfg.model.x = ...`
of a recipe) and ms-swift's `megatron sft` and `megatron rlhf`.

Keys: NVIDIA/Megatron-LM:megatron/training/arguments.py and megatron/core/transformer/transformer_config.py;
NVIDIA-NeMo/Megatron-Bridge 0.3.1 training/config.py; modelscope/ms-swift 4.6.0 arguments/megatron_args.py.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from moe_rl.launch.keys import Keys, Known, Reader, Rule, rules_of
from moe_rl.launch.settings import defaults
from moe_rl.launch.sources import Entry, RawRun
from moe_rl.yaml_files import read_yaml

FACTS = read_yaml(Path(__file__).with_suffix(".yaml"))
KEYS: Keys = {**{name: Rule(name) for name in FACTS["as they are"]}, **rules_of(FACTS)}

RECOGNIZED_BY = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "num_layers",
    "moe_router_topk",
}


BRIDGE_SECTIONS = ("model", "ddp", "optimizer")


def flat(raw: RawRun) -> RawRun:
    """Return the run with Megatron's sections dropped: `ARGS.num_layers` and `model.num_layers` are `num_layers`."""
    return replace(raw, entries=[_without_section(entry) for entry in raw.entries])


def _without_section(entry: Entry) -> Entry:
    section, _, name = entry.key.rpartition(".")
    # ARGS and MODEL_ARGS of Megatron's YAML recipes; other sections have keys of their own.
    if entry.key in KEYS or (section and not section.isupper() and section not in BRIDGE_SECTIONS):
        return entry
    return replace(entry, key=name.replace("-", "_").lstrip("_"))


def is_bridge(raw: RawRun) -> bool:
    """Return whether settings of the model stand in a section, as Megatron-Bridge has them."""
    return any(entry.written.lstrip("+~").startswith("model.") for entry in raw.entries)


def keys_in(*sections: str) -> Keys:
    """Return Megatron's keys as they stand in the sections of a framework's file (`actor.megatron.`)."""
    return {section + name: rule for section in sections for name, rule in KEYS.items()}


def option_in(*sections: str) -> Callable[[str], str | None]:
    """Return what gives Megatron's name of a key that stands right inside one of the sections, and None for others."""

    def option(key: str) -> str | None:
        for section in sections:
            name = key.removeprefix(section)
            if key.startswith(section) and "." not in name:
                return name
        return None

    return option


# Of files without sections.
option = option_in("")


def built_by_bridge(settings: Known) -> Known:
    """Return the settings with those that Megatron-Bridge makes."""
    return defaults("Megatron-Bridge", **FACTS["bridge"]) | settings


def argument_defaults(settings: Known, raw: RawRun) -> Known:
    """Return the settings with what Megatron's argument parser takes where a flag is not given.

    Nothing is assumed where the command stands elsewhere, or a file is not there, that may give the flag.
    """
    if raw.partial or raw.absent:
        return settings
    return defaults("Megatron's arguments", **FACTS["arguments"]) | settings


def _complete(settings: Known, raw: RawRun) -> Known:
    if is_bridge(raw):
        return defaults("Megatron-Bridge's recipes", **FACTS["bridge_recipes"]) | built_by_bridge(settings)
    if any(first == "megatron" and second in FACTS["swift_commands"] for first, second in pairwise(raw.words)):
        settings = defaults("ms-swift", **FACTS["swift"]) | settings
    return argument_defaults(settings, raw)


def _remarks(raw: RawRun) -> tuple[str, ...]:
    recipe = "this run starts from a Megatron-Bridge recipe. Settings that only the recipe makes were not checked."
    return (recipe,) * is_bridge(raw)


def _recognizes(raw: RawRun) -> bool:
    return bool(RECOGNIZED_BY & {entry.key for entry in flat(raw).entries})


READER = Reader(
    name="megatron",
    title="Megatron-LM",
    recognizes=_recognizes,
    batch=FACTS["batch"],
    keys=KEYS,
    option=option,
    complete=_complete,
    prepare=flat,
    remarks=_remarks,
    trains_by_rl=False,
)
