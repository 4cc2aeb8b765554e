"""From the paths a user gives to the settings in them: scripts, argument lists, YAML, Megatron's argument dump."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.launch.python_launcher import model_words, read_python
from moe_rl.launch.shell.conditions import only_unset
from moe_rl.launch.shell.expansion import split
from moe_rl.launch.shell.follow import Launch, Shell
from moe_rl.launch.sources import FLAG, OVERRIDE, Entry, RawRun, Text, Where, read_text, texts_of
from moe_rl.launch.yaml_entries import interpolated, read_yaml_file

# A line of Megatron's `print_args`, perhaps after the prefix of a logger.
DUMPED = re.compile(r"^(?:.*?\s)?\s{2}([a-z_]\w*) \.{2,} (.*?)\s*$")
RUNTIME_ENVIRONMENT = ("runtime_env_json", "train_env_vars")
SECTION_OF_VARIABLES = re.compile(r"(?:^|\.)(?:env_vars|ENV_VARS)\.(\w+)$")
MAX_BYTES = 32_000_000


def read_run(paths: list[Path]) -> RawRun:
    """Return what the files say together; a later file wins. Raises `InvalidInputError` for any other file."""
    run = RawRun()
    shell = Shell(path=Path(), run=run, given=paths)
    scripts: list[Path] = []
    for path in paths:
        text = _text(path)
        # By suffix where there is one that says it; argument dumps stand in logs of any name, scripts often have none.
        if path.suffix in (".yaml", ".yml", ".json"):
            read_yaml_file(path, text, run)
        elif path.suffix == ".toml":
            _read_toml(path, text, run)
        elif dumped := _dumped(path, text):
            run.files.append(str(path))
            run.entries.extend(dumped)
        elif path.suffix == ".py":
            read_python(path, text, run)
        elif path.resolve() not in shell.followed:  # a script before it may have sourced it
            scripts.append(path)
            run.add_words(model_words(path, text, run))
            shell.follow_file(path, text)
    partial = bool(scripts) and _add_launch(shell, scripts[0], run)
    ray_starts = [launch for launch in shell.launches if texts_of(launch.words)[:2] == ["ray", "start"]]
    # After all files: `${a.b}` may name a key that only a later file, or the command, sets.
    entries = interpolated(run.entries)
    for entry in entries:
        run.job_variables.update(_variables(entry))
    run.variables.update(run.job_variables)
    return replace(
        run,
        entries=entries,
        notes=list(dict.fromkeys(run.notes)),
        assumed=list(dict.fromkeys(run.assumed)),
        files=list(dict.fromkeys(run.files)),
        partial=partial,
        exported_to_ray=frozenset(name for launch in ray_starts for name in launch.variables),
    )


def _text(path: Path) -> str:
    require(path.exists(), f"there is no file {path}.")
    require(not path.is_dir(), f"{path} is a folder: give the files of the run instead.")
    if path.stat().st_size > MAX_BYTES:
        raise InvalidInputError(
            f"{path} is too large ({path.stat().st_size} bytes): give only the launch script or the dump of the "
            "arguments."
        )
    text = read_text(path)
    require(bool(text.strip()), f"{path} is empty.")
    return text


def _read_toml(path: Path, text: str, run: RawRun) -> None:
    """Add the leaves of a TOML file, dotted; where in the file they stand its reader does not say."""
    run.files.append(str(path))
    try:
        tables = [("", tomllib.loads(text))]
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{path} is not a TOML file: {error}.") from error
    for prefix, table in tables:  # tables inside are appended while it runs
        for name, value in table.items():
            key = prefix + name
            if isinstance(value, dict):
                tables.append((f"{key}.", value))
            else:
                run.entries.append(Entry(key=key, value=value, written=key, where=Where(path=str(path))))


def _dumped(path: Path, text: str) -> list[Entry]:
    """Return the settings of a log that holds Megatron's argument dump; none where it holds none."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        if match := DUMPED.match(line):
            key, value = match.groups()
            where = Where(path=str(path), line=number)
            entries.append(Entry(key=key, value=(value,) if value else (), written=key, where=where))
    return entries


def _add_launch(shell: Shell, script: Path, run: RawRun) -> bool:
    """Add the settings of the command with the most settings: scripts also start Ray, download models, ...

    Returns whether no command was found, only arguments for one.
    """
    started: list[Launch] = []
    loose: list[Text] = []
    for launch in shell.launches:
        if _is_loose(launch):
            loose += launch.words
        else:
            started.append(launch)
    # Of equals the last one: a script converts checkpoints and warms up before it trains.
    best = max(reversed(started), key=lambda launch: _num_settings(launch.words), default=Launch([], {}))
    if _num_settings(best.words) and loose:
        run.notes.append(
            f"{loose[0].where}: these arguments are not part of any command (a backslash may be missing at the end "
            "of the previous line). They are read as arguments of the run."
        )
    # A model file of slime's sets arrays and starts nothing.
    partial = not _num_settings(best.words) and not loose
    if partial:
        words = _words_of_variables(shell)
    else:
        words = best.words + loose
    require(
        _num_settings(words) > 0,
        f"{script} contains no arguments of a run: neither a command with --flags or a.b=c nor an array of "
        "such arguments.",
    )
    run.command.extend(best.words)
    run.exported.update({name: value for name, value in best.variables.items() if not value.missing})
    run.variables.update(run.exported)
    run.add_words(words)
    return partial


def _is_loose(launch: Launch) -> bool:
    """Return whether arguments stand where a command should: the first word that is known is a flag."""
    first_word = next((word for word in launch.words if word.text or not only_unset(word)), None)
    return first_word is not None and bool(FLAG.match(first_word.text))


def _num_settings(words: list[Text]) -> int:
    return sum(bool(FLAG.match(word.text) or OVERRIDE.fullmatch(word.text)) for word in words)


def _words_of_variables(shell: Shell) -> list[Text]:
    """Return the words of all arrays and strings of arguments, for a script that starts nothing."""
    words: list[Text] = []
    for value in shell.variables.values():
        for text in value:
            if len(value) > 1 or OVERRIDE.fullmatch(text.text):
                words.append(text)
            elif re.search(r"(^|\s)--\w", text.text):
                words += split(Text(text=text.text.replace("\\", " "), where=text.where))
    return words


def _variables(entry: Entry) -> dict[str, Text]:
    """Return the environment variables that a setting holds."""
    if (match := SECTION_OF_VARIABLES.search(entry.key)) and not entry.missing:
        return {match.group(1): Text(text=str(entry.value), where=entry.where)}
    if entry.key in RUNTIME_ENVIRONMENT and isinstance(entry.value, tuple):
        text = " ".join(entry.value)
        try:
            document = json.loads(text)
        except json.JSONDecodeError:
            return {}
        if isinstance(document, dict):
            variables = document.get("env_vars", document)
        else:
            variables = {}
        return {name: Text(text=str(value), where=entry.where) for name, value in dict(variables).items()}
    return {}
