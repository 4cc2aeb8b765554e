"""DeepSpeed's versions and symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import Framework, symbols

AUTOEP = "deepspeed.module_inject.auto_ep_layer"
FRAMEWORK = Framework(
    name="deepspeed",
    summary="DeepSpeed AutoEP under ZeRO 0, 1 and 2; experts move under 1 and 2.",
    distribution="deepspeed",
    tested=("0.19.8",),
    symbols=symbols(
        f"{AUTOEP}:AutoEPMoELayer.forward(self, hidden_states)",
        f"{AUTOEP}:permute_by_local_expert(tokens, local_counts)",
        f"{AUTOEP}:compute_split_plan(selected_experts, num_experts, ep_size, num_local_experts, ep_group, "
        "num_tokens_per_expert)",
        "deepspeed.moe.ep_router:TokenChoiceTopKRouter.forward(self, x, expert_bias)",
        "deepspeed.moe.ep_experts:GroupedExperts.forward(self, x, num_tokens_per_expert)",
        "deepspeed.moe.ep_count:count_tokens_per_expert(selected_experts_indices, num_experts)",
        "deepspeed:DeepSpeedEngine.save_checkpoint(self, save_dir)",
        "deepspeed:DeepSpeedEngine.load_checkpoint(self, load_dir)",
        "deepspeed:DeepSpeedEngine.save_16bit_model(self, save_dir)",
        "deepspeed.utils.tensor_fragment:tensor_fragment(lp_fragment, lp_fragment_address, hp_fragment, "
        "hp_fragment_address)",
    ),
    lines=(
        "from moe_rl.frameworks.deepspeed.attach import attach  # before deepspeed.initialize",
        "balancer = attach(engine, BalancerConfig(reorders=True))",
    ),
    facts=(
        "Replay: on unless attach(replay=False); begin_pass(routes) starts it, for one gradient accumulation cycle.",
        "Rows without a route: -1 in what begin_pass is given; they take the live router.",
        "zero_optimization.stage 0, 1 or 2, autoep_size above 1, comm_backend comm; reorder needs stage 1 or 2.",
    ),
    traps="moe_rl.frameworks.deepspeed.traps:found",
)
