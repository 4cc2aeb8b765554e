"""miles: slime's two flags, with the hooks of this module.

--custom-megatron-init-path moe_rl.frameworks.miles.attach.init
--custom-megatron-before-train-step-hook-path moe_rl.frameworks.miles.attach.before_train_step

Its replay lists are slime's; which stage they are in, its own manager says
(radixark/miles:miles/utils/replay_base.py).
"""

from importlib import import_module

from moe_rl.frameworks.miles.contract import FRAMEWORK
from moe_rl.frameworks.slime.attach import Worker


def _stage() -> str:
    stage: str = import_module("miles.utils.replay_base").routing_replay_manager.stage
    return stage


WORKER = Worker(framework=FRAMEWORK, stage=_stage)
init, before_train_step = WORKER.init, WORKER.before_train_step
