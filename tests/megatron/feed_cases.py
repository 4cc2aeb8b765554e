"""Cases of test_feed.py: where routes and plans come from, and split sizes that the host knows."""

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from recorder_cases import live, of_different_sizes
from replica_cases import occurring

from moe_rl.balancing.loads import count_routes
from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.plan_file import load_plan
from moe_rl.megatron import (
    Balancer,
    BalancerConfig,
    RowSlice,
    attach,
    cluster_topology,
    padded_rows,
    plan_from_local,
    plan_from_schedule,
)

CONFIG = BalancerConfig(objective="imbalance")
Routes = list[torch.Tensor]


def attached(**settings: Any) -> tuple[tiny_gpt.Run, Balancer]:
    run = tiny_gpt.build()
    return run, attach(run.models, run.optimizer, BalancerConfig(objective="imbalance", **settings))


def held(routes: Routes) -> Routes:
    return [tiny_gpt.held_rows(each) for each in routes]


def a_step_of_several_passes() -> dict[str, Any]:
    """Log-probabilities of a batch, then two updates of half of it each, every pass with a plan of its own."""
    curves: dict[str, Any] = {}
    metrics: list[dict[str, float]] = []
    with tiny_gpt.parallel(2):
        for name in ("plain", "balanced"):
            run = tiny_gpt.build()
            balancer = attach(run.models, run.optimizer, CONFIG) if name == "balanced" else None
            curve = tiny_gpt.history()
            for step in range(2):
                batch = [*of_different_sizes(step), *occurring(step + 10)]
                passes = [(batch, True), (batch[:3], False), (batch[3:], False)]
                for routes, forward_only in passes:
                    if balancer is not None:
                        balancer.begin_pass(PassSource.replayed(routes), forward_only=forward_only)
                    if forward_only:
                        curve["loss"].append(tiny_gpt.forward_backward(run, step, routes, forward_only=True))
                        curve["grad_norm"].append(1.0)
                    else:
                        tiny_gpt.update(run, step, routes, curve)
                    if balancer is not None:
                        metrics.append(balancer.end_pass().as_dict())
            curves[name] = curve
    return {**curves, "metrics": metrics}


def replayed() -> dict[str, Any]:
    """What RouterReplay holds after a log-prob pass is what the update is planned from."""
    with tiny_gpt.parallel(2, pipeline=2):
        run, balancer = attached()
        try:
            balancer.replayed_routes()
            empty = ""
        except InvalidInputError as error:
            empty = str(error)
        balancer.begin_pass(PassSource.replayed(occurring(0)), forward_only=True)
        tiny_gpt.forward_backward(run, 0, occurring(0), forward_only=True)
        balancer.end_pass()
        routes = balancer.replayed_routes()
        mine = [state.layer for state in balancer._states]
        equal = all(
            np.array_equal(found[:, mine], given.numpy()[:, mine]) and (np.delete(found, mine, axis=1) == -1).all()
            for found, given in zip(routes, occurring(0), strict=True)
        )
        balancer.begin_pass(PassSource.replayed(routes))
        tiny_gpt.update(run, 0, occurring(0), tiny_gpt.history())
        metrics = balancer.end_pass().as_dict()
    return {"empty": empty, "equal": equal, "metrics": metrics}


def forecast() -> dict[str, Any]:
    """Live routing, planned from the pass before; the third pass has other tokens and another number of them."""
    with tiny_gpt.parallel(2), patch.object(tiny_gpt, "replay", live):
        plain_run, (run, balancer) = tiny_gpt.build(), attached()
        plain, curve, metrics = tiny_gpt.history(), tiny_gpt.history(), []
        for step in (0, 0, 5):
            routes = occurring(step, count=2 if step else 3)
            tiny_gpt.update(plain_run, step, routes, plain)
            balancer.begin_pass(PassSource.unknown(len(routes)))
            tiny_gpt.update(run, step, routes, curve)
            metrics.append(balancer.end_pass().as_dict())
    return {"plain": plain, "forecast": curve, "metrics": metrics}


def driver_and_worker() -> dict[str, Any]:
    """One plan three ways: by the balancer, from local counts, and by a driver that holds all sequences; in a file."""
    with tiny_gpt.parallel(2):
        run, balancer = attached()
        routes = occurring(0)
        by_balancer = balancer.plan(routes)
        counts, _ = count_routes(routes, num_layers=tiny_gpt.NUM_LAYERS, num_experts=tiny_gpt.NUM_EXPERTS)
        group = parallel_state.get_expert_model_parallel_group()
        expert_dp = parallel_state.get_expert_data_parallel_group()
        local = plan_from_local(counts, group, expert_dp_group=expert_dp, config=balancer.config, model=balancer.model)

        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [r.numpy() for r in routes])
        samples, schedule = [], []
        for of_rank in everyone:
            cells = []
            for rows in of_rank:
                sequences = rows.reshape(-1, tiny_gpt.BATCH, *rows.shape[1:]).swapaxes(0, 1)
                cells.append(list(range(len(samples), len(samples) + tiny_gpt.BATCH)))
                samples += list(sequences)
            schedule.append(cells)
        driver = plan_from_schedule(
            samples,
            schedule,
            config=balancer.config,
            model=balancer.model,
            topology=cluster_topology(balancer.config, ep_size=2),
        )
        # Back from the sequences to the rows of this rank.
        mine = [np.stack([samples[index] for index in cell]) for cell in schedule[dist.get_rank()]]
        same_rows = all(
            np.array_equal(padded_rows(ids, row_slice=RowSlice.current()), given.numpy())
            for ids, given in zip(mine, routes, strict=True)
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.npz"
            driver.save(path)
            driver = load_plan(path)
        balancer.begin_pass(PassSource.given(driver, routes))
        tiny_gpt.update(run, 0, routes, tiny_gpt.history())
        metrics = balancer.end_pass().as_dict()
        balancer.begin_pass(PassSource.given(driver))
        tiny_gpt.update(run, 0, routes, tiny_gpt.history())
        unknown = balancer.end_pass().as_dict()
        balancer.begin_pass(PassSource.given(driver, routes[:2]))
        tiny_gpt.update(run, 0, routes[:2], tiny_gpt.history())
        shorter = balancer.end_pass()
    return {
        "local": local.hash == by_balancer.hash,
        "driver": [
            np.array_equal(getattr(driver.replicas, name), getattr(by_balancer.replicas, name))
            for name in ("offsets", "expert", "physical_id", "source_quota")
        ],
        "same_rows": same_rows,
        "metrics": metrics,
        "shorter": [shorter.misfit.sentence, shorter.replicas, shorter.pushed_bytes],
        "unknown": sorted(set(metrics) - set(unknown)),
    }
