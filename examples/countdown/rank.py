"""One process of a run: a rollout engine and a share of the trainer, step after step.

What a step does depends on the config, its number and the weights alone, so that a resumed run repeats it exactly.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from examples.countdown.checkpointing import last_checkpoint, save_checkpoint
from examples.countdown.config import CountdownGrpoConfig
from examples.countdown.export_check import check_export, probed_precision
from examples.countdown.huggingface import hugging_face_config
from examples.countdown.metrics import MetricsLog
from examples.countdown.old_policy import Metrics
from examples.countdown.problems import draw_problems
from examples.countdown.rollout_engine import RolloutEngine
from examples.countdown.rollouts import Rollouts
from examples.countdown.trainer import Trainer
from examples.countdown.warm_start import default_cache, warm_start
from moe_rl.megatron.on_cpu import cpu_megatron
from moe_rl.replay import TraceWriter

MODEL_NAME = "countdown-qwen3-moe"


def run_rank(config: CountdownGrpoConfig, folder: Path, *, rank: int, rendezvous: Path) -> None:
    """Run this rank from the folder's last checkpoint, or from the warm start, to the last step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        world_size=config.world_size,
        rank=rank,
        timeout=timedelta(seconds=config.rank_timeout_s),
    )
    with cpu_megatron():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=config.world_size, expert_tensor_parallel_size=1
        )
        _Run(config, folder, rank).go()
    dist.barrier()


class _Run:
    """What a rank holds between steps."""

    def __init__(self, config: CountdownGrpoConfig, folder: Path, rank: int) -> None:
        self._config, self._folder, self._rank = config, folder, rank
        spec = config.problems.spec()
        model_config = hugging_face_config(config.model, spec.vocabulary_size)
        weights = warm_start(model_config, spec, config.warm_start.settings(), config.seed, default_cache())
        self._trainer = Trainer(config, weights)
        engine_of = functools.partial(
            RolloutEngine,
            model_config,
            max_response_tokens=spec.max_response_tokens,
            format_reward=config.problems.format_reward,
        )
        self._engine = engine_of(precision=config.rollout.precision, beside_fp8=config.train.precision)
        # Exports are checked in float32: where the run's own engine computes in anything else, a twin is.
        probed = probed_precision(config)
        if (config.rollout.precision, config.train.precision) == (probed, "float32"):
            self._checked = self._engine
        else:
            self._checked = engine_of(precision=probed)
        checkpoint = last_checkpoint(folder / "checkpoints")
        self._done = 0
        if checkpoint is not None:
            self._trainer.load_state(checkpoint.load(rank))
            self._done = checkpoint.step
        self._engine.load(self._trainer.export(), policy_version=self._done)

    def go(self) -> None:
        """Run all steps that are left."""
        first, num_steps = self._done + 1, self._config.num_steps
        with contextlib.ExitStack() as stack:
            log = trace = None
            if self._rank == 0:
                log = stack.enter_context(
                    MetricsLog(self._folder, first_step=first if self._done else 0, num_steps=num_steps)
                )
                trace = stack.enter_context(self._trace_writer())
            if self._done == 0 and log is not None:
                log.write(0, self._evaluation())
            elif self._done == 0:
                self._evaluation()
            for step in range(first, num_steps + 1):
                metrics = self._step(step, trace)
                size = log.write(step, metrics) if log is not None else 0
                if step % self._config.checkpoint_every == 0 or step == num_steps:
                    self._save(step, size)

    def _step(self, step: int, trace: TraceWriter | None) -> Metrics:
        started = time.perf_counter()
        rollouts = self._rollouts(step)
        if trace is not None:
            trace.append(rollouts.trace(model=MODEL_NAME, step=step))
        rolled_out = time.perf_counter()
        metrics = _rollout_metrics(rollouts) | self._trainer.step(rollouts, step)
        trained = time.perf_counter()
        weights = self._trainer.export()
        for engine in {id(each): each for each in (self._engine, self._checked)}.values():
            engine.load(weights, policy_version=step)
        metrics |= check_export(self._trainer, self._checked, rollouts, self._config)
        exported = time.perf_counter()
        if step % self._config.evaluation.every == 0 or step == self._config.num_steps:
            metrics |= self._evaluation()
        metrics["time/rollout_s"], metrics["time/export_s"] = rolled_out - started, exported - trained
        metrics["time/step_s"] = time.perf_counter() - started
        return metrics

    def _rollouts(self, step: int) -> Rollouts:
        """Return the rollouts of a step, on all ranks; every rank samples its share of the problems."""
        config = self._config
        per_step = config.rollout.problems_per_step
        share = per_step // config.world_size
        # The supervised start has seen the first problems.
        first = config.warm_start.num_updates * config.warm_start.batch_problems + (step - 1) * per_step
        ids = range(first + self._rank * share, first + (self._rank + 1) * share)
        mine = self._engine.generate(
            draw_problems(config.problems.spec(), "train", config.seed, ids),
            config.rollout.group_size,
            config.rollout.temperature,
            config.seed,
        )
        everyone: list[Any] = [None] * config.world_size
        dist.all_gather_object(everyone, mine.state())
        return Rollouts.concatenate([Rollouts(**state) for state in everyone])

    def _evaluation(self) -> Metrics:
        """Return the accuracy on held-out problems, sampled as in training and greedy; a collective of all ranks."""
        config, section = self._config, self._config.evaluation
        ids = range(self._rank, section.num_problems, config.world_size)
        problems = draw_problems(config.problems.spec(), "held-out", config.seed, ids)
        sampled = self._engine.generate(problems, section.group_size, config.rollout.temperature, config.seed)
        greedy = sum(self._engine.solves_greedily(problems))
        solved = torch.tensor([int((sampled.rewards == 1).sum()), greedy])
        dist.all_reduce(solved)
        return {
            "evaluation/accuracy": float(solved[0]) / (section.num_problems * section.group_size),
            "evaluation/greedy_accuracy": float(solved[1]) / section.num_problems,
        }

    def _save(self, step: int, metrics_bytes: int) -> None:
        save_checkpoint(
            self._folder / "checkpoints",
            step=step,
            rank=self._rank,
            state=self._trainer.state(),
            metrics_bytes=metrics_bytes,
            barrier=dist.barrier,
        )

    @contextlib.contextmanager
    def _trace_writer(self) -> Iterator[TraceWriter]:
        config = self._config
        path = self._folder / "trace.moetrace"
        origin: dict[str, str | int | float | bool] = {"recipe": "examples.countdown", "seed": config.seed}
        with TraceWriter(
            path,
            num_experts=config.model.num_experts,
            moe_layer_ids=range(config.model.num_layers),
            top_k=config.model.top_k,
            model=MODEL_NAME,
            provenance="R3",
            append=path.exists(),
            origin=None if path.exists() else origin,
        ) as writer:
            yield writer


def _rollout_metrics(rollouts: Rollouts) -> Metrics:
    return {
        "reward/mean": float(rollouts.rewards.mean()),
        "reward/solved": float((rollouts.rewards == 1).float().mean()),
        "rollout/response_tokens": float(rollouts.response_mask.sum()) / rollouts.num_sequences,
        "rollout/tokens": float(len(rollouts.tokens)),
    }
