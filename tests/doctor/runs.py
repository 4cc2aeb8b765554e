"""The good runs of `fixtures/`, and one change at a time to them, in each framework's own words."""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from moe_rl.doctor import Diagnosis, Environment, examine
from moe_rl.launch import interpret, read_run
from moe_rl.launch.readers import READERS

FIXTURES = Path(__file__).parent / "fixtures"
ENGINE = "actor_rollout_ref.actor.megatron."
TRANSFORMER = ENGINE + "override_transformer_config."
REMOVED = object()
"""Stands for a setting that is taken out."""
Change = tuple[str, object]


@dataclass(frozen=True)
class Good:
    """A run that nothing is wrong with."""

    framework: str
    file: str
    prefix: str = ""
    """What stands before Megatron's name of an option."""


GOOD = {
    "megatron": Good("megatron", "megatron/pretrain.yaml", "ARGS."),
    "megatron-log": Good("megatron", "megatron/arguments.log"),
    "verl": Good("verl", "verl/train_moe.sh", TRANSFORMER),
    "verl-yaml": Good("verl", "verl/composed.yaml", TRANSFORMER),
    "slime": Good("slime", "slime/train_fp8.sh", "--"),
    "miles": Good("miles", "miles/train_flash.sh", "--"),
    "nemo_rl": Good("nemo_rl", "nemo_rl/recipes/replay.yaml", "policy.megatron_cfg."),
    "nemo_rl-fp8": Good(
        "nemo_rl",
        "nemo_rl/recipes/fp8.yaml",
        "policy.megatron_cfg.",
    ),
    "skyrl": Good("skyrl", "skyrl/grpo.yaml", "trainer.policy.megatron_config.transformer_config_kwargs."),
    "roll": Good("roll", "roll/rlvr.yaml", "actor_train.strategy_args.strategy_config."),
    "areal": Good("areal", "areal/grpo.yaml", "actor.megatron."),
    "prime_rl": Good("prime_rl", "prime_rl/rl.toml"),
}
CHECKED = [run for run, good in GOOD.items() if not READERS[good.framework].verdict_only]
"""The runs in which traps are looked for."""


def own_key(run: str, option: str) -> str:
    """Return the key under which a run's framework has one of Megatron's options."""
    prefix = GOOD[run].prefix
    return prefix + option.replace("_", "-") if prefix == "--" else prefix + option


def diagnose(
    path: Path | None, *, attach: bool = False, environment: Environment | None = None, framework: str | None = None
) -> Diagnosis:
    """Return what the doctor says of one file."""
    run = interpret(read_run([path]), framework) if path else None
    return examine(run, environment, attach=attach)


def changed(folder: Path, run: str, changes: Iterable[Change]) -> Path:
    """Copy a good run into `folder`, make the changes, and return its file."""
    good = GOOD[run]
    root = folder / good.framework
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(FIXTURES / good.framework, root)
    path = folder / good.file
    for key, value in changes:
        if key.startswith("text:"):
            _replace_text(root, key.removeprefix("text:"), str(value))
        elif path.suffix == ".yaml":
            _change_yaml(path, key, value)
        elif path.suffix == ".log":
            _change_dump(path, key, value)
        elif key.startswith("env:"):
            _change_variable(path, key.removeprefix("env:"), str(value))
        elif good.framework == "verl":
            _change_overrides(path, key, value)
        else:
            _change_flags(path, key, value)
    return path


def _replace_text(root: Path, old: str, new: str) -> None:
    holding = [path for path in root.rglob("*.sh") if old in path.read_text()]
    assert len(holding) == 1, old
    text = holding[0].read_text()
    assert text.count(old) == 1, old
    holding[0].write_text(text.replace(old, new))


def _change_yaml(path: Path, key: str, value: object) -> None:
    content = yaml.safe_load(path.read_text())
    *sections, name = key.removeprefix("env:").split(".") if not key.startswith("env:") else _variables_of(key)
    inside = content
    for section in sections:
        inside = inside.setdefault(section, {})
    if value is REMOVED:
        inside.pop(name)
    else:
        inside[name] = value
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def _variables_of(key: str) -> list[str]:
    return ["policy", "megatron_cfg", "env_vars", key.removeprefix("env:")]


def _change_dump(path: Path, key: str, value: object) -> None:
    line = f"  {key} {'.' * (48 - len(key))} {value}"
    text, count = re.subn(rf"^  {key} \.+ .*$", line, path.read_text(), flags=re.MULTILINE)
    path.write_text(text if count else text.replace("  bf16 ..", f"{line}\n  bf16 ..", 1))


def _change_variable(path: Path, name: str, value: str) -> None:
    text = path.read_text()
    if "env_vars" not in text:
        text = re.sub(rf"^export {name}=.*\n", "", text, flags=re.MULTILINE)
        path.write_text(text.replace("set -eu\n", f"set -eu\nexport {name}={value}\n", 1))
        return
    entry = f'    \\"{name}\\": \\"{value}\\",\n'
    text = re.sub(rf'^    \\"{name}\\".*\n', "", text, flags=re.MULTILINE)
    path.write_text(text.replace('\\"env_vars\\": {\n', '\\"env_vars\\": {\n' + entry, 1))


def _change_overrides(path: Path, key: str, value: object) -> None:
    lines = [line for line in path.read_text().split("\n") if f"{key}=" not in line]
    at = lines.index("TRAINER=(") + 1
    lines[at:at] = [] if value is REMOVED else [f"    +{key}={value}"]
    path.write_text("\n".join(lines))


def _change_flags(path: Path, key: str, value: object) -> None:
    for file in (path, *(path.parent / "models").glob("*.sh")):
        lines = [line for line in file.read_text().split("\n") if line.split()[:1] != [key]]
        if file == path and value is not REMOVED:
            words = key if value is True else f"{key} {value}"
            lines.insert(lines.index("PARALLEL=(") + 1, f"   {words}")
        file.write_text("\n".join(lines))
