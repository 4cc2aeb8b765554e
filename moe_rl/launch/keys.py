"""How a reader is written: a table from the framework's keys to fields of `RunSettings`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from moe_rl.core.mappings import without
from moe_rl.launch.batch import BatchFacts, BatchKeys, read_batch
from moe_rl.launch.ray_job import OWN_VARIABLE, ray_job_of
from moe_rl.launch.settings import (
    EXPERT_TENSOR,
    KINDS,
    TENSOR,
    ReadRun,
    RunSettings,
    Setting,
    following_tensor_parallel,
    said_by,
    setting_of,
)
from moe_rl.launch.sources import Entry, RawRun


def is_on(value: object) -> bool:
    """Return whether a flag's or a YAML file's value means yes."""
    return str(value).strip().lower() in ("true", "1", "yes", "on")


# Environment variables that every framework hands on, the fields that they set and what they mean there. The first is
# TransformerEngine's switch between fp32 block scales ("1") and powers of two.
VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("fp8_fp32_scales", is_on),
    "MOE_RL_POLICY": ("balancing_policy", str),
    "MOE_RL": ("adapter_policy", str),
    "MOE_RL_REORDERS": ("adapter_reorders", is_on),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """The field that a key sets; `meaning` turns the framework's value into the field's, None says nothing."""

    field: str
    meaning: Callable[[Any], object] | None = None
    by_presence: bool = False
    """Whether it matters that the key is set rather than to what: then a value that is not known counts too."""
    by_part: bool = False
    """Whether the part of a value that is known may say enough: the end of `$BASE/Model-FP8`."""


Keys = Mapping[str, Rule]
Known = dict[str, Setting[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A framework's reader."""

    name: str
    title: str
    """Its name as people write it."""
    recognizes: Callable[[RawRun], bool]
    """Whether a run is this framework's; readers are asked in the order of the registry."""
    keys: Keys
    complete: Callable[[Known, RawRun], Known]
    """Adds defaults and what follows from several keys."""
    option: Callable[[str], str | None] = lambda key: None
    """Megatron's name of an option that `keys` leaves out; None where the key is not Megatron's."""
    knows: Callable[[str], bool] = lambda name: False
    """Whether `complete` brings the values of a file of the framework's that is not there."""
    prepare: Callable[[RawRun], RawRun] = lambda raw: raw
    """Renames keys before they are looked up."""
    trains_by_rl: bool = True
    """Whether it trains on what its own rollouts generate."""
    verdict_only: bool = False
    """Whether only the verdict is given: nobody has checked which traps its own code avoids."""
    batch: BatchKeys = field(default_factory=dict)
    """Keys that say how large the run's batches are, by what they hold (`moe_rl.launch.batch`)."""
    batch_defaults: Mapping[str, int] = field(default_factory=dict)
    """What holds of a batch where the files set none of its keys."""
    trainer_gpus: Callable[[RawRun], int | None] = lambda raw: None
    """GPUs of the trainer, if the files say them in words of the framework's own and not as nodes of so many."""
    knows_trainer_gpus: Callable[[RawRun], bool] = lambda raw: True
    """Whether nothing else, of which the files do not say how much it takes, takes GPUs of the trainer's nodes."""
    remarks: Callable[[RawRun], tuple[str, ...]] = lambda raw: ()
    """Sentences on what of the run the reader leaves out."""

    def read(self, raw: RawRun) -> ReadRun:
        """Return the run's settings; raises a sentence for a value of the wrong type."""
        raw = self.prepare(raw)
        ray_job = ray_job_of(raw)
        if ray_job is not None:
            variables = {**without(raw.variables, ray_job.kept_back), **ray_job.variables}
            raw = replace(raw, variables=variables)
        settings: Known = {}
        source: dict[str, str] = {}
        undecided: dict[str, str] = {}
        for entry in raw.entries:
            rule = self.keys.get(entry.key) or _as_it_is(self.option(entry.key))
            if rule is None:
                continue
            undecided.pop(rule.field, None)
            setting: Setting[Any] | None = None
            if entry.missing and rule.by_presence:
                setting = Setting(value="", written=entry.written, where=entry.where)
            elif entry.missing and not (rule.by_part and setting_of(entry, rule.field, rule.meaning) is not None):
                undecided[rule.field] = hangs_on(entry)
            else:
                setting = setting_of(entry, rule.field, rule.meaning)
            if setting is not None:
                settings[rule.field], source[rule.field] = setting, entry.key
            # A key that says nothing takes back what it said, and nothing that another key said of the same field.
            elif source.get(rule.field) == entry.key:
                del settings[rule.field], source[rule.field]
        for name, (field_name, meaning) in VARIABLES.items():
            if (text := variable(raw, name, meaning)) is not None:
                settings[field_name] = text
        settings_with_defaults = self.complete(settings, raw)
        # A default is not known where the files set the key to something that only the machine knows.
        settings = {
            name: setting
            for name, setting in settings_with_defaults.items()
            if setting.where is not None or name not in undecided
        }
        if "trainer" not in settings and EXPERT_TENSOR not in settings | undecided and TENSOR in settings:
            settings[EXPERT_TENSOR] = following_tensor_parallel(settings[TENSOR])
        own_gpus = self.trainer_gpus(raw)
        if not self.knows_trainer_gpus(raw):
            settings = without(settings, ("trainer_nodes",))
        elif own_gpus is not None:
            settings["trainer_gpus"] = Setting(value=own_gpus, written=f"the trainer's {own_gpus} GPUs")
        unread: list[str] = []
        unneeded: list[str] = []
        for name, sentence in raw.absent.items():
            if self.knows(name):
                unneeded.append(f"{name} does not exist, but this changes nothing, because moe_rl knows its values.")
            else:
                unread.append(sentence)
        conditions = (*raw.notes, *unread, *self.remarks(raw))
        fields = {name: setting for name, setting in settings.items() if name in KINDS}
        options = without(settings, KINDS)
        return ReadRun(
            settings=RunSettings(framework=self.name, options=options, **fields),
            num_ignored=sum(entry.key not in self.keys for entry in raw.entries),
            unresolved=tuple(undecided[name] for name in undecided if name in KINDS),
            undecided=undecided,
            notes=(*conditions, *unneeded, *raw.assumed),
            conditions=conditions,
            files=tuple(raw.files),
            partial=raw.partial,
            own_variables={name: text for name, text in raw.variables.items() if OWN_VARIABLE.fullmatch(name)},
            arguments={entry.key: entry for entry in raw.entries},
            ray_job=ray_job,
            launch_file=raw.command[0].where.path if raw.command else "",
            runs_by_uv=("uv", "run") in pairwise(raw.words),
            batch=self._batch_of(raw, own_gpus),
        )

    def _batch_of(self, raw: RawRun, own_gpus: int | None) -> BatchFacts:
        batch = read_batch(raw, self.batch, self.batch_defaults)
        return batch if own_gpus is None else replace(batch, trainer_gpus=own_gpus)


def hangs_on(entry: Entry) -> str:
    """Return the sentence on a setting whose value is not in the files."""
    return f"the value of {entry.written} ({entry.where}) depends on {', '.join(dict.fromkeys(entry.missing))}"


def _as_it_is(option: str | None) -> Rule | None:
    """Return the rule of an option of Megatron that no field holds."""
    if option is None or option in KINDS:
        return None
    return Rule(option)


def when(condition: bool, value: object) -> object:
    """Return `value` where the condition holds, else nothing."""
    if not condition:
        return None
    return value


def named_modules(value: object) -> object:
    """Return the names in a list, or in a text with commas between them; None where it names nothing."""
    if isinstance(value, list):
        listed = value
    else:
        listed = str(value).strip("[]").split(",")
    return [str(name).strip(" '\"") for name in listed] or None


def _largest(value: object) -> object:
    if isinstance(value, list):
        values = value
    else:
        values = str(value).split()
    return max(map(float, values))


def _names_fp8(value: object) -> bool:
    return "fp8" in str(value).lower()


# What settings.yaml calls the ways to turn a framework's value into a field's; None says nothing of the field.
MEANINGS: Mapping[str, Callable[[Any], object]] = {
    "the other way": lambda on: not is_on(on),
    "largest": _largest,
    "rank": lambda rank: float(str(rank)) > 0,
    "above 0": lambda value: when(float(str(value)) > 0, True),
    "given": bool,
    "names": named_modules,
    "names fp8": _names_fp8,
    "fp8 if named": lambda name: when(_names_fp8(name), True),
    "not megatron": lambda name: when(str(name) != "megatron", name),
    "R2 or R3": lambda mode: mode if mode in ("R2", "R3") else "off",
    "R3 or off": lambda switch: "R3" if is_on(switch) else "off",
}


def rules_of(facts: Mapping[str, Any]) -> Keys:
    """Return the rules of the `keys` in a framework's settings.yaml, with the sections in front of the names.

    A rule is the field, or `sets` with the field and what its value means: `as` one of `MEANINGS`, `if_on` the value
    where the key is on, `if_is` on where the key is that word.
    """
    return {section + key: _rule(rule) for section, keys in facts["keys"].items() for key, rule in keys.items()}


def _rule(stated: Any) -> Rule:
    fields: dict[str, Any] = {"sets": stated} if isinstance(stated, str) else dict(stated)
    field, meaning = fields.pop("sets"), None
    if "as" in fields:
        meaning = MEANINGS[fields.pop("as")]
    if "if_on" in fields:
        value = fields.pop("if_on")
        return Rule(field, lambda on: when(is_on(on), value))
    if "if_is" in fields:
        word = fields.pop("if_is")
        return Rule(field, lambda value: value == word)
    return Rule(field, meaning, **fields)


def last_entry(raw: RawRun, key: str) -> Entry | None:
    """Return the entry that counts for a key; None where no file sets it."""
    for entry in reversed(raw.entries):
        if entry.key == key:
            return entry
    return None


def sets_key_under(raw: RawRun, *prefixes: str) -> bool:
    """Return whether the files set any key that begins with one of these: `sets_key_under(raw, "trainer.")`."""
    return any(entry.key.startswith(prefixes) for entry in raw.entries)


def last_value(raw: RawRun, key: str) -> object:
    """Return the value that counts for a key; None where no file sets it or it is not known."""
    entry = last_entry(raw, key)
    if not (entry is not None and not entry.missing):
        return None
    return entry.value


# Ends of a checkpoint's name that say how the weights are stored, and nothing of the model.
FORMAT_IN_NAME = re.compile(r"[-_](fp8|bf16|hf|mcore|torch_dist)$")


def listed_name(text: str) -> str:
    """Return the listed model that a Hugging Face id or a path names; empty if moe_rl lists none of that name.

    Example: `Qwen/Qwen3-30B-A3B-Base` on the hub and `/models/Qwen3-30B-A3B-FP8/` on a disk are both qwen3-30b-a3b.
    """
    from moe_rl.config import listed_names  # numpy, which no help of a command waits for

    own_name = FORMAT_IN_NAME.sub("", PurePath(text).name.lower())
    for name, listed in listed_names().items():
        if name == text.lower() or PurePath(name).name == own_name:
            return listed
    return ""


def with_model(settings: Known, raw: RawRun, key: str) -> Known:
    """Add the model that `key` names, its experts and its layers, where moe_rl knows it; what the files say wins.

    A model that the files give other sizes is not the listed one. Of `$MODELS/Qwen3-30B-A3B` only the end is known,
    which is enough.
    """
    from moe_rl.config import load_model  # numpy, as above

    entry = last_entry(raw, key)
    if entry is None:
        return settings
    # A flag's value is a tuple of its words: ("/models/Qwen3-30B-A3B",).
    text = entry.value[0] if isinstance(entry.value, tuple) and entry.value else entry.value
    name = listed_name(text) if isinstance(text, str) else ""
    if not name:
        return settings
    spec = load_model(name).spec
    pattern = [int(layer in spec.moe_layer_ids) for layer in range(spec.num_layers)]
    shape = {"num_moe_experts": spec.num_experts, "num_layers": spec.num_layers, "moe_layer_freq": pattern}
    if all(settings[size].value == shape[size] for size in ("num_moe_experts", "num_layers") if size in settings):
        shape["model"] = name
    return {field: said_by(entry, value) for field, value in shape.items()} | settings


def listed_model(settings: RunSettings) -> str:
    """Return the listed model that the files name, if its layers and experts are theirs; empty if they name none."""
    return settings.model.value if settings.model else ""


def other_trainer(entry: Entry | None) -> Known:
    """Return the trainer that an entry names, where it is known and not Megatron."""
    if entry is None or entry.missing or str(entry.value).startswith("megatron"):
        return {}
    return {"trainer": said_by(entry, str(entry.value))}


def variable(raw: RawRun, name: str, meaning: Callable[[str], Any]) -> Setting[Any] | None:
    """Return an environment variable that the run's files set."""
    text = raw.variables.get(name)
    if text is None or text.missing or not text.text:
        return None
    return Setting(value=meaning(text.text), written=f"{name}={text.text}", where=text.where)
