"""miles' symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import Framework, symbols
from moe_rl.frameworks.slime.contract import FRAMEWORK as SLIME

FRAMEWORK = Framework(
    name="miles",
    summary="miles, by two --custom-megatron flags.",
    distribution="miles",
    tested=(),
    symbols=symbols(
        "miles.backends.megatron_utils.model:get_forward_backward_func",
        "miles.backends.megatron_utils.actor:reload_process_groups",
        "miles.utils.replay_base:routing_replay_manager.stage",
    ),
    lines=tuple(line.replace("slime", "miles") for line in SLIME.lines),
    facts=(
        SLIME.facts[0],
        "Rows without a route: -1, where miles lets the live router choose; plans leave them out.",
    ),
)
