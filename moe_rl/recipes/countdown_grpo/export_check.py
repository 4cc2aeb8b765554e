"""Does the rollout engine compute with the exported weights what the trainer computes? Asked after every export.

T packed tokens of the probe, L MoE layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.importance import kl_estimate
from moe_rl.recipes.countdown_grpo.config import CountdownGrpoConfig
from moe_rl.recipes.countdown_grpo.old_policy import Metrics
from moe_rl.recipes.countdown_grpo.rollout_engine import RolloutEngine
from moe_rl.recipes.countdown_grpo.rollouts import Rollouts
from moe_rl.recipes.countdown_grpo.trainer import Trainer
from moe_rl.replay.hf_recorder import RecordedSequence, record_routing


class ExportError(RuntimeError):
    """The rollout engine and the trainer do not compute the same with the weights that were just exported."""


def check_export(trainer: Trainer, engine: RolloutEngine, rollouts: Rollouts, config: CountdownGrpoConfig) -> Metrics:
    """Compare trainer and rollout engine on a few sequences, the engine's routes replayed; a collective.

    Raises `ExportError` where the k3 divergence of any token exceeds the limit: float32 rounding stays far below it, an
    expert in another's place does not.
    """
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
    if not float(worst) <= config.checks.export_kl_limit:
        raise ExportError(
            f"after the export of policy {engine.policy_version} the rollout engine and the trainer differ on the same "
            f"tokens and routes: k3 divergence {float(worst):.2e} at the worst token, checks.export_kl_limit is "
            f"{config.checks.export_kl_limit:.0e}. A weight is wrong, or an expert stands in another's place."
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


def _recorded_routes(sequences: Sequence[RecordedSequence], probe: Rollouts) -> Tensor:
    """Return [T, L, K] uint8 of the recorded rows; zeros for the last token of a sequence, which was not run."""
    routes = torch.zeros_like(probe.routed_experts)
    for index, recorded in enumerate(sequences):
        start, stop = int(probe.cu_seqlens[index]), int(probe.cu_seqlens[index + 1])
        routes[start : stop - 1] = torch.from_numpy(recorded.routed_experts[: stop - start - 1])
    return routes
