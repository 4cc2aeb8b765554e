"""The frameworks that there are adapters for, and what each adapter relies on; loading this loads none of them."""

from moe_rl.core.registry import Registry
from moe_rl.integrations.contract import Framework, Symbol

VERL_ENGINE = "verl.workers.engine.megatron.transformer_impl"
VERL_ROLLOUT_CORRECTION = Symbol(
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
VERL = Framework(
    name="verl",
    summary="verl's Megatron engine, by MOE_RL=<policy>; RL with replayed routes.",
    distribution="verl",
    tested=("0.9.1",),
    symbols=(
        Symbol(name=f"{VERL_ENGINE}:get_forward_backward_func"),
        Symbol(name=f"{VERL_ENGINE}:MegatronEngine._build_optimizer", parameters=("self",)),
        Symbol(
            name=f"{VERL_ENGINE}:MegatronEngine.forward_backward_batch",
            parameters=("self", "data", "loss_function", "forward_only"),
        ),
        Symbol(name=f"{VERL_ENGINE}:MegatronEngine.to", parameters=("self", "device", "model", "optimizer", "grad")),
        Symbol(name=f"{VERL_ENGINE}:MegatronEngine.is_param_offload_enabled"),
        Symbol(name=f"{VERL_ENGINE}:MegatronEngine.is_optimizer_offload_enabled"),
        Symbol(name=f"{VERL_ENGINE}:get_device_name"),
        Symbol(name=f"{VERL_ENGINE}:MegatronEngine.get_per_tensor_param", parameters=("self",)),
        Symbol(name=f"{VERL_ENGINE}:MegatronEngine.get_per_tensor_param_shard", parameters=("self",)),
        Symbol(name=f"{VERL_ENGINE}:MegatronEngine.save_checkpoint", parameters=("self", "local_path")),
        Symbol(name=f"{VERL_ENGINE}:MegatronEngine.load_checkpoint", parameters=("self", "local_path")),
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
        VERL_ROLLOUT_CORRECTION,
    ),
)

TRANSFORMERS_EP = "transformers.distributed.expert_parallel"
TRANSFORMERS = Framework(
    name="transformers",
    summary="Transformers' expert parallelism (FSDP2 + EP), and with it TRL.",
    distribution="transformers",
    tested=("5.23.0",),
    symbols=(
        Symbol(name=f"{TRANSFORMERS_EP}:AllToAllEP.__init__", parameters=("self", "experts", "ep_mesh", "tp_mesh")),
        Symbol(
            name=f"{TRANSFORMERS_EP}:AllToAllEP.__call__",
            parameters=("self", "hidden_states", "top_k_index", "top_k_weights"),
        ),
        Symbol(name=f"{TRANSFORMERS_EP}:EPImplementationInterface.register"),
        Symbol(
            name=f"{TRANSFORMERS_EP}:EpDispatchExpertsParallel.install_forward",
            parameters=("self", "module", "ep_mesh"),
        ),
    ),
    lines=(
        "from moe_rl.integrations import transformers_ep",
        'DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="moe_rl")',
        'balancer = transformers_ep.attach(model, BalancerConfig(policy="ultraep"))',
    ),
    facts=(
        "Replay: on unless attach(replay=False); begin_pass(routes) starts it.",
        "Rows without a route: -1 in what begin_pass is given; they take the live router.",
        "experts_implementation: eager or grouped_mm; tp_size must be 1.",
    ),
)

_TRAINER = "trl:GRPOTrainer."
TRL = Framework(
    name="trl",
    summary="TRL's GRPOTrainer with routing replay, which it has not itself.",
    distribution="trl",
    tested=("1.16.0",),
    symbols=(
        Symbol(name=f"{_TRAINER}_generate_single_turn", parameters=("self",)),
        Symbol(name=f"{_TRAINER}_generate_and_score_completions", parameters=("self", "inputs")),
        Symbol(name=f"{_TRAINER}_prepare_inputs", parameters=("self", "generation_batch")),
        Symbol(name=f"{_TRAINER}training_step", parameters=("self", "model", "inputs")),
        Symbol(name=f"{_TRAINER}_log_metric"),
    ),
    lines=(
        "from moe_rl.integrations.trl import ReplayGRPOTrainer",
        "trainer = ReplayGRPOTrainer(model=model, reward_funcs=..., args=GRPOConfig(...), train_dataset=...)",
    ),
    facts=(
        "Replay: on, of what Transformers' generate chose; use_vllm must be False.",
        "Rows without a route: padding and the last token of a completion; they take the live router.",
    ),
)

AUTOEP = "deepspeed.module_inject.auto_ep_layer"
DEEPSPEED = Framework(
    name="deepspeed",
    summary="DeepSpeed AutoEP under ZeRO 0, 1 and 2; experts move under 1 and 2.",
    distribution="deepspeed",
    tested=("0.19.8",),
    symbols=(
        Symbol(name=f"{AUTOEP}:AutoEPMoELayer.forward", parameters=("self", "hidden_states")),
        Symbol(name=f"{AUTOEP}:permute_by_local_expert", parameters=("tokens", "local_counts")),
        Symbol(
            name=f"{AUTOEP}:compute_split_plan",
            parameters=(
                "selected_experts",
                "num_experts",
                "ep_size",
                "num_local_experts",
                "ep_group",
                "num_tokens_per_expert",
            ),
        ),
        Symbol(name="deepspeed.moe.ep_router:TokenChoiceTopKRouter.forward", parameters=("self", "x", "expert_bias")),
        Symbol(
            name="deepspeed.moe.ep_experts:GroupedExperts.forward", parameters=("self", "x", "num_tokens_per_expert")
        ),
        Symbol(
            name="deepspeed.moe.ep_count:count_tokens_per_expert",
            parameters=("selected_experts_indices", "num_experts"),
        ),
        Symbol(name="deepspeed:DeepSpeedEngine.save_checkpoint", parameters=("self", "save_dir")),
        Symbol(name="deepspeed:DeepSpeedEngine.load_checkpoint", parameters=("self", "load_dir")),
        Symbol(name="deepspeed:DeepSpeedEngine.save_16bit_model", parameters=("self", "save_dir")),
        Symbol(
            name="deepspeed.utils.tensor_fragment:tensor_fragment",
            parameters=("lp_fragment", "lp_fragment_address", "hp_fragment", "hp_fragment_address"),
        ),
    ),
    lines=(
        "from moe_rl.integrations import deepspeed as moe_rl_deepspeed  # before deepspeed.initialize",
        'balancer = moe_rl_deepspeed.attach(engine, BalancerConfig(policy="ultraep"))',
    ),
    facts=(
        "Replay: on unless attach(replay=False); begin_pass(routes) starts it, for one gradient accumulation cycle.",
        "Rows without a route: -1 in what begin_pass is given; they take the live router.",
        "zero_optimization.stage 0, 1 or 2, autoep_size above 1, comm_backend comm; reorder needs stage 1 or 2.",
    ),
    traps="moe_rl.integrations.deepspeed_traps:found",
)

SLIME = Framework(
    name="slime",
    summary="slime and miles, by two --custom-megatron flags.",
    distribution="slime",
    tested=(),
    symbols=(
        Symbol(name="slime.backends.megatron_utils.model:get_forward_backward_func"),
        Symbol(name="slime.utils.routing_replay:RoutingReplay.record", parameters=("self", "top_indices")),
    ),
    lines=(
        "export MOE_RL=ultraep",
        "--custom-megatron-init-path moe_rl.integrations.slime.init",
        "--custom-megatron-before-train-step-hook-path moe_rl.integrations.slime.before_train_step",
    ),
    facts=(
        "Replay: --use-rollout-routing-replay or --use-routing-replay; without it no pass is planned.",
        "Rows without a route: slime gives them experts round robin and dispatches them, so plans count them.",
    ),
)

_SCHEDULES = "megatron.core.pipeline_parallel.schedules:"
_SCHEDULE = ("forward_step_func", "data_iterator", "model", "num_microbatches")
MEGATRON = Framework(
    name="megatron",
    summary="Any loop around Megatron's schedule functions.",
    distribution="megatron-core",
    tested=("0.16.1",),
    symbols=tuple(
        Symbol(name=_SCHEDULES + name, parameters=_SCHEDULE)
        for name in (
            "forward_backward_no_pipelining",
            "forward_backward_pipelining_without_interleaving",
            "forward_backward_pipelining_with_interleaving",
        )
    ),
    lines=(
        "balancer = moe_rl.megatron.attach(model_chunks, optimizer, BalancerConfig(policy='ultraep'))",
        "run = moe_rl.integrations.forward_backward(get_forward_backward_func(), balancer, routes)",
    ),
    facts=(
        "Replay: the loop's own; the balancer needs the routes, and places rows that were routed otherwise at home.",
        "Rows without a route: -1 in what the provider returns.",
    ),
)

FRAMEWORKS: Registry[Framework] = Registry("adapter", [VERL, TRANSFORMERS, TRL, DEEPSPEED, SLIME, MEGATRON])
