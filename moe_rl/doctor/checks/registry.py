"""All traps. A new one is a function in a module of this folder, and its words in traps.yaml."""

from pathlib import Path

from moe_rl.config import read_yaml
from moe_rl.core.registry import Registry
from moe_rl.doctor.checks import attach, environment, parallel, precision, replay, routes
from moe_rl.doctor.traps import Trap

MODULES = {
    "replay": replay,
    "routes": routes,
    "parallel": parallel,
    "precision": precision,
    "environment": environment,
    "attach": attach,
}
TRAPS: Registry[Trap] = Registry(
    "trap",
    [
        Trap(name=name, check=getattr(MODULES[module], name.replace("-", "_")), **words)
        for module, traps in read_yaml(Path(__file__).parents[1] / "traps.yaml").items()
        for name, words in traps.items()
    ],
)
"""In the order of traps.yaml."""
