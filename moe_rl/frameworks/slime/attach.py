"""slime: two flags on the worker, and plans from the driver's own schedule; `miles.attach` is the same for miles.

--custom-megatron-init-path moe_rl.frameworks.slime.attach.init
--custom-megatron-before-train-step-hook-path moe_rl.frameworks.slime.attach.before_train_step

with MOE_RL=moe-rl in the environment of the workers. Routes come from slime's own replay lists, one entry per
micro-batch and router; where these are lazy objects, which cannot be read without being used up, from plans that the
driver wrote into MOE_RL_PLANS with `write_plans`. Where nothing is replayed, plans are made from what routers chose for
the same tokens in the log-prob pass.
"""

import os

from moe_rl.frameworks.slime.contract import FRAMEWORK
from moe_rl.frameworks.slime.worker import Worker

ACTOR, BACKUPS = "backends.megatron_utils.actor", "utils.tensor_backper:_TensorBackuperNormal"
UPDATES = "backends.megatron_utils.update_weight.update_weight_from"
# Functions of slime and miles, as module:name, and whether they handle weights alone. A colocated engine gets the
# weights from the copy on the host that `backup` makes, others from the model itself; `restore` puts other models'
# weights in their place (THUDM/slime:slime/backends/megatron_utils).
READERS = {
    f"{ACTOR}:save": False,
    f"{ACTOR}:load_checkpoint": True,
    f"{BACKUPS}.backup": True,
    f"{BACKUPS}.restore": True,
}
# Of slime alone.
OWN_READERS = {
    f"{ACTOR}:save_hf_model_to_path": True,
    f"{UPDATES}_distributed:UpdateWeightFromDistributed.update_weights": True,
    f"{UPDATES}_disk:UpdateWeightFromDisk.update_weights": True,
    f"{UPDATES}_disk_delta:UpdateWeightFromDiskDelta.update_weights": True,
}
WORKER = Worker(
    framework=FRAMEWORK, stage=lambda: os.environ.get("ROUTING_REPLAY_STAGE"), readers=READERS | OWN_READERS
)
init, before_train_step = WORKER.init, WORKER.before_train_step
