"""Megatron's versions and symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import Framework, Symbol

_SCHEDULES = "megatron.core.pipeline_parallel.schedules:"
_SCHEDULE = ("forward_step_func", "data_iterator", "model", "num_microbatches")
FRAMEWORK = Framework(
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
        "balancer = moe_rl.megatron.attach(model_chunks, optimizer, BalancerConfig())",
        "run = moe_rl.frameworks.forward_backward(get_forward_backward_func(), balancer, routes)",
    ),
    facts=(
        "Replay: the loop's own; the balancer needs the routes, and places rows that were routed otherwise at home.",
        "Rows without a route: -1 in what the provider returns.",
    ),
)
