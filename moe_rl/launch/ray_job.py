"""The variables that `ray job submit` gives to a run's workers, and where a script writes them.

A Ray cluster keeps the environment in which it was started, so a variable that a script exports later reaches no
worker. Workers get the job's runtime environment: JSON on the command line, often in a variable of the script, or a
YAML file.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from moe_rl.launch.sources import RawRun, Text, Where, read_text, texts_of
from moe_rl.launch.yaml_entries import entries_of_yaml

FLAG = re.compile(r"--runtime-env-json[=\s]\s*")
VARIABLE = re.compile(r"[\"']?\$\{?(\w+)\}?")
# A quote as the script writes it: `"`, or `\"` inside double quotes.
QUOTE = r"(\\*[\"'])"
OWN_VARIABLE = re.compile(r"MOE_RL(_.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewText:
    """What to write into a script."""

    text: str
    where: Where
    """The line below which it goes, or in which it stands."""
    behind: str = ""
    """Text of that line right behind which it goes; empty if it is a line of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptJson:
    r"""JSON inside a script, with the quotes escaped as the script escapes them.

    Example: in `ENV="{\"env_vars\": {\"A\": \"1\"}}"`, `begin` is the place of the first `{`, and
    `with_variable("MOE_RL", "observe")` is `\"MOE_RL\": \"observe\", `, to go behind `\"env_vars\": {`.
    """

    path: Path
    script: str
    """The whole file."""
    begin: int
    """Where the JSON's first `{` stands."""

    @classmethod
    def at(cls, path: Path, script: str, position: int) -> "ScriptJson | None":
        """Return the JSON that starts behind a position; None if no `{` follows."""
        begin = script.find("{", position)
        if begin < 0:
            return None
        return cls(path=path, script=script, begin=begin)

    @property
    def body(self) -> str:
        """The JSON as the script writes it; braces of `${NAME}` come in pairs, too."""
        depth = 0
        for position in range(self.begin, len(self.script)):
            depth += {"{": 1, "}": -1}.get(self.script[position], 0)
            if depth == 0:
                return self.script[self.begin : position + 1]
        return self.script[self.begin :]

    def where(self, offset: int) -> Where:
        """Return the place of a character of `body`."""
        line = self.script.count("\n", 0, self.begin + offset) + 1
        return Where(path=str(self.path), line=line)

    def own_variables(self) -> dict[str, Text]:
        """Return moe_rl's variables in the JSON; a value with a `$` in it is not known here."""
        variables = {}
        for match in re.finditer(QUOTE + r"(MOE_RL\w*)\1\s*:\s*\1(.*?)\1", self.body):
            name, value, where = match[2], match[3], self.where(match.start())
            if "$" in value:
                variables[name] = Text(text="", where=where, missing=(value,))
            else:
                variables[name] = Text(text=value, where=where)
        return variables

    def with_variable(self, name: str, value: str) -> NewText:
        """Return what to write so that workers get a variable; it goes first, so only it may need a comma."""
        body = self.body
        section = re.search(QUOTE + r"env_vars\1\s*:\s*\{", body)
        if section is not None:
            quote, end, behind = section[1], section.end(), section.group()
        else:
            quote, end, behind = '"', 1, "{"
            if quoted := re.search(QUOTE, body):
                quote = quoted[1]
        text = f"{quote}{name}{quote}: {quote}{value}{quote}"
        if section is None:
            text = f"{quote}env_vars{quote}: {{{text}}}"
        following = body[end:]
        if not following.lstrip().startswith("}"):
            text += ","
        where = self.where(end - 1)
        if re.match(r"[ \t]*\n", following):
            return NewText(text=text, where=where)
        return NewText(text=text.replace(",", ", "), where=where, behind=behind)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """A `ray job submit` that starts the run."""

    where: Where
    json: ScriptJson | None = None
    """None if the command has no JSON, or nobody can tell where it stands."""
    file: str = ""
    """A YAML file with the runtime environment."""
    variables: Mapping[str, Text] = field(default_factory=dict)
    """moe_rl's variables that workers get."""
    kept_back: Mapping[str, Text] = field(default_factory=dict)
    """moe_rl's variables that the script exports and that the job does not hand on."""
    on_head: bool = False
    """Whether the script exports one of them before `ray start`: workers of the head node alone then have it."""


def ray_job_of(raw: RawRun) -> RayJob | None:
    """Return the Ray job that starts the run; None if another command starts it."""
    if ("ray", "job", "submit") not in zip(*(texts_of(raw.command)[start:] for start in range(3)), strict=False):
        return None
    where = raw.command[0].where
    json_text, file = _json_of(raw), _file_of(raw)
    written: dict[str, Text] = {}
    if json_text is not None:
        written = json_text.own_variables()
    if file and Path(file).is_file():
        for entry in entries_of_yaml(Path(file), read_text(Path(file))):
            section, _, name = entry.key.rpartition(".")
            if section == "env_vars" and OWN_VARIABLE.fullmatch(name):
                written[name] = Text(text=str(entry.value), where=entry.where)
    for name, text in raw.job_variables.items():
        if OWN_VARIABLE.fullmatch(name):
            # The parsed JSON has the value, the script's text has the line.
            place = written.get(name, text).where
            written[name] = Text(text=text.text, where=place, missing=text.missing)
    exported = {name: text for name, text in raw.exported.items() if OWN_VARIABLE.fullmatch(name)}
    kept_back = {name: text for name, text in exported.items() if name not in written}
    return RayJob(
        where=where,
        json=json_text,
        file=file,
        variables=written,
        kept_back=kept_back,
        on_head=bool(raw.exported_to_ray & kept_back.keys()),
    )


def _json_of(raw: RawRun) -> ScriptJson | None:
    """Return where the JSON of `--runtime-env-json` stands: behind the flag, or where its variable is assigned."""
    flag = next((word for word in raw.command if word.text.startswith("--runtime-env-json")), None)
    if flag is None:
        return None
    path = Path(flag.where.path)
    script = read_text(path)
    line_begin = sum(len(line) for line in script.splitlines(keepends=True)[: flag.where.line - 1])
    flag_match = FLAG.search(script, line_begin)
    if flag_match is None:
        return None
    variable = VARIABLE.match(script, flag_match.end())
    if variable is None:
        return ScriptJson.at(path, script, flag_match.end())
    return _assigned(variable[1], path, script[: flag_match.start()], raw.files)


def _assigned(name: str, path: Path, before: str, files: Iterable[str]) -> ScriptJson | None:
    """Return the JSON that a variable holds: its last assignment before the command, else one of another file."""
    others = [Path(file) for file in files if Path(file) != path and Path(file).suffix in ("", ".sh")]
    for file, script in [(path, before), *((other, read_text(other)) for other in others)]:
        assignments = list(re.finditer(rf"^\s*(?:export |local |declare )?{name}=", script, re.MULTILINE))
        if assignments:
            return ScriptJson.at(file, read_text(file), assignments[-1].end())
    return None


def _file_of(raw: RawRun) -> str:
    """Return the file that `--runtime-env` names, as far as it is known."""
    for word, following in pairwise([*raw.command, Text(text="", where=raw.command[0].where)]):
        name, joint, value = word.text.partition("=")
        if name != "--runtime-env":
            continue
        if joint:
            return value
        return following.text
    return ""
