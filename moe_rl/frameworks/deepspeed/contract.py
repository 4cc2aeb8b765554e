"""DeepSpeed's versions and symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import Framework, Symbol

AUTOEP = "deepspeed.module_inject.auto_ep_layer"
FRAMEWORK = Framework(
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
        "from moe_rl.frameworks.deepspeed.attach import attach  # before deepspeed.initialize",
        'balancer = attach(engine, BalancerConfig(policy="ultraep"))',
    ),
    facts=(
        "Replay: on unless attach(replay=False); begin_pass(routes) starts it, for one gradient accumulation cycle.",
        "Rows without a route: -1 in what begin_pass is given; they take the live router.",
        "zero_optimization.stage 0, 1 or 2, autoep_size above 1, comm_backend comm; reorder needs stage 1 or 2.",
    ),
    traps="moe_rl.frameworks.deepspeed.traps:found",
)
