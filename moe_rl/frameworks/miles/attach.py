"""miles: slime's two flags, with the hooks of this module.

--custom-megatron-init-path moe_rl.frameworks.miles.attach.init
--custom-megatron-before-train-step-hook-path moe_rl.frameworks.miles.attach.before_train_step

Its replay lists are slime's; which stage they are in, its own manager says
(radixark/miles:miles/utils/replay_base.py).
"""

from importlib import import_module

from moe_rl.frameworks.miles.contract import FRAMEWORK
from moe_rl.frameworks.slime.attach import READERS
from moe_rl.frameworks.slime.worker import Worker

UPDATES = "backends.megatron_utils.update_weight.update_weight_from_distributed"
# Functions beside those that slime has, too; values as there (radixark/miles:miles/backends/megatron_utils).
OWN_READERS = {
    "backends.megatron_utils.hf_export:save_hf_model": True,
    f"{UPDATES}.mixin:DistBucketedWeightUpdateMixin.update_weights": True,
    f"{UPDATES}.delta:UpdateWeightFromDiskDelta.update_weights": True,
}
# Weights come from the optimizer's, adapters are sent while the model sleeps, a cell that died gets copies.
OTHERS = ("rematerialize_param_from_master_weight", "lora_rank", "lora_adapter_path", "multi_lora", "indep_dp")


def _stage() -> str:
    stage: str = import_module("miles.utils.replay_base").routing_replay_manager.stage
    return stage


WORKER = Worker(framework=FRAMEWORK, stage=_stage, readers=READERS | OWN_READERS, options_of_others=OTHERS)
init, before_train_step = WORKER.init, WORKER.before_train_step
