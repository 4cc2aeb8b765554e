"""Transformers' versions and symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import Framework, symbols

TRANSFORMERS_EP = "transformers.distributed.expert_parallel"
FRAMEWORK = Framework(
    name="transformers",
    summary="Transformers' expert parallelism (FSDP2 + EP), and with it TRL.",
    distribution="transformers",
    tested=("5.23.0",),
    symbols=symbols(
        f"{TRANSFORMERS_EP}:AllToAllEP.__init__(self, experts, ep_mesh, tp_mesh)",
        f"{TRANSFORMERS_EP}:AllToAllEP.__call__(self, hidden_states, top_k_index, top_k_weights)",
        f"{TRANSFORMERS_EP}:EPImplementationInterface.register",
        f"{TRANSFORMERS_EP}:EpDispatchExpertsParallel.install_forward(self, module, ep_mesh)",
    ),
    lines=(
        "from moe_rl.frameworks.transformers.attach import attach",
        'DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="moe_rl")',
        "balancer = attach(model, BalancerConfig())",
    ),
    facts=(
        "Replay: on unless attach(replay=False); begin_pass(routes) starts it.",
        "Rows without a route: -1 in what begin_pass is given; they take the live router.",
        "experts_implementation: eager or grouped_mm; tp_size must be 1.",
    ),
)
