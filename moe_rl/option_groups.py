"""Options in groups: flat words outside, one object per subject inside.

A user writes words and never a group: `--replica-slots 2` on the command line, `replica_slots: 2` in a file,
`MOE_RL_REPLICA_SLOTS=2` in the environment, `replica_slots=2` in Python. A function takes the group that it reads.

    class SlotOptions(OptionGroup):               class PlanOptions(OptionGroup):
        replica_slots: int = 1                        slots: SlotOptions = SlotOptions()
        resident_slots: int = 0                       seed: int = 0

    PlanOptions(replica_slots=2)                  slots.replica_slots is 2, everything else as by default
    PlanOptions(replica_slots=2).words()          {"replica_slots": 2, "resident_slots": 0, "seed": 0}
    PlanOptions(replica_slots=2).stated_words()   {"replica_slots": 2}
    PlanOptions(replica=2)                        InvalidInputError, with the nearest word

A word stands in one group of a schema only, so it needs no name of its group. What a simulation and a run both state is
a group here; loads no numpy, because the help of the command line is printed from it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.core.step_words import OURS

AUTO = "auto"  # A number of slots that is still to be chosen.


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """Where a schema keeps a word of the user's."""

    group: str | None
    """Field of the schema that holds the group; None: the word is a field itself."""
    field: FieldInfo

    @property
    def default(self) -> Any:
        """The value of a user who says nothing."""
        return self.field.get_default(call_default_factory=True)


@cache
def words_of(schema: "type[OptionGroup]") -> Mapping[str, Word]:
    """Return the words that a schema reads, those of its groups included, in their order.

    Example: of the schema in the module's docstring, `replica_slots` and `resident_slots` in `slots`, then `seed`.
    """
    words: dict[str, Word] = {}
    for name, field in schema.model_fields.items():
        group = group_of(field)
        if group is None:
            words[name] = Word(group=None, field=field)
            continue
        for word, field_of_group in group.model_fields.items():
            assert word not in words, f"{schema.__name__} states {word} twice"
            words[word] = Word(group=name, field=field_of_group)
    return words


def group_of(field: FieldInfo) -> "type[OptionGroup] | None":
    """Return the class of the group that a field holds; None if it holds the value of a word."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, OptionGroup):
        return kind
    return None


class OptionGroup(BaseModel):
    """Options, checked and frozen; their fields are words or groups of words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _put_in_groups(cls, content: Any) -> Any:
        """Return flat words by group; raise for an unknown one, with the nearest known word."""
        if not isinstance(content, Mapping):
            return content
        words, fields = words_of(cls), dict[str, Any]()
        for name, value in content.items():
            word = words.get(name)
            if word is not None and word.group is not None:
                of_group = fields.setdefault(word.group, {})
                require(isinstance(of_group, dict), f"{name} is part of {word.group}: set only one of the two.")
                of_group[name] = value
            elif name in cls.model_fields:
                require(
                    name not in fields,
                    f"{name} and its individual options set the same values: set only one of the two.",
                )
                fields[name] = value
            else:
                raise InvalidInputError(f"unknown key {name!r}.{nearest_name(str(name), words)}")
        return fields

    @classmethod
    def place_of(cls, location: Iterable[int | str]) -> tuple[int | str, ...]:
        """Return where an error is in a user's words, from where it is in the groups: nobody types a group."""
        place = tuple(location)
        if not place or str(place[0]) not in cls.model_fields:
            return place
        if group_of(cls.model_fields[str(place[0])]) is None:
            return place
        return place[1:]

    def value_of(self, word: str) -> Any:
        """Return the value of a word that is known by its name alone, as a report or a flag knows it."""
        group = words_of(type(self))[word].group
        if group is None:
            return getattr(self, word)
        return getattr(getattr(self, group), word)

    def words(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the values by word: what a file of results keeps. `names`: of these words alone."""
        if names is None:
            names = words_of(type(self))
        return {word: self.value_of(word) for word in names}

    def stated_words(self) -> dict[str, Any]:
        """Return the words that somebody stated, by flag, file or keyword, also where they state the default."""
        return self.words(self._stated())

    def states(self, word: str) -> bool:
        """Return whether somebody stated a word."""
        return word in set(self._stated())

    def _stated(self) -> Iterator[str]:
        for name, word in words_of(type(self)).items():
            holder = self if word.group is None else getattr(self, word.group)
            if name in holder.model_fields_set:
                yield name

    def with_words(self, **values: Any) -> Self:
        """Return a copy in which these words have other values; what a user may combine is not checked again."""
        of_groups: dict[str, dict[str, Any]] = {}
        changes: dict[str, Any] = {}
        for name, value in values.items():
            group = words_of(type(self))[name].group
            if group is None:
                changes[name] = value
            else:
                of_groups.setdefault(group, {})[name] = value
        for group, of_group in of_groups.items():
            changes[group] = getattr(self, group).model_copy(update=of_group)
        return self.model_copy(update=changes)


def read_by(parse: Callable[[str], object], refusal: str) -> BeforeValidator:
    """Let an option be a text, as on the command line, which `parse` reads."""

    def read(value: object) -> object:
        try:
            if isinstance(value, str):
                return parse(value)
            return value
        except ValueError:
            raise ValueError(refusal.format(value)) from None

    return BeforeValidator(read)


SlotCount = Annotated[
    int | Literal["auto"],
    read_by(lambda text: text if text == AUTO else int(text), f"neither a whole number nor {AUTO}"),
]


class SlotOptions(OptionGroup):
    """Slots of a rank for replicas of experts, in addition to its own experts."""

    replica_slots: int = 1
    """R, slots per rank for replicas of experts from the same node."""
    cross_node_slots: SlotCount = 0
    """C, slots per rank for replicas from other nodes. Each takes the memory of two slots, because its replica
    arrives one layer early."""
    resident_slots: SlotCount = 0
    """S, slots per rank and layer for replicas that are kept for a whole optimizer step; each takes memory in every
    layer."""
    domain_balance: str = OURS
    """Balancer of the ranks inside a node. "ours" uses moe_rl's replicas, which work with every dispatcher. The engines
    of `planner.domain_engine` (engine:moonep, engine:hybridep, engine:ultraep) are part of a dispatcher. With an
    engine, policy `moe-rl` chooses home ranks, packing, resident replicas and replicas from other nodes, and
    `replica_slots` is 0."""

    @property
    def has_domain_engine(self) -> bool:
        """Whether the dispatcher's own engine balances the ranks of a node."""
        return self.domain_balance != OURS

    def number_of(self, name: str, user: str) -> int:
        """Return the number of the slots called `name`; raise where it is to be chosen, which `user` cannot do."""
        slots, flag = getattr(self, name), name.replace("_", "-")
        require(slots != AUTO, f"--{flag}={AUTO} works only for a training step. For {user}, set a number.")
        return int(slots)


class PriceOptions(OptionGroup):
    """Objective by which plans are compared, and the rates that price them."""

    cluster: str = "h100"
    """Cluster whose rates price a plan: a name or a YAML file."""
    objective: str = "time"
    """Name in `planner.objective`: "time" includes the cost of replicas and moves (`core.cost`); "imbalance" counts
    only token-expert pairs."""


class HomeOptions(OptionGroup):
    """How long home ranks are kept, and which loads decide them."""

    steps_served: int | None = None
    """Optimizer steps from one reorder to the next, over which the cost of a move is spread."""
    history_steps: int = 1
    """Number of earlier steps whose loads decide the home ranks."""
