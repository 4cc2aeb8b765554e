"""Case of test_context_parallel.py: sequences split over one group of 4 ranks and over two of 2."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.importance import (
    LOSS_AGG_MODES,
    OBJECTIVES,
    ROLLOUT_RS_OPTIONS,
    BatchTotals,
    ContextParallel,
    PolicyLossInputs,
    RouterShiftUse,
    apply_rollout_correction,
    context_parallel_of,
    importance_weights,
    off_policy_metrics,
    opsm_mask,
    policy_loss,
)
from moe_rl.importance.aggregate import agg_loss
from moe_rl.importance.rollout_config import RolloutCorrectionConfig

WORLD = 4
LENGTHS = (16, 8, 24, 8)
"""Tokens of each sequence, a multiple of twice the largest group; padded to 24."""
THRESHOLDS = {"k1": "0.7_1.4", "k2": 0.3, "k3": 0.3, "kl": 0.1}


def whole_batch(packed: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    rows, width = len(LENGTHS), max(LENGTHS)
    shape = (rows, width)
    old = -1.0 - torch.rand(shape, generator=generator, dtype=torch.float64)
    inside = torch.arange(width) < torch.tensor(LENGTHS).unsqueeze(1)
    tensors = {
        "log_prob": old + 0.05 * torch.randn(shape, generator=generator, dtype=torch.float64),
        "old_log_prob": old,
        "rollout_log_prob": old + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64),
        "advantages": 5 * torch.randn(rows, 1, generator=generator, dtype=torch.float64).repeat(1, width),
        "router_shift_ratio": 0.9 + 0.1 * torch.rand(shape, generator=generator, dtype=torch.float64),
        "policy_version": torch.randint(3, shape, generator=generator),
        "response_mask": inside & (torch.rand(shape, generator=generator) > 0.2),
    }
    tensors["response_mask"][3] = False  # a sequence without a valid token
    tensors["draw"] = torch.rand(shape, generator=generator)
    return {name: value[inside] for name, value in tensors.items()} if packed else tensors


def places(packed: bool, context: ContextParallel) -> Tensor:
    """Where this rank's tokens lie in the whole batch: columns, or packed tokens."""
    lengths = LENGTHS if packed else (max(LENGTHS),)
    parts, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(context.size * len(context.chunks))
        parts += [chunks[number] for number in context.chunks]
        start += length
    return torch.cat(parts)


def results(packed: bool, context: ContextParallel) -> dict[str, Tensor]:
    """What a rank computes: `share/` adds up over the group, `same/` is equal on all ranks, `token/` is its tokens'."""
    mine = places(packed, context)
    batch = {name: value[..., mine] for name, value in whole_batch(packed).items()}
    cu_seqlens = torch.tensor([0, *(n // context.size for n in LENGTHS)]).cumsum(0) if packed else None
    layout: dict[str, Any] = {"cu_seqlens": cu_seqlens, "context_parallel": context}
    mask = batch["response_mask"]
    totals = BatchTotals.from_mask(mask, loss_scale_factor=20.0, **layout)
    found = {"same/totals": torch.tensor([totals.batch_num_tokens, totals.global_batch_size])}

    for objective in OBJECTIVES.names:
        # After the clip, gamma only meets other tokens where the objective has a mean over the sequence.
        for order in ("before-clip", "after-clip")[: 1 if OBJECTIVES[objective].ratio_level == "token" else 2]:
            leaf = batch["log_prob"].clone().requires_grad_()
            inputs = PolicyLossInputs(**(batch | {"log_prob": leaf}), current_version=3, **layout)
            use = RouterShiftUse(order=order, center=order == "before-clip")
            output = policy_loss(inputs, objective=objective, router_shift=use)
            output.loss.backward()
            assert leaf.grad is not None
            found[f"share/loss/{objective}/{order}"] = output.loss.detach()
            found[f"token/grad/{objective}/{order}"] = leaf.grad
            for name, value in output.metrics.items():
                found[f"same/{objective}/{order}/{name}"] = value.double()
    for mode in LOSS_AGG_MODES:
        found[f"share/totals/{mode}"] = agg_loss(batch["log_prob"], mask, mode, totals=totals, **layout)
        if not (packed and mode.endswith("norm")):
            found[f"share/own/{mode}"] = agg_loss(batch["log_prob"], mask, mode, **layout)

    triple = (batch["old_log_prob"], batch["rollout_log_prob"], mask)
    for level in ("token", "sequence"):
        config = RolloutCorrectionConfig(
            rollout_is=level,
            rollout_is_batch_normalize=True,
            rollout_rs=",".join(ROLLOUT_RS_OPTIONS),
            rollout_rs_threshold=",".join(str(THRESHOLDS[name.split("_")[-1]]) for name in ROLLOUT_RS_OPTIONS),
            rollout_token_veto_threshold=0.5,
        )
        weights, kept, metrics = apply_rollout_correction(config, *triple, **layout)
        assert weights is not None
        found[f"token/{level}/weights"], found[f"token/{level}/kept"] = weights, kept.double()
        found |= {f"same/{level}/{name}": value.double() for name, value in metrics.items()}
    for level in ("sequence", "geometric"):
        found[f"token/importance/{level}"] = importance_weights(*triple, level=level, **layout).weights
    found["token/opsm"] = opsm_mask(
        batch["log_prob"], batch["old_log_prob"], batch["advantages"], mask, **layout
    ).double()
    found |= {f"same/off_policy/{k}": v.double() for k, v in off_policy_metrics(*triple, **layout).items()}
    return found


def groups(rank: int) -> dict[str, ContextParallel]:
    """The contexts of one rank; creating a group is a collective, so every rank makes all of them."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return {
        f"{size}/{split}": context_parallel_of(None if size == WORLD else pairs[rank // 2], split=split)
        for size in (2, WORLD)
        for split in ("contiguous", "zigzag")
    }


def split() -> dict[str, Any]:
    """Every result of this rank, contiguous and zigzag, padded and packed."""
    return {
        f"{name}/{'packed' if packed else 'padded'}/{key}": value.tolist()
        for name, context in groups(dist.get_rank()).items()
        for packed in (False, True)
        for key, value in results(packed, context).items()
    }
