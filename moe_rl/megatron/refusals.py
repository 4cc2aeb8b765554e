"""What `attach` refuses by a model's options alone; `moe-rl doctor` reads the same tables. Loads no torch.

An option that becomes supported leaves refusals.yaml, and both say so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An option of Megatron's, what it may be, and why it may be nothing else."""

    option: str
    reason: str = ""
    allowed: Sequence[object] = ()
    """Values that are not refused, beside None; empty: everything that is switched on is refused."""
    when: Mapping[str, object] = field(default_factory=dict)
    """Values of other options with which alone it is refused; True and False: switched on and off."""
    with_copies: bool = False
    """Refused where ranks hold copies of experts, or experts='grouped' computes; homes that move go with it."""
    unless: Mapping[str, object] = field(default_factory=dict)
    """Fields of `BalancerConfig`; with any one of these values it is not refused."""
    never_run: str = ""
    """Why values that are not allowed are refused unless `experimental`: written, and never run with what it is for."""

    def sentence(self, value: object, *, experimental: bool = False) -> str:
        """Return why `value` is refused; empty where it is not."""
        if value is None or (value in self.allowed if self.allowed else not value) or (self.never_run and experimental):
            return ""
        name = f"{self.option} {value}" if self.allowed else self.option
        if self.never_run:
            return experimental_sentence(name, self.never_run)
        if self.with_copies:
            copies = "with expert replicas or experts='grouped'"
            moves = "Without replica slots, moe_rl can still move experts between ranks."
            return f"{name} is not supported {copies}: {self.reason}. {moves}"
        remedy = f"; set it to {' or '.join(map(str, self.allowed))}" if self.allowed else ""
        remedy += "".join(f"; BalancerConfig({name}={word!r}) allows it" for name, word in self.unless.items())
        return f"{name} is not supported: {self.reason}{remedy}."


def experimental_sentence(name: str, never_run: str) -> str:
    """Return why `name`, which was never run with what it is for, is refused unless it is asked for."""
    return f"{name} is experimental: {never_run}. BalancerConfig(experimental=True) allows it."


Table = tuple[Refusal, ...]


def _table(config: str) -> Table:
    tables = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
    return tuple(Refusal(**refusal) for refusal in tables[config])


# Options of `TransformerConfig`, and of `DistributedDataParallelConfig`.
REFUSALS, DDP_REFUSALS = _table("model"), _table("ddp")


def refused(
    value_of: Callable[[str], object],
    *,
    experimental: bool = False,
    copies: bool = True,
    facts: Mapping[str, object] | None = None,
    table: Table = REFUSALS,
) -> Iterator[tuple[str, str]]:
    """Yield (option, sentence) for every option whose value `attach` refuses; `value_of` gives None where not set.

    `copies` says whether ranks hold copies of experts, as they do by default, or our own modules compute them; `facts`
    are fields of `BalancerConfig`.
    """
    for refusal in table:
        if refusal.unless.items() & (facts or {}).items() or (refusal.with_copies and not copies):
            continue
        sentence = refusal.sentence(value_of(refusal.option), experimental=experimental)
        if sentence and all(holds(value_of(option), wanted) for option, wanted in refusal.when.items()):
            yield refusal.option, sentence


def holds(value: object, wanted: object) -> bool:
    """Return whether a value is the wanted one; True and False want it switched on and off, and None is neither."""
    return value is not None and (bool(value) if isinstance(wanted, bool) else value) == wanted
