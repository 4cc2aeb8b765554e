"""verl's entry `run_ppo` on a Ray cluster that runs already: RL steps of two actor workers, with and without moe_rl.

python ray_driver.py ADDRESS RESULT; what verl's trainer saw is written to RESULT as JSON. MOE_RL stands in the
environment of this process alone: verl's `runtime_env` brings it to the workers of the first group; the second group is
told to forget it.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_dir
from verl.trainer.main_ppo import run_ppo

STEPS, SEQUENCES, MINI_BATCHES, PROMPT, RESPONSE, VOCABULARY = 2, 16, 2, 20, 40, 128
OVERRIDES = f"""
    model_engine=megatron
    actor_rollout_ref.model.path=tiny
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.total_training_steps=10
    actor_rollout_ref.actor.ppo_mini_batch_size={SEQUENCES // MINI_BATCHES}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=120
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.vanilla_mbridge=True
    actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=400
    trainer.n_gpus_per_node=2
""".split()


def rollout(step: int) -> Any:
    """A rollout as verl's trainer has it: prompts padded on the left, responses on the right."""
    from verl import DataProto

    draw = torch.Generator().manual_seed(step)
    lengths = np.random.default_rng(step).integers([4, 16], [PROMPT, RESPONSE], (SEQUENCES, 2), endpoint=True)
    place = np.arange(-PROMPT, RESPONSE)
    mask = torch.from_numpy((place >= -lengths[:, :1]) & (place < lengths[:, 1:])).long()
    tokens = torch.randint(1, VOCABULARY, mask.shape, generator=draw) * mask
    advantages = torch.randn(SEQUENCES, 1, generator=draw) * mask[:, PROMPT:]
    return DataProto.from_dict(
        tensors={
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask[:, PROMPT:],
            "advantages": advantages,
        },
        meta_info={"temperature": 1.0, "global_token_num": mask.sum(1).tolist()},
    )


@ray.remote
class Runner:
    """In the place of verl's `TaskRunner`, whose trainer starts a rollout engine."""

    def run(self, config: Any) -> None:
        from verl.single_controller.ray import RayResourcePool

        pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        found = {
            name: self.steps(config, pool, forget) for name, forget in (("balanced", {}), ("plain", {"MOE_RL": ""}))
        }
        Path(config.trainer.default_local_dir).write_text(json.dumps(found))

    def steps(self, config: Any, pool: Any, environment: dict[str, str]) -> dict[str, Any]:
        """The groups of workers, and the part of a step behind the rollout, as verl's trainers have them."""
        from cpu_actor import CpuActor
        from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, create_colocated_worker_cls
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        given = RayClassWithInitArgs(cls=ray.remote(CpuActor), config=config.actor_rollout_ref, role="actor_rollout")
        group = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=create_colocated_worker_cls(class_dict={"actor_rollout": given}),
            device_name="cpu",
            worker_env={"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "GLOO_SOCKET_IFNAME": "lo"} | environment,
        )
        actor = group.spawn(prefix_set=["actor_rollout"])["actor_rollout"]
        actor.init_model()
        trainer: Any = SimpleNamespace(config=config, actor_rollout_wg=actor)
        found = []
        for step in range(STEPS):
            batch = rollout(step)
            old, _ = RayPPOTrainer._compute_old_log_prob(trainer, batch)
            update = RayPPOTrainer._update_actor(trainer, batch.union(old)).meta_info["metrics"]
            ray.get(actor.update_weights(global_steps=step, mode="naive"))
            found.append(
                {
                    "log_probs": old.batch["old_log_probs"].double().sum().item(),
                    "workers": actor.report(),
                    "metrics": {name: np.ravel(values).tolist() for name, values in update.items()},
                }
            )
        actor.to("device")
        awake = actor.report()
        actor.to("cpu")
        for worker in group.workers:
            ray.kill(worker)
        return {"steps": found, "awake": awake}


if __name__ == "__main__":
    address, result = sys.argv[1:]
    spec = find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    with initialize_config_dir(str(Path(spec.origin).parent / "trainer" / "config"), version_base=None):
        ray_init = [f"+ray_kwargs.ray_init.address={address}", "ray_kwargs.ray_init.num_cpus=null"]
        config = compose("ppo_trainer", [*OVERRIDES, *ray_init, f"trainer.default_local_dir={result}"])
    run_ppo(config, task_runner_class=Runner)
