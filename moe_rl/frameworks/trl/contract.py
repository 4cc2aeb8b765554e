"""TRL's versions and symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import Framework, symbols

_TRAINER = "trl:GRPOTrainer."
FRAMEWORK = Framework(
    name="trl",
    summary="TRL's GRPOTrainer with routing replay, which it has not itself.",
    distribution="trl",
    tested=("1.16.0",),
    symbols=symbols(
        f"{_TRAINER}_generate_single_turn(self)",
        f"{_TRAINER}_generate_and_score_completions(self, inputs)",
        f"{_TRAINER}_prepare_inputs(self, generation_batch)",
        f"{_TRAINER}training_step(self, model, inputs)",
        f"{_TRAINER}_log_metric",
    ),
    lines=(
        "from moe_rl.frameworks.trl.attach import ReplayGRPOTrainer",
        "trainer = ReplayGRPOTrainer(model=model, reward_funcs=..., args=GRPOConfig(...), train_dataset=...)",
    ),
    facts=(
        "Replay: on, of what Transformers' generate chose; use_vllm must be False.",
        "Rows without a route: padding and the last token of a completion; they take the live router.",
    ),
)
