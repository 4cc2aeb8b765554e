"""The report of a Countdown run, read from its folder."""

from pathlib import Path

from moe_rl.recipes.countdown_grpo.config import CountdownGrpoConfig
from moe_rl.recipes.countdown_grpo.metrics import read_metrics
from moe_rl.report.simulation import SimulationReport
from moe_rl.report.training import TrainingReport

TRACE_FOLDER = "trace.moetrace"


def training_report(
    config: CountdownGrpoConfig,
    *,
    projection: SimulationReport | None = None,
    projection_file: str = "",
    command: str = "",
) -> TrainingReport:
    """Return what the run of `config` measured; raises `InvalidInputError` where it has no finished step."""
    model, rollout, train = config.model, config.rollout, config.train
    balancer = config.balancer.policy if config.balancer.enabled else "off"
    return TrainingReport(
        title=f"{train.objective.upper()} on Countdown, {config.num_steps} steps",
        steps=read_metrics(Path(config.out)),
        setting={
            "model": f"Qwen3-MoE, {model.num_layers} layers, {model.num_experts} experts, top-{model.top_k}",
            "trainer": f"Megatron-Core, EP{config.world_size}, {train.precision}",
            "rollout": f"Hugging Face, {rollout.precision}, {rollout.problems_per_step} x {rollout.group_size} samples",
            "replay": train.replay,
            "balancer": balancer,
            "updates per rollout": train.num_mini_batches,
            "seed": config.seed,
        },
        projection=projection,
        projection_file=projection_file,
        command=command,
    )
