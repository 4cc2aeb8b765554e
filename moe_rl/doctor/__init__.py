"""`moe-rl doctor`: find the traps of MoE RL in a run's arguments before the run does.

`read_run` takes the files apart (`files.py`, `shell/`, `yaml_entries.py`), `interpret` says their settings in
Megatron's words (`settings.py` in each framework's folder), `examine` looks for every trap (`checks/`, one function per
trap), `probe` says what is installed. Nothing is started and no framework is imported.
"""

from moe_rl.doctor.diagnosis import Diagnosis, examine
from moe_rl.doctor.environment import Environment, probe
from moe_rl.doctor.files import read_run
from moe_rl.doctor.readers import interpret

__all__ = ["Diagnosis", "Environment", "examine", "interpret", "probe", "read_run"]
