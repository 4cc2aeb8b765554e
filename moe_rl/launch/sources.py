"""What the files of a run say, before anyone knows which framework they are for."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from moe_rl.core.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """File and line that a value stands in; line 0 is the whole file."""

    path: str
    line: int = 0

    def __str__(self) -> str:
        """Return e.g. "scripts/run.sh:12"."""
        if self.line:
            return f"{self.path}:{self.line}"
        return self.path

    def short(self) -> str:
        """Return e.g. "run.sh:12"."""
        name = PurePath(self.path).name
        if self.line:
            return f"{name}:{self.line}"
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A piece of text, where it stands, and what in it could not be resolved."""

    text: str
    where: Where
    missing: tuple[str, ...] = ()
    """Variables, commands and interpolations whose values the files do not say."""


def texts_of(words: Iterable[Text]) -> list[str]:
    """Return the texts of words."""
    return [word.text for word in words]


def missing_in(words: Iterable[Text]) -> tuple[str, ...]:
    """Return what could not be resolved in any of several words, in their order."""
    missing: tuple[str, ...] = ()
    for word in words:
        missing += word.missing
    return missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One setting as written: a flag with its values, an override, or a leaf of a YAML file."""

    key: str
    """Dotted, with underscores: `moe_router_fusion`, `policy.megatron_cfg.enabled`."""
    value: object
    """A scalar or list of YAML; for a flag the tuple of its values as text, empty where it has none."""
    written: str
    """The key as the user wrote it: `--moe-router-fusion`."""
    where: Where
    missing: tuple[str, ...] = ()

    def shown(self) -> str:
        """Return the setting as the user wrote it, for a sentence."""
        if isinstance(self.value, tuple):
            return " ".join([self.written, *self.value])
        joint = "=" if "." in self.written else ": "
        return f"{self.written}{joint}{self.value}"


FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
OVERRIDE = re.compile(r"([+~]{0,2})([A-Za-z_][\w/@-]*(?:\.[\w/@-]+)+)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRun:
    """All settings of all files in the order in which they count: a later one wins. Every file adds to the lists."""

    entries: list[Entry] = field(default_factory=list)
    variables: dict[str, Text] = field(default_factory=dict)
    """Environment variables that the run's files set for the processes they start."""
    words: list[str] = field(default_factory=list)
    """Words of the launch command that are not settings, e.g. `verl.trainer.main_ppo`."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what was left out: files that are not there, conditions that could not be decided."""
    assumed: list[str] = field(default_factory=list)
    """Sentences on what was read in place of what the files name."""
    files: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    """Files that the run starts from or sources and that are not there, with a sentence on each."""
    partial: bool = False
    """Whether the files hold only some arguments of a command that stands elsewhere."""
    command: list[Text] = field(default_factory=list)
    """Words of the command that starts the run; empty if no script has one."""
    exported: dict[str, Text] = field(default_factory=dict)
    """Environment variables of the shell that starts this command."""
    exported_to_ray: frozenset[str] = frozenset()
    """Names of the variables that the script exports before `ray start`."""
    job_variables: dict[str, Text] = field(default_factory=dict)
    """Environment variables in the settings: of `--runtime-env-json`, or of sections such as `env_vars`."""

    def add_words(self, words: list[Text]) -> None:
        """Add the settings in the words of a command, and the words that are not settings."""
        settings: list[tuple[Text, list[Text] | re.Match[str]]] = []
        plain: list[Text] = []
        values = plain
        for word in words:
            if word.text == "--":  # `ray job submit -- python3 train.py`: what follows is a command, no value
                values = plain
            elif override := OVERRIDE.fullmatch(word.text):
                settings.append((word, override))
                values = plain  # an override holds its value: a word behind it is not one
            elif FLAG.match(word.text):
                values = []
                settings.append((word, values))
            else:
                values.append(word)
        self.entries.extend(
            _override(word, of) if isinstance(of, re.Match) else _flag(word, of) for word, of in settings
        )
        self.words.extend(texts_of(plain))


def _flag(flag: Text, values: list[Text]) -> Entry:
    name, joint, first_value = flag.text.partition("=")
    texts = texts_of(values)
    if joint:
        texts.insert(0, first_value)
    return Entry(
        key=name.lstrip("-").replace("-", "_"),
        value=tuple(texts),
        written=name,
        where=flag.where,
        missing=flag.missing + missing_in(values),
    )


def _override(word: Text, match: re.Match[str]) -> Entry:
    sign, key, value = match.groups()
    return Entry(
        key=key,
        value=None if sign == "~" else value,  # Hydra's ~ takes a key away
        written=sign + key,
        where=word.where,
        missing=word.missing,
    )


def read_text(path: Path) -> str:
    """Return the text of a file, or raise a sentence."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} is not a text file.") from None
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from error
