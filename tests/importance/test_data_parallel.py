"""Sums over data-parallel ranks equal one process: real gloo collectives in two spawned processes."""

import multiprocessing
import queue
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_rl.importance import (
    LOSS_AGG_MODES,
    OBJECTIVES,
    BatchTotals,
    PolicyLossInputs,
    RouterShiftAccumulator,
    all_reduce_sum,
    policy_loss,
    reliability_mixture_weights,
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
    found["rows/mixture"], _ = reliability_mixture_weights(*triple, sum_over_ranks=sum_over_ranks)
    return found


def router_gamma(layers: range, sum_over_ranks: Any) -> torch.Tensor:
    """Gamma of five tokens, from the layers of one pipeline stage."""
    generator = torch.Generator().manual_seed(9)
    new, old = torch.randn((2, 4, 5, 2), generator=generator)
    accumulator = RouterShiftAccumulator(5)
    for layer in layers:
        accumulator.add_layer(new[layer], old[layer])
    return accumulator.finish(floor=0.1, sum_over_ranks=sum_over_ranks).ratio


def worker(rank: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
        )
        reducer = all_reduce_sum()
        found = {f"sum/{k}": v for k, v in results(ROWS[rank], reducer, 1).items()}
        found |= {f"mean/{k}": v for k, v in results(ROWS[rank], reducer, WORLD).items()}
        found["gamma"] = router_gamma(range(rank, 4, WORLD), reducer)
        dist.destroy_process_group()
        answers.put((rank, {name: value.numpy() for name, value in found.items()}))
    except BaseException:
        answers.put((rank, traceback.format_exc()))


def collect(store: Path) -> list[dict[str, torch.Tensor]]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=worker, args=(rank, str(store), answers)) for rank in range(WORLD)]
    try:
        for process in processes:
            process.start()
        got = dict(answers.get(timeout=90) for _ in range(WORLD))
    except queue.Empty:
        pytest.fail("a rank did not answer within 90 seconds")
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    for rank in range(WORLD):
        assert not isinstance(got[rank], str), got[rank]
    return [{k: torch.from_numpy(v) for k, v in got[rank].items()} for rank in range(WORLD)]


@pytest.mark.multi_rank
def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    assert set(OBJECTIVES_UNDER_TEST) <= set(OBJECTIVES.names)
    ranks = collect(tmp_path / "store")
    alone = results(slice(None), None, 1)
    for name, expected in alone.items():
        for reduction in ("sum", "mean"):
            parts = [rank[f"{reduction}/{name}"] for rank in ranks]
            if name.startswith("rows/"):
                whole = torch.cat(parts)
                scale = WORLD if reduction == "mean" and "/grad/" in name else 1  # the framework averages gradients
                torch.testing.assert_close(whole / scale, expected, rtol=1e-12, atol=1e-14)
            else:
                total = torch.stack(parts).sum(0) / (WORLD if reduction == "mean" else 1)
                torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)
    gamma = router_gamma(range(4), None)
    for rank in ranks:
        torch.testing.assert_close(rank["gamma"], gamma)
