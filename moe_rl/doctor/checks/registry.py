"""All traps. To add one, write a function in a module of this folder and its words in traps.yaml."""

from importlib import import_module
from pathlib import Path

from moe_rl.core.registry import Registry
from moe_rl.doctor.traps import Trap
from moe_rl.yaml_files import read_yaml

# In the order of traps.yaml.
TRAPS: Registry[Trap] = Registry(
    "trap",
    [
        Trap(name=name, check=getattr(import_module(f"{__package__}.{module}"), name.replace("-", "_")), **words)
        for module, traps in read_yaml(Path(__file__).parents[1] / "traps.yaml").items()
        for name, words in traps.items()
    ],
)
