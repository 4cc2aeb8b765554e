"""The frameworks that moe_rl knows: one folder of `moe_rl/frameworks` and one line here for each.

A folder holds its framework's parts under fixed names. Each part is optional:

    contract.py    FRAMEWORK   versions and symbols that the adapter relies on, and what a user writes
    attach.py                  the adapter
    losses.py                  objectives under the framework's own signatures
    settings.py    READER      the settings of a run's files, in Megatron's words
    trace.py       IMPORTER    routes that it writes
    expert_map.py  ENGINE      expert maps that it loads

Another package adds a framework by a folder of the same shape and one entry point:

    [project.entry-points."moe_rl.frameworks"]
    mine = "my_package.mine"

Here are names alone, so that `replay`, `doctor` and `rollout_engines` find their part without importing upward: a
`Registry` with `part="trace:IMPORTER"` loads that part of every folder when it is first read.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GROUP = "moe_rl.frameworks"
FRAMEWORKS = (
    "verl",
    "nemo_rl",
    "skyrl",
    "roll",  # before slime, some of whose arguments it has
    "miles",  # before slime, whose arguments it has
    "slime",
    "areal",
    "prime_rl",
    "trl",
    "transformers",
    "deepspeed",
    "sglang",
    "vllm",
    "megatron",  # last: slime and miles have all of its arguments
)


def folders() -> list[EntryPoint]:
    """Return an entry point per folder, whose value is the package; what the user installed beside moe_rl is first."""
    bundled = (EntryPoint(name=name, value=f"{GROUP}.{name}", group=GROUP) for name in FRAMEWORKS)
    return [*entry_points(group=GROUP), *bundled]


def part_of(folder: EntryPoint, part: str) -> Iterator[Any]:
    """Yield what `part` ("module:NAME") of a folder names; nothing where the folder has no such module."""
    module, _, name = part.partition(":")
    spec = find_spec(f"{folder.value}.{module}")
    # An editable install goes on naming a module whose file a later commit has deleted.
    if spec is not None and Path(str(spec.origin)).exists():
        yield getattr(import_module(f"{folder.value}.{module}"), name)
