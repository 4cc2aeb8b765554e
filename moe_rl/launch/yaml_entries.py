"""YAML files as settings with their lines, and the interpolations of OmegaConf in them."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.launch.sources import Entry, RawRun, Where, read_text

INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
# Files that `defaults:` may lead through.
MAX_DEFAULTS = 20


def entries_of_yaml(path: Path, text: str) -> list[Entry]:
    """Return the leaves of a YAML (or JSON) file, dotted, in the file's order."""
    try:
        # The nodes, not the values: only nodes say on which line they stand.
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise InvalidInputError(f"{path} must contain a mapping of keys to values.")
        return list(_leaves(loader, root, "", str(path)))
    except yaml.YAMLError as error:
        raise InvalidInputError(f"{path} is not a YAML file: {' '.join(str(error).split())}.") from error
    except RecursionError:
        raise InvalidInputError(f"{path} contains a mapping that contains itself.") from None


def _leaves(loader: yaml.SafeLoader, node: yaml.Node, prefix: str, path: str) -> Iterator[Entry]:
    if isinstance(node, yaml.MappingNode) and node.value:
        # `<<: *base` becomes the keys of `base`.
        loader.flatten_mapping(node)
        for key, value in node.value:
            name = str(key.value)
            yield from _leaves(loader, value, f"{prefix}.{name}" if prefix else name, path)
        return
    where = Where(path=path, line=node.start_mark.line + 1)
    yield Entry(key=prefix, value=_constructed(loader, node, where), written=prefix, where=where)


def _constructed(loader: yaml.SafeLoader, node: yaml.Node, where: Where) -> object:
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, LookupError, AttributeError):  # what PyYAML's constructors let through
        raise InvalidInputError(f"{where}: {node.value!r} is not a valid value of the YAML type {node.tag}.") from None


def value_of_word(text: str) -> object:
    """Return what a word says in YAML (`[a, b]`, `3`), or the word where it says nothing."""
    try:
        value: object = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):
        return text
    return value


def read_yaml_file(path: Path, text: str, run: RawRun, depth: int = 0) -> None:
    """Add a file's entries after those of the files that its `defaults:` names; one that is not there is noted."""
    require(depth < MAX_DEFAULTS, f"{path}: the files listed in `defaults` refer to each other in a circle.")
    run.files.append(str(path))
    entries = entries_of_yaml(path, text)
    named = [entry.value for entry in entries if entry.key == "defaults"]
    if named and isinstance(named[0], list) and any(isinstance(item, dict) for item in named[0]):
        run.notes.append(
            f"{path} is composed from several files by Hydra. Give the composed configuration (Hydra writes it to "
            ".hydra/config.yaml), or the launch script."
        )
    # A file overrides those that it names, wherever in it `defaults` stands.
    for name in _file_names(named[0] if named else None):
        file_name = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
        target = Path(os.path.normpath(path.parent / file_name))
        if target.is_file():
            read_yaml_file(target, read_text(target), run, depth + 1)
        else:
            run.absent[name] = (
                f"{path} extends {name}, which does not exist, so values that are set only there are not known."
            )
    run.entries.extend(entry for entry in entries if entry.key != "defaults")


def _file_names(defaults: object) -> list[str]:
    """Return the files of a `defaults:` value: a path (NeMo-RL), or the plain names of Hydra's list."""
    if isinstance(defaults, list):
        listed = defaults
    else:
        listed = [defaults]
    return [item for item in listed if isinstance(item, str) and item != "_self_"]


def interpolated(entries: list[Entry]) -> list[Entry]:
    """Return the entries with `${other.key}` replaced; what cannot be resolved is named in `missing`."""
    entry_by_key = {entry.key: entry for entry in entries}
    return [_resolved(entry, entry_by_key, depth=0) for entry in entries]


def _resolved(entry: Entry, entry_by_key: Mapping[str, Entry], depth: int) -> Entry:
    if not isinstance(entry.value, str) or "${" not in entry.value:
        return entry
    interpolation = INTERPOLATION.fullmatch(entry.value)
    # `${a}` alone keeps the type of `a`; inside a longer text it becomes text.
    if interpolation:
        value = _target(interpolation.group(1), entry_by_key, depth)
        if value is None:
            return replace(entry, value=None, missing=(entry.value,))
        return replace(entry, value=value[0], missing=())
    text, missing = entry.value, entry.missing
    for match in INTERPOLATION.finditer(entry.value):
        value = _target(match.group(1), entry_by_key, depth)
        if value is None:
            missing += (match.group(),)
        else:
            text = text.replace(match.group(), str(value[0]))
    if not missing and "${" in text:
        missing = (text,)
    return replace(entry, value=text, missing=missing)


def _target(expression: str, entry_by_key: Mapping[str, Entry], depth: int) -> tuple[object] | None:
    """Return the value that an interpolation stands for, in a tuple; None where it is not known."""
    # A key that stands for itself in a circle is not known, as one that is not there.
    if depth > 10:
        return None
    resolver, _, argument = expression.partition(":")
    # `oc.env` without a default is the machine's to say; with one, a clean machine has it unset.
    if resolver in ("oc.env", "oc.select") and "," in argument:
        key, default = (piece.strip() for piece in argument.split(",", 1))
        if resolver == "oc.select":
            target = _target(key, entry_by_key, depth + 1)
        else:
            target = None
        return target or (value_of_word(default),)
    if resolver == "oc.select":
        key = argument.strip()
    else:
        key = expression.strip()
    if key not in entry_by_key:
        return None
    resolved = _resolved(entry_by_key[key], entry_by_key, depth + 1)
    if resolved.missing:
        return None
    return (resolved.value,)
