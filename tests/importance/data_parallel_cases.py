"""Case of test_data_parallel.py: a batch whose rows two data-parallel ranks share."""

from typing import Any

import torch
import torch.distributed as dist

from moe_rl.importance import (
    LOSS_AGG_MODES,
    BatchTotals,
    PolicyLossInputs,
    RouterShiftAccumulator,
    all_reduce_sum,
    policy_loss,
    rollout_correction,
)

WORLD = 2
LENGTHS = [5, 2, 4, 1, 3, 0]
ROWS = {0: slice(0, 2), 1: slice(2, 6)}
OBJECTIVES_UNDER_TEST = ("ppo", "gspo", "gmpo", "ctpo", "decoupled_ppo")


def whole_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (len(LENGTHS), max(LENGTHS))
    old = -1.0 - torch.rand(shape, generator=generator, dtype=torch.float64)
    noise = 0.4 * torch.randn((2, *shape), generator=generator, dtype=torch.float64)
    advantage = torch.randn(len(LENGTHS), 1, generator=generator, dtype=torch.float64)
    return {
        "log_prob": old + noise[0],
        "old_log_prob": old,
        "rollout_log_prob": old + noise[1],
        "advantages": advantage.expand(shape),
        "response_mask": torch.arange(shape[1]).unsqueeze(0) < torch.tensor(LENGTHS).reshape(-1, 1),
    }


def results(rows: slice, sum_over_ranks: Any, dp_size: int) -> dict[str, torch.Tensor]:
    """Losses, gradients and weights of one rank's rows, under the totals of all ranks."""
    batch = {name: value[rows] for name, value in whole_batch().items()}
    totals = BatchTotals.from_mask(
        batch["response_mask"], sum_over_ranks=sum_over_ranks, dp_size=dp_size, loss_scale_factor=5.0
    )
    found: dict[str, torch.Tensor] = {}
    for objective in OBJECTIVES_UNDER_TEST:
        for mode in LOSS_AGG_MODES:
            log_prob = batch["log_prob"].clone().requires_grad_()
            inputs = PolicyLossInputs(**(batch | {"log_prob": log_prob}))
            loss = policy_loss(inputs, objective=objective, loss_agg_mode=mode, totals=totals).loss
            loss.backward()
            assert log_prob.grad is not None
            found[f"loss/{objective}/{mode}"] = loss.detach()
            found[f"rows/grad/{objective}/{mode}"] = log_prob.grad
    triple = (batch["old_log_prob"], batch["rollout_log_prob"], batch["response_mask"])
    for level in ("token", "sequence"):
        weights, _, _ = rollout_correction(*triple, level, 2.0, True, sum_over_ranks=sum_over_ranks)
        assert weights is not None
        found[f"rows/weights/{level}"] = weights
    return found


def router_gamma(layers: range, sum_over_ranks: Any) -> torch.Tensor:
    """Gamma of five tokens, from the layers of one pipeline stage."""
    generator = torch.Generator().manual_seed(9)
    new, old = torch.randn((2, 4, 5, 2), generator=generator)
    accumulator = RouterShiftAccumulator(5)
    for layer in layers:
        accumulator.add_layer(new[layer], old[layer])
    return accumulator.finish(floor=0.1, sum_over_ranks=sum_over_ranks).ratio


def shared_rows() -> dict[str, Any]:
    """Results of this rank's rows, summed and averaged over ranks."""
    rank, reducer = dist.get_rank(), all_reduce_sum()
    found = {f"sum/{k}": v for k, v in results(ROWS[rank], reducer, 1).items()}
    found |= {f"mean/{k}": v for k, v in results(ROWS[rank], reducer, WORLD).items()}
    found["gamma"] = router_gamma(range(rank, 4, WORLD), reducer)
    return {name: value.tolist() for name, value in found.items()}
