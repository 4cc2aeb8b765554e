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
        "Replay: with --use-rollout-routing-replay or --use-routing-replay routes are known exactly; without them an "
        "update is planned from what the routers chose for the same tokens in the log-prob pass.",
        "Rows without a route: slime gives them experts round robin and dispatches them, so plans count them.",
    ),
)
