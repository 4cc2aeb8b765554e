"""All traps. A new one is one function in a module of this folder."""

from moe_rl.core.registry import Registry
from moe_rl.doctor.checks import attach, environment, parallel, precision, replay, routes
from moe_rl.doctor.traps import Trap

MODULES = (replay, routes, parallel, precision, environment, attach)
TRAPS: Registry[Trap] = Registry(
    "trap", [value for module in MODULES for value in vars(module).values() if isinstance(value, Trap)]
)
"""In the order of the modules, and in each of them as they are written."""
