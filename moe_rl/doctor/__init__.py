"""`moe-rl doctor`: find the traps of MoE RL in a run's arguments before the run does.

`moe_rl.launch` reads the run's files; `examine` looks for every trap (`checks/`, one function per trap), `probe` says
what is installed. Nothing is started and no framework is imported.
"""

from moe_rl.doctor.diagnosis import Diagnosis, examine
from moe_rl.doctor.environment import Environment, probe

__all__ = ["Diagnosis", "Environment", "examine", "probe"]
