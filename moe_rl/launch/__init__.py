"""What a run's own files say: launch scripts, YAML, TOML, Python configurations, argument dumps.

`read_run` takes the files apart (`files.py`, `shell/`, `yaml_entries.py`), `interpret` says their settings in
Megatron's words (`settings.py` in each framework's folder). The doctor looks for traps in them, a study simulates them,
and each framework's folder reads its own. Nothing is started and no framework is imported.
"""

from moe_rl.launch.files import read_run
from moe_rl.launch.readers import interpret

__all__ = ["interpret", "read_run"]
