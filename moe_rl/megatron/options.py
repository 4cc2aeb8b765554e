"""The options of Megatron's MoE layers that are known here, by the version that brought them. Loads no torch.

Known means that somebody looked at what it does to a layer whose experts have replicas or have moved: it is accepted,
or it is refused in `refusals.yaml`. A new version brings new ones, and a list of what is refused cannot know them: an
option that stands nowhere here and is switched on is named in a warning.
"""

from collections.abc import Mapping
from pathlib import Path

import yaml

# By minor version of megatron-core, from the oldest that is supported: the options that it has and none before it.
KNOWN: Mapping[str, frozenset[str]] = {
    version: frozenset(names)
    for version, names in yaml.safe_load(Path(__file__).with_name("options.yaml").read_text(encoding="utf-8")).items()
}

# Parts of the names by which an option of the MoE layers is recognized.
WORDS = ("moe", "expert", "grouped_gemm")


def is_of_moe(option: str) -> bool:
    """Return whether an option is about the MoE layers, by its name."""
    return any(word in option for word in WORDS) or option in frozenset().union(*KNOWN.values())


def is_unknown(option: str) -> bool:
    """Return whether an option is about the MoE layers and nobody here looked at what it does."""
    return is_of_moe(option) and option not in frozenset().union(*KNOWN.values())


def unknown_sentence(option: str, value: object) -> str:
    """Return what is said of an unknown option that is switched on."""
    newest = list(KNOWN)[-1]
    return (
        f"moe_rl does not know the option {option}={value!r} (it knows megatron-core's options up to {newest}), so the "
        "option's effect on replicas and moved experts was not checked."
    )
