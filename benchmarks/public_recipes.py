"""Public MoE recipes as `public_recipes.yaml` has them: in the shape of their framework, and told by the doctor.

What a recipe sets stands once, in Megatron's words; a framework's shape is one function here.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_rl.doctor import examine
from moe_rl.doctor.verdict import AttachVerdict, refusals_of
from moe_rl.launch import interpret, read_run

FILE = Path(__file__).with_suffix(".yaml")
SECTIONS = ("sizes", "config", "ddp", "optimizer")
Section = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One public script or configuration."""

    name: str
    framework: str
    model: Section
    """What the model itself brings."""
    source: str
    """`owner/repository:path@commit`."""
    written: Mapping[str, Section]
    """By section, what the recipe sets."""
    effective: Mapping[str, Section]
    """By section, what Megatron gets, the framework's own values included."""

    def __str__(self) -> str:
        """Return the test's id."""
        return self.name.replace(" ", "-")


def _recipe(entry: Mapping[str, Any], frameworks: Mapping[str, Mapping[str, Any]]) -> Recipe:
    written = {section: entry.get(section, {}) for section in SECTIONS}
    own = frameworks[entry["framework"]]
    beside = own.get("beside_full_recompute", {}) if written["config"].get("recompute_granularity") == "full" else {}
    own = {**own, "config": {**own["config"], **beside}}
    effective = {section: {**own.get(section, {}), **written[section]} for section in SECTIONS}
    return Recipe(
        name=entry["name"],
        framework=entry["framework"],
        model=entry.get("model", {}),
        source=entry["source"],
        written=written,
        effective=effective,
    )


def recipes() -> list[Recipe]:
    """Return all recipes of the file, in its order."""
    content = yaml.safe_load(FILE.read_text())
    return [_recipe(entry, content["frameworks"]) for entry in content["recipes"]]


FLAGS = {"num_moe_experts": "num_experts", "fp8": "fp8_format"}
"""Where an option of Megatron's has another name as a flag."""


def as_flags(recipe: Recipe) -> str:
    """Return a script with arrays of flags, as slime's users write it."""
    arrays = []
    for section, options in recipe.written.items():
        flags = [line for name, value in options.items() if (line := _flag(name, value))]
        arrays.append(f"{section.upper()}=(\n" + "".join(f"   {line}\n" for line in flags) + ")\n")
    expanded = " ".join(f"${{{section.upper()}[@]}}" for section in recipe.written)
    return "#!/bin/bash\n" + "\n".join(arrays) + f"\npython3 train.py --rollout-batch-size 32 {expanded}\n"


def _flag(name: str, value: Any) -> str:
    flag = "--" + FLAGS.get(name, name).replace("_", "-")
    if isinstance(value, bool):
        return flag if value else ""
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


ENGINE = "actor_rollout_ref.actor.megatron."
OVERRIDES = {
    "sizes": ENGINE,
    "config": f"+{ENGINE}override_transformer_config.",
    "ddp": f"+{ENGINE}override_ddp_config.",
    "optimizer": "+actor_rollout_ref.actor.optim.override_optimizer_config.",
}


def as_overrides(recipe: Recipe) -> str:
    """Return a script with Hydra overrides whose sizes can be set from outside, as verl's users write it."""
    lines, defaults = [], []
    for section, options in recipe.written.items():
        for name, value in options.items():
            shown = value
            if section == "sizes":
                defaults.append(f"{name}=${{{name.upper()}:-{value}}}\n")
                shown = f"${{{name}}}"
            lines.append(f"    {OVERRIDES[section]}{name}={shown}\n")
    return (
        "#!/usr/bin/env bash\nset -xeuo pipefail\n"
        + "".join(defaults)
        + "ACTOR=(\n"
        + "".join(lines)
        + ')\npython3 -m verl.trainer.main_ppo model_engine=megatron "${ACTOR[@]}" "$@"\n'
    )


def as_yaml(recipe: Recipe) -> str:
    """Return a configuration that starts from NeMo-RL's, which is not beside it."""
    config = dict(recipe.written["config"])
    megatron: dict[str, Any] = {"enabled": True, **recipe.written["sizes"]}
    eight_bit = {name: config.pop(name) for name in ("fp8", "fp8_recipe") if name in config}
    if "recompute_granularity" in config:
        megatron["activation_checkpointing"] = True
    if config.get("recompute_granularity") == "full":
        del config["recompute_granularity"]
    if eight_bit:
        megatron["fp8_cfg"] = {"enabled": True, **eight_bit}
    megatron |= config
    for section, name in (("ddp", "distributed_data_parallel_config"), ("optimizer", "optimizer")):
        if recipe.written[section]:
            megatron[name] = dict(recipe.written[section])
    content = {"defaults": "../../grpo_math_1B.yaml", "policy": {"megatron_cfg": megatron}}
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text


SHAPES: Mapping[str, tuple[str, Callable[[Recipe], str]]] = {
    "slime": (".sh", as_flags),
    "verl": (".sh", as_overrides),
    "nemo_rl": (".yaml", as_yaml),
}
"""Of every framework, how its files end and how a recipe is written."""


def diagnosed(recipe: Recipe) -> tuple[Any, AttachVerdict]:
    """Return the settings that the doctor reads in the recipe, and its verdict."""
    suffix, shape = SHAPES[recipe.framework]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"recipe{suffix}"
        path.write_text(shape(recipe))
        run = interpret(read_run([path]))
        verdict = examine(run, None, attach=True).verdict
    if run.settings.framework != recipe.framework or verdict is None:
        raise ValueError(f"{recipe.name} was read as a run of {run.settings.framework}.")
    return run.settings, verdict


def table() -> str:
    """Return one row of Markdown per recipe: where it stands, and what the doctor says of it."""
    lines = ["", "| recipe | script at commit | verdict |", "|---|---|---|"]
    for recipe in recipes():
        place, _, commit = recipe.source.partition("@")
        settings, verdict = diagnosed(recipe)
        refused = ", ".join(f"`{option}`" for option, _ in refusals_of(settings))
        said = f"{verdict.word}: {refused}" if refused else verdict.word
        lines.append(f"| {recipe.name} | {place} at `{commit}` | {said} |")
    return "".join(f"{line}\n" for line in (*lines, ""))
