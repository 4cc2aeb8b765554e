"""What the adapter relies on in tinyrl, and what a user writes."""

from moe_rl.frameworks import Framework, Symbol

FRAMEWORK = Framework(
    name="tinyrl",
    summary="tinyrl, by two lines.",
    distribution="tinyrl",
    tested=("0.3.0",),
    symbols=(
        Symbol(name="tinyrl:Trainer.run_micro_batches", parameters=("self", "micro_batches")),
        Symbol(name="tinyrl:Trainer.save", parameters=("self", "folder")),
        Symbol(name="tinyrl:Trainer.load", parameters=("self", "folder")),
        Symbol(name="tinyrl:Trainer.publish", parameters=("self", "send")),
    ),
    lines=("from tinyrl_moe_rl.attach import attach", "balancer = attach(trainer, BalancerConfig(reorders=True))"),
    facts=(
        "Replay: tinyrl replays `picked_experts` in scoring and updates, and nothing in validation.",
        "Tokens without a route: the last token of an episode and padding, which get experts 0 .. K-1.",
    ),
)
