#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B with verl 0.9.1: Megatron trains on the routes of the rollout (R3), balanced by moe_rl.
# Usage: DATA=/data/gsm8k [NODES=2] examples/verl/run_qwen3_30b_a3b.sh [more overrides]
# Needs a GPU cluster; `moe-rl doctor --attach` of this file needs nothing.
set -eu

# All that balancing needs: verl loads moe_rl by itself. Look first; then MOE_RL=moe-rl.
export MOE_RL=observe
# Optional: record routes, which `moe-rl simulate` opens.
export MOE_RL_RECORD=${TRACES:-$PWD/traces}

REPLAY=(
    actor_rollout_ref.actor.megatron.router_replay.mode=R3
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True
)
# Optional, and independent of balancing: a loss and a rollout correction of moe_rl.importance. They change what is trained.
LOSS=(
    actor_rollout_ref.actor.policy_loss.loss_mode=moe_rl_gspo
    algorithm.rollout_correction.rollout_is=moe_rl_sequence
    actor_rollout_ref.rollout.calculate_log_probs=True
)
MODEL=(
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.strategy=megatron
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.param_offload=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=alltoall
    +actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion=False
)
TASK=(
    model_engine=megatron
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.max_prompt_length=1024
    data.max_response_length=4096
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
)

python3 -m verl.trainer.main_ppo "${TASK[@]}" "${MODEL[@]}" "${REPLAY[@]}" "${LOSS[@]}" trainer.nnodes="${NODES:-1}" "$@"
