"""verl's versions and symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import Framework, symbols

ENGINE = "verl.workers.engine.megatron.transformer_impl"
(ROLLOUT_CORRECTION,) = symbols(
    "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_rejection_mask(old_log_prob, "
    "rollout_log_prob, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, "
    "rollout_rs_threshold)"
)
FRAMEWORK = Framework(
    name="verl",
    summary="verl's Megatron engine, by MOE_RL=<policy>; RL, with router replay or without.",
    distribution="verl",
    tested=("0.9.1",),
    symbols=symbols(
        f"{ENGINE}:get_forward_backward_func",
        f"{ENGINE}:MegatronEngine._build_optimizer(self)",
        f"{ENGINE}:MegatronEngine.forward_backward_batch(self, data, loss_function, forward_only)",
        f"{ENGINE}:MegatronEngine.to(self, device, model, optimizer, grad)",
        f"{ENGINE}:MegatronEngine.is_param_offload_enabled",
        f"{ENGINE}:MegatronEngine.is_optimizer_offload_enabled",
        f"{ENGINE}:get_device_name",
        f"{ENGINE}:MegatronEngine.get_per_tensor_param(self)",
        f"{ENGINE}:MegatronEngine.get_per_tensor_param_shard(self)",
        f"{ENGINE}:MegatronEngine.save_checkpoint(self, local_path)",
        f"{ENGINE}:MegatronEngine.load_checkpoint(self, local_path)",
        "verl.models.mcore.util:preprocess_thd_engine(input_ids, pre_process, need_roll, use_fp8_padding, "
        "local_cp_size, min_local_rows, pad_to_length_bucket, cp_layout)",
        "verl.utils.megatron.router_replay_utils:build_r3_replay_mask(input_ids, response_mask)",
        "verl.utils.megatron.router_replay_utils:align_r3_router_replay_data(layers_topk_idx, input_ids)",
        "verl.utils.megatron.router_replay_utils:_context_parallel_layout(tf_config)",
        "verl.utils.tensordict_utils:get_non_tensor_data(data, key, default)",
        "verl.trainer.constants_ppo:get_ppo_ray_runtime_env",
    ),
    lines=(
        "pip install 'moe-rl[verl]'",
        "export MOE_RL=moe-rl",
    ),
    facts=(
        "Replay: under router_replay.mode R3 or R2 routes are known exactly; without it an update is planned from what "
        "the routers chose for the same tokens in the log-prob pass.",
        "Packing: model.use_remove_padding must be True, since verl packs the routes that it replays.",
        "Rows without a route: padding, and under R3 the last token of a sequence and sequences without response; they "
        "take the live router.",
    ),
    beside=(*symbols("verl.trainer.ppo.core_algos:register_policy_loss(name)"), ROLLOUT_CORRECTION),
)
