"""YAML files as checked values; loads no numpy, so that the help of a command starts at once."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.option_groups import OptionGroup

Schema = TypeVar("Schema", bound=BaseModel)

FROM_TRACE = "from-trace"  # The model of a trace, as `--model` names it.
# libyaml's where PyYAML has it: h100.yaml takes 0.8 ms instead of 7.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; raise a sentence where the file is missing or is not a mapping."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)
    except FileNotFoundError:
        raise InvalidInputError(f"there is no file {path}.") from None
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is not a YAML file: {' '.join(str(error).split())}.") from error
    require(isinstance(content, dict), f"{path} must contain a mapping of keys to values.")
    return dict(content)


def checked_yaml(path: Path, schema: type[Schema]) -> Schema:
    """Return the file's content as `schema`; raise one sentence that names the file, the key and the nearest key."""
    return checked(read_yaml(path), schema, where=str(path))


def checked(
    content: Mapping[str, Any],
    schema: type[Schema],
    *,
    where: str = "",
    spelled: Callable[[str], str] = "key {!r}".format,
) -> Schema:
    """Return `content` as `schema`, or raise one sentence about its first wrong key, `spelled` so, or value."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        sentence = sentence_of(error, schema, spelled)
        raise InvalidInputError(f"{where}: {sentence}" if where else sentence) from error


# Stands in a text of a YAML file for the names that a registry has, or a table: {module:name}.
NAMES = re.compile(r"\{([\w.]+:[\w.]+)\}")


def with_names(text: str) -> str:
    """Return a text with the names for which each {module:name} in it stands."""
    return NAMES.sub(lambda match: ", ".join(resolve_name(match[1])), text)


def sentence_of(error: ValidationError, schema: type[BaseModel], spelled: Callable[[str], str]) -> str:
    """Return one sentence about the first wrong key, `spelled` so, or value."""
    # An unknown key first: it is often the misspelt name of a key that is then missing.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    detail = problems[0]
    place = detail["loc"]
    if issubclass(schema, OptionGroup):
        place = schema.place_of(place)
    key = ".".join(map(str, place))
    if detail["type"] == "extra_forbidden" and len(place) == 1:
        return f"unknown key {key!r}.{nearest_name(key, schema.model_fields)}"
    if detail["type"] == "missing":
        return f"{spelled(key)} is missing."
    message = detail["msg"].removeprefix("Value error, ").rstrip(".")
    if detail["type"] == "value_error" and not key:
        if message.endswith("?"):
            return message
        return f"{message}."
    if detail["type"] == "value_error":
        return f"{spelled(key)}: {message} (got {detail['input']!r})."
    return f"{spelled(key)} must be {wanted(detail)}, got {detail['input']!r}."


# Names of kinds of values in sentences.
WANTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "a word", "list": "a list"}


def wanted(problem: Mapping[str, Any]) -> str:
    """Return the kind of value that was wanted, in words, from an item of pydantic's `ValidationError.errors()`."""
    if problem["type"] == "greater_than_equal":
        return f"at least {problem['ctx']['ge']}"
    message = str(problem["msg"]).removeprefix("Input should be ")
    return WANTED.get(str(problem["type"]).partition("_")[0], message)
