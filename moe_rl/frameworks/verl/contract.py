"""verl's versions and symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import Framework, Symbol

ENGINE = "verl.workers.engine.megatron.transformer_impl"
ROLLOUT_CORRECTION = Symbol(
    name="verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_rejection_mask",
    parameters=(
        "old_log_prob",
        "rollout_log_prob",
        "response_mask",
        "rollout_is",
        "rollout_is_threshold",
        "rollout_is_batch_normalize",
        "rollout_rs",
        "rollout_rs_threshold",
    ),
)
FRAMEWORK = Framework(
    name="verl",
    summary="verl's Megatron engine, by MOE_RL=<policy>; RL with replayed routes.",
    distribution="verl",
    tested=("0.9.1",),
    symbols=(
        Symbol(name=f"{ENGINE}:get_forward_backward_func"),
        Symbol(name=f"{ENGINE}:MegatronEngine._build_optimizer", parameters=("self",)),
        Symbol(
            name=f"{ENGINE}:MegatronEngine.forward_backward_batch",
            parameters=("self", "data", "loss_function", "forward_only"),
        ),
        Symbol(name=f"{ENGINE}:MegatronEngine.to", parameters=("self", "device", "model", "optimizer", "grad")),
        Symbol(name=f"{ENGINE}:MegatronEngine.is_param_offload_enabled"),
        Symbol(name=f"{ENGINE}:MegatronEngine.is_optimizer_offload_enabled"),
        Symbol(name=f"{ENGINE}:get_device_name"),
        Symbol(name=f"{ENGINE}:MegatronEngine.get_per_tensor_param", parameters=("self",)),
        Symbol(name=f"{ENGINE}:MegatronEngine.get_per_tensor_param_shard", parameters=("self",)),
        Symbol(name=f"{ENGINE}:MegatronEngine.save_checkpoint", parameters=("self", "local_path")),
        Symbol(name=f"{ENGINE}:MegatronEngine.load_checkpoint", parameters=("self", "local_path")),
        Symbol(
            name="verl.models.mcore.util:preprocess_thd_engine",
            parameters=(
                "input_ids",
                "pre_process",
                "need_roll",
                "use_fp8_padding",
                "local_cp_size",
                "min_local_rows",
                "pad_to_length_bucket",
                "cp_layout",
            ),
        ),
        Symbol(
            name="verl.utils.megatron.router_replay_utils:build_r3_replay_mask",
            parameters=("input_ids", "response_mask"),
        ),
        Symbol(
            name="verl.utils.megatron.router_replay_utils:align_r3_router_replay_data",
            parameters=("layers_topk_idx", "input_ids"),
        ),
        Symbol(name="verl.utils.megatron.router_replay_utils:_context_parallel_layout", parameters=("tf_config",)),
        Symbol(name="verl.utils.tensordict_utils:get_non_tensor_data", parameters=("data", "key", "default")),
        Symbol(name="verl.trainer.constants_ppo:get_ppo_ray_runtime_env"),
    ),
    lines=(
        "pip install 'moe-rl[verl]'",
        "export MOE_RL=ultraep MOE_RL_REPLICA_SLOTS=1",
        "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
    ),
    facts=(
        "Replay: router_replay.mode R3 (with rollout.enable_rollout_routing_replay=True) or R2; without it no pass is "
        "planned.",
        "Packing: model.use_remove_padding must be True, since verl packs the routes that it replays.",
        "Rows without a route: padding, and under R3 the last token of a sequence and sequences without response; they "
        "take the live router.",
    ),
    beside=(
        Symbol(name="verl.trainer.ppo.core_algos:register_policy_loss", parameters=("name",)),
        ROLLOUT_CORRECTION,
    ),
)
