"""slime's versions and symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import Framework, symbols

FRAMEWORK = Framework(
    name="slime",
    summary="slime, by two --custom-megatron flags.",
    distribution="slime",
    tested=(),
    symbols=symbols(
        "slime.backends.megatron_utils.model:get_forward_backward_func",
        "slime.backends.megatron_utils.actor:reload_process_groups",
        "slime.utils.routing_replay:RoutingReplay.record(self, top_indices)",
    ),
    lines=(
        "export MOE_RL=moe-rl",
        "--custom-megatron-init-path moe_rl.frameworks.slime.attach.init",
        "--custom-megatron-before-train-step-hook-path moe_rl.frameworks.slime.attach.before_train_step",
    ),
    facts=(
        "Replay: --use-rollout-routing-replay or --use-routing-replay; without it no pass is planned.",
        "Rows without a route: slime gives them experts round robin and dispatches them, so plans count them.",
    ),
)
