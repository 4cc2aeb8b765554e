"""Does the rollout engine compute with the exported weights what the trainer computes? Asked after every export.

Both sides are asked in float32, whatever precision they roll out and train in: the rounding of bfloat16 hides a wrong
expert, float32 does not. Experts that the trainer multiplies in FP8 are in FP8 on both sides.

T packed tokens of the probe, L MoE layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from examples.countdown.config import CountdownGrpoConfig
from examples.countdown.old_policy import Metrics
from examples.countdown.rollout_engine import Precision, RolloutEngine
from examples.countdown.rollouts import Rollouts
from examples.countdown.trainer import Trainer
from moe_rl.importance import kl_estimate
from moe_rl.replay.hf_recorder import RoutedSequence, record_routing

FLOAT32_LIMIT, FP8_LIMIT = 1e-6, 1e-4


def probed_precision(config: CountdownGrpoConfig) -> Precision:
    """Return the precision of the engine that computes what `Trainer.probe` does, but for float32 rounding."""
    recipe = config.balancer.recipe
    return "float32" if recipe == "bf16" else recipe


def default_limit(config: CountdownGrpoConfig) -> float:
    """Return the k3 divergence of one token that an export may have where `checks.export_kl_limit` is None.

    k3 is d^2 / 2 for log-probabilities that differ by a small d. Measured at the worst token: right exports 6e-8, which
    is float32's own rounding; two swapped experts 4e-3 to 4e-2 (2 layers, 8 experts, 8 and 16 sequences;
    tests/countdown/countdown_cases.py). FP8 experts get 1e-4 (d = 0.014): where float32 rounding moves an activation
    across the border of two codes, which are 1/16 of it apart, a log-probability moved by up to 3e-3 (k3 5e-6) in the
    runs of benchmarks/countdown_study.py. No limit would do in bfloat16: there single tokens moved by up to 0.2, and
    with FP8 experts by 0.6, as far as with two swapped experts.
    """
    return FLOAT32_LIMIT if probed_precision(config) == "float32" else FP8_LIMIT


class ExportError(RuntimeError):
    """The rollout engine and the trainer do not compute the same with the weights that were just exported."""


def check_export(trainer: Trainer, engine: RolloutEngine, rollouts: Rollouts, config: CountdownGrpoConfig) -> Metrics:
    """Compare trainer and an engine of `probed_precision` on a few sequences, its routes replayed; a collective.

    Raises `ExportError` where the k3 divergence of any token exceeds the limit: rounding stays far below it, an expert
    in another's place does not.
    """
    limit = config.checks.export_kl_limit or default_limit(config)
    count = min(config.checks.num_probe_sequences * config.world_size, rollouts.num_sequences)
    spread = torch.arange(count) * rollouts.num_sequences // count  # over the problems: they use other experts
    probe = rollouts.select(spread)
    with record_routing(engine.model) as recorder:
        theirs = engine.logprobs(probe)
    probe = replace(probe, routed_experts=_recorded_routes(recorder.sequences(), probe))
    ours = trainer.probe(probe)
    k3 = kl_estimate(theirs, ours, "k3")[probe.response_mask]
    worst = k3.max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if not float(worst) <= limit:
        raise ExportError(
            f"after the export of policy {engine.policy_version} the rollout engine and the trainer differ on the same "
            f"tokens and routes: k3 divergence {float(worst):.2e} at the worst token, the limit is {limit:.0e} "
            f"(checks.export_kl_limit). A weight is wrong, or an expert stands in another's place."
        )
    return {
        "export/max_token_k3": float(worst),
        "export/k3_kl": float(k3.mean()),
        "export/probed_experts": _share_of_experts(probe),
    }


def _share_of_experts(probe: Rollouts) -> float:
    """Return the share of all layers' experts that some token of the probe was routed to: those that were checked."""
    used = torch.zeros(probe.routed_experts.shape[1], probe.num_experts, dtype=torch.bool)
    for layer, of_layer in enumerate(used):
        of_layer[probe.routed_experts[probe.routed, layer].long()] = True
    return float(used.float().mean())


def _recorded_routes(sequences: Sequence[RoutedSequence], probe: Rollouts) -> Tensor:
    """Return [T, L, K] uint8 of the recorded rows; zeros for the last token of a sequence, which was not run."""
    routes = torch.zeros_like(probe.routed_experts)
    for index, recorded in enumerate(sequences):
        start, stop = int(probe.cu_seqlens[index]), int(probe.cu_seqlens[index + 1])
        routes[start : stop - 1] = torch.from_numpy(recorded.routed_experts[: stop - start - 1])
    return routes
