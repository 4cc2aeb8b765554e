"""Cases of test_verl.py: verl's real engine, plain and balanced by the adapter."""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import verl_on_cpu
from verl_on_cpu import batch, engine, impl, loss

import moe_rl
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement import ExpertPlacement
from moe_rl.integrations import Settings, balancer_config
from moe_rl.integrations import verl as adapter
from moe_rl.replay.merge import merge_recordings
from moe_rl.replay.reader import TraceReader

CONFIG = {"policy": "ultraep", "replica_slots": 1, "objective": "imbalance"}
STEPS = 5


def settings(**changes: Any) -> Settings:
    return Settings(balancer=balancer_config(CONFIG), **{"strict": True, **changes})


def losses(built: Any, batches: list[Any]) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """Loss of this rank and gradient norm of every step, and what of the adapter verl returned."""
    values: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    metrics = []
    for data in batches:
        with built.train_mode():
            output = built.train_batch(data, loss)
        found = dict(output["metrics"])
        values["loss"].append(sum(found["loss"]))
        values["grad_norm"].append(float(found["grad_norm"]))
        metrics.append({name: value for name, value in found.items() if name.startswith(("moe_rl/", "moe/"))})
    return values, metrics


def log_probs(built: Any, data: Any) -> Any:
    with built.eval_mode(), torch.no_grad():
        return built.infer_batch(data)["model_output"]


def both_ways(run: Callable[[Any], dict[str, Any]], **build: Any) -> dict[str, Any]:
    """What `run(engine)` returns for a plain engine, and for one that the adapter balances."""
    results = {}
    with verl_on_cpu.verl_on_cpu():
        plain = engine(**build)
        results["plain"] = run(plain)
        uninstall = adapter.install(impl, settings=settings())
        try:
            results["balanced"] = run(engine(**build))
        finally:
            uninstall()
    return results


def r3() -> dict[str, Any]:
    """Steps on replayed rollout routes; beside them plain verl with micro-batches of one sequence: other sums alone."""

    def run(built: Any, size: int = 2) -> dict[str, Any]:
        values, metrics = losses(built, [batch(step, micro_batch_size_per_gpu=size) for step in range(STEPS)])
        return {"curve": values, "metrics": metrics}

    results = both_ways(run)
    with verl_on_cpu.verl_on_cpu():
        results["yardstick"] = run(engine(), size=1)
    return results


def dynamic() -> dict[str, Any]:
    """Micro-batches by token budget, and a log-prob pass; an empty response replays nothing."""

    def run(built: Any) -> dict[str, Any]:
        data = batch(9, (9, 14, 7, 12, 5), use_dynamic_bsz=True, max_token_len_per_gpu=24)
        data["response_mask"][0] = 0
        before = log_probs(built, data)["log_probs"].values().double().sum().item()
        found = adapter._run_of(built)
        of_infer = found.last_metrics if found else {}
        values, metrics = losses(built, [data])
        return {"curve": values, "metrics": metrics, "infer": before, "infer_metrics": of_infer}

    return both_ways(run)


def every_row_replayed() -> dict[str, Any]:
    """R2: the log-prob pass records, the update replays, the last token too."""

    def run(built: Any) -> dict[str, Any]:
        recorded = log_probs(built, batch(0, routes=False))["routed_experts"]
        data = batch(0, routes=False)
        data["routed_experts"] = recorded
        values, metrics = losses(built, [data])
        return {"curve": values, "metrics": metrics, "rows": len(recorded.values())}

    return both_ways(run, mode="R2")


def live() -> dict[str, Any]:
    """A pass without routes is not planned."""

    def run(built: Any) -> dict[str, Any]:
        values, metrics = losses(built, [batch(0, routes=False, enable_routing_replay=False)])
        return {"curve": values, "metrics": metrics}

    return both_ways(run, mode="disabled")


def reordered_export() -> dict[str, Any]:
    """Experts that were moved are at home while verl exports weights and saves, and back afterwards."""
    with verl_on_cpu.verl_on_cpu():
        uninstall = adapter.install(impl, settings=settings())
        built = engine()
        balancer = adapter._run_of(built).balancer
        before = {name: value.clone() for name, value in built.module[0].named_parameters()}
        moved = balancer.megatron_placement.home_rank.copy()
        moved[:, [0, 4]] = moved[:, [4, 0]]
        target = ExpertPlacement.from_home_rank(moved, ep_size=2, spare_slots=balancer.placement.slots_per_rank - 4)
        balancer.reorder(target)

        def same() -> bool:
            return all(torch.equal(value, before[name]) for name, value in built.module[0].named_parameters())

        seen: dict[str, bool] = {"moved": not same()}

        def export(_: Any, models: Any) -> Any:
            for name, value in models[0].named_parameters():
                seen["export"] = same()
                yield name, value

        def save(**_: Any) -> None:
            seen["save"] = same()

        with patch.object(type(built.bridge), "export_weights", export):
            names = [name for name, _ in built.get_per_tensor_param()[0]]
        with patch.object(built.checkpoint_mananager, "save_checkpoint", save):
            built.save_checkpoint("nowhere")
        seen["back"] = not same()
        seen["all"] = names == list(before)
        uninstall()
    return seen


def recorded() -> dict[str, Any]:
    shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(shared)
    with verl_on_cpu.verl_on_cpu():
        uninstall = adapter.install(impl, settings=settings(record=Path(shared[0]) / "run"))
        built = engine()
        losses(built, [batch(0), batch(1)])
        adapter._run_of(built).detach()
        uninstall()
    path = Path(shared[0]) / "run" / f"dp{torch.distributed.get_rank():05d}.moetrace"
    trace = next(iter(TraceReader(path).parts(0)))
    same = []
    for index, ids in enumerate(batch(0)["routed_experts"].unbind()):
        start = int(trace.cu_seqlens[index])
        rows = trace.routed_experts[start : start + len(ids)]
        same.append(bool((np.sort(rows, axis=2) == np.sort(ids.numpy(), axis=2)).all()))
    simulated = []
    if torch.distributed.get_rank() == 0:
        merged = merge_recordings(Path(shared[0]) / "run", Path(shared[0]) / "run.moetrace").path
        report = moe_rl.simulate(
            str(merged), model="from-trace", hidden_size=32, moe_ffn_hidden_size=16, expert_model_parallel_size=2
        )
        simulated = list(report.plans)
    torch.distributed.barrier()
    return {"steps": list(TraceReader(path).steps), "same": same, "simulated": simulated}


def refused() -> dict[str, Any]:
    """One warning and an unbalanced run, or with MOE_RL_STRICT=1 an error, where EP is 1."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("moe_rl.integrations").addHandler(Handler(logging.WARNING))
    with verl_on_cpu.verl_on_cpu():
        uninstall = adapter.install(impl, settings=settings(strict=False))
        built = engine(ep_size=1)
        values, metrics = losses(built, [batch(0)])
        uninstall()
        uninstall = adapter.install(impl, settings=settings())
        try:
            engine(ep_size=1)
            error = ""
        except InvalidInputError as raised:
            error = str(raised)
        uninstall()
    return {"curve": values, "metrics": metrics, "warnings": lines, "error": error}


def contract() -> dict[str, Any]:
    return {"problems": adapter.VERL.problems(), "tested": adapter.VERL.version() in adapter.VERL.tested}
