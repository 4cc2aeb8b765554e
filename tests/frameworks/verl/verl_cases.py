"""Cases of test_verl.py: verl's real engine, plain and balanced by the adapter."""

import logging
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import drawn
import numpy as np
import pytest
import torch
import verl_on_cpu
from lora_cases import adapted
from megatron.core import parallel_state
from plan_path_cases import SLOW, copies_sent
from verl.utils import tensordict_utils
from verl.utils.tensordict_utils import assign_non_tensor, index_select_tensor_dict
from verl_on_cpu import TOP_K, batch, engine, impl, loss

import moe_rl
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.route_forecast import RouteForecast
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement import ExpertPlacement
from moe_rl.frameworks import Settings, balancer_config
from moe_rl.frameworks.run_settings import settings_from_environment
from moe_rl.frameworks.verl import attach as adapter
from moe_rl.frameworks.verl import micro_batches as micro_batches_of_verl
from moe_rl.frameworks.verl.contract import FRAMEWORK
from moe_rl.replay import TraceReader
from moe_rl.replay.merge import merge_recordings

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
        ours = {name: values for name, values in found.items() if name.startswith(("moe_rl/", "moe/"))}
        metrics.append({name: value for name, (value,) in ours.items()})
    return values, metrics


def log_probs(built: Any, data: Any) -> Any:
    with built.eval_mode(), torch.no_grad():
        return built.infer_batch(data).get("model_output")  # of the last pipeline stage


def both_ways(run: Callable[[Any], dict[str, Any]], given: Settings | None = None, **build: Any) -> dict[str, Any]:
    """What `run(engine)` returns for a plain engine, and for one that the adapter balances."""
    results = {}
    with verl_on_cpu.verl_on_cpu():
        plain = engine(**build)
        results["plain"] = run(plain)
        uninstall = adapter.install(impl, settings=given or settings())
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
        found = adapter.run_of(built)
        of_infer = found.last_metrics if found else {}
        values, metrics = losses(built, [data])
        return {"curve": values, "metrics": metrics, "infer": before, "infer_metrics": of_infer}

    return both_ways(run)


SIZES, LIMIT = (9, 14, 7, 12, 5, 11), 60


def micro_batches_that_fit() -> dict[str, Any]:
    """Every other update of four finds memory for a part of the tokens that verl puts into one micro-batch; then plain
    verl, told of those limits: what a token's neighbors are enters this loss. And plain verl with the lowest limit."""
    found: dict[str, Any] = {"rooms": [], "kept": []}

    def run(built: Any, limits: list[int]) -> dict[str, Any]:
        curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        metrics: list[dict[str, float]] = []
        run_of, room = adapter.run_of(built), None
        memory = run_of.balancer.run.memory if run_of else None
        for step, limit in enumerate(limits):
            if run_of is not None:
                found["rooms"].append(room if step % 2 else None)
                run_of.balancer.run.memory = partial(memory, hbm_bytes=found["rooms"][-1])
            data = batch(step, SIZES, use_dynamic_bsz=True, max_token_len_per_gpu=limit)
            log_probs(built, data)
            values, told = losses(built, [data])
            metrics += told
            found["kept"].append(data["max_token_len_per_gpu"] == limit)
            for name, each in values.items():
                curve[name] += each
            if run_of is not None and step == 0:
                whole = run_of.balancer.fitting_tokens / sum(SIZES)
                peak = told[0]["moe_rl/forecast_peak_bytes"]
                room = int(peak - 0.4 * (run_of.balancer.topology.hardware.hbm_gib * 2**30 - peak) / (whole - 1))
        return {"curve": curve, "metrics": metrics}

    with verl_on_cpu.verl_on_cpu():
        uninstall = adapter.install(impl, settings=settings())
        try:
            found["balanced"] = run(engine(lr=1e-6), [LIMIT] * 4)
        finally:
            uninstall()
        limits = [int(each["moe_rl/micro_batch_limit_tokens"]) for each in found["balanced"]["metrics"]]
        found["plain"] = run(engine(lr=1e-6), limits)
        found["yardstick"] = run(engine(lr=1e-6), [min(limits)] * len(limits))
    return found


def every_row_replayed() -> dict[str, Any]:
    """R2: the log-prob pass records, the update replays, the last token too."""

    def run(built: Any) -> dict[str, Any]:
        recorded = log_probs(built, batch(0, routes=False))["routed_experts"]
        data = batch(0, routes=False)
        data["routed_experts"] = recorded
        values, metrics = losses(built, [data])
        return {"curve": values, "metrics": metrics, "rows": len(recorded.values())}

    return both_ways(run, mode="R2")


ROLLOUTS, MINI_BATCHES, SEQUENCES = 2, 4, 16
OF_TEST = {"MOE_RL_RANKS_PER_NODE": "2", "MOE_RL_CLUSTER": SLOW, "MOE_RL_STRICT": "1"}
LEARNING_RATE = 3e-4
"""At which 11 % of the choices flip until the first rollout's fourth update."""


def rollouts(
    *,
    told: dict[str, str] | None = None,
    log_prob_pass: bool = True,
    mini_batches: int = MINI_BATCHES,
    reverses: Callable[[int, int], bool] = lambda step, rank: False,
    yardstick: int = 1,
    observes: bool = False,
    **build: Any,
) -> dict[str, Any]:
    """RL steps: a log-prob pass over a rollout, then four updates on parts of it, packed otherwise.

    The run is told what a user tells it, and besides that a node has two ranks and that its GPUs are slow, so that the
    experts of a test weigh what real ones do. Micro-batches are verl's own, so that sums are taken in verl's order.
    How sequences are dealt to mini-batches is drawn every day (`drawn.py`), and differently for every case.
    `yardstick`: so many rollouts of plain verl once more, with smaller micro-batches. One is enough: what is apart
    grows from update to update, so that it measures too little rather than too much. `observes`: once more, told to
    observe. The driver may reverse a rank's rollout between the two.
    """
    given = settings_from_environment({"MOE_RL": "moe-rl", "MOE_RL_PACK": "false"} | OF_TEST | (told or {}))
    build = {"mode": "disabled", "ep_size": 4, "lr": 1e-6, "common": 1.0} | build
    replays, num_layers = build["mode"] != "disabled", build.get("num_layers", verl_on_cpu.NUM_LAYERS)
    weights: list[dict[str, torch.Tensor]] = []
    rank = torch.distributed.get_rank()
    draw = zlib.crc32(f"{drawn.seed()} {sorted(told or {})} {log_prob_pass} {sorted(build)}".encode()) % 2**31

    def run(built: Any, limit: int = 120, num_rollouts: int = ROLLOUTS) -> dict[str, Any]:
        curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        metrics, found, flips, sent, prepared = [], [], [], [], []
        for step in range(num_rollouts):
            sizes = tuple(np.random.default_rng(step).integers(20, 60, SEQUENCES).tolist())
            budget = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 400, "enable_routing_replay": replays}
            data = batch(step, sizes, routes=replays, num_layers=num_layers, **budget)
            if log_prob_pass:
                output = log_probs(built, data)
                found += [output["log_probs"].values().double().sum().item()] if output else []
            if reverses(step, rank):
                data = index_select_tensor_dict(data, list(range(SEQUENCES))[::-1])
            seed = draw + built.get_data_parallel_rank()  # the same in every rollout, as verl's worker has it
            shuffled = {"seed": seed, "dataloader_kwargs": {"shuffle": True}}
            parts = tensordict_utils.make_iterator(data, SEQUENCES // mini_batches, 1, **shuffled)
            for mini in parts:
                assign_non_tensor(mini, max_token_len_per_gpu=limit, global_batch_size=4 * len(mini))
                learn = patch.object(RouteForecast, "record", counting_flips(flips))
                noted = verl_on_cpu.noting_prepared(prepared)
                with built.train_mode(), learn, noted, copies_sent(deduplicated=False) as copies:
                    output = built.train_batch(mini, loss).get("metrics", {})
                sent.append(sum(copies) / num_layers / sum(sizes) * mini_batches)
                for name, values in curve.items():
                    values += [float(np.sum(output[name]))] if name in output else []
                run_of = adapter.run_of(built)
                metrics += [run_of.last_metrics] if run_of else []
        weights.append(final_weights(built))
        for run_of in filter(None, [adapter.run_of(built)]):
            run_of.balancer.routes.loads.result()
            if given is not None and given.record is not None:
                run_of._recorder.close()
        said = {
            "curve": curve,
            "metrics": metrics,
            "log_probs": found,
            "flips": flips,
            "sent": sent,
            "prepared": prepared,
        }
        return said | moved(built)

    results = both_ways(run, given=given, **build)
    if yardstick:
        with verl_on_cpu.verl_on_cpu():
            results["yardstick"] = run(engine(**build), limit=80, num_rollouts=yardstick)
    if observes:
        observing = settings_from_environment(OF_TEST | (told or {}) | {"MOE_RL": "observe"})
        assert observing is not None
        with verl_on_cpu.verl_on_cpu():
            uninstall = adapter.install(impl, settings=observing)
            results["observed"] = run(engine(**build))
            uninstall()
    plain, balanced, *_ = weights
    results["same_names"] = list(plain) == list(balanced)
    results["apart"] = max(float((plain[name] - balanced[name]).abs().max()) for name in plain)
    return results


RECORD = RouteForecast.record


def counting_flips(flips: list[float]) -> Callable[..., RankRows]:
    """`RouteForecast.record` that notes which share of the choices an update made otherwise than the log-prob pass."""

    def record(self: RouteForecast, micro_batches: Any, **told: Any) -> RankRows:
        counted = self._rollout.sequences
        both = [(counted.get(key), now) for routes in micro_batches for key, now in routes.by_sequence()]
        ids = [(a.sampled_ids_ULK, b.sampled_ids_ULK) for a, b in both if a is not None]
        known = [(a, b) for a, b in ids if a.shape == b.shape]
        kept = sum((a[..., None] == b[..., None, :]).any(-1).sum() for a, b in known)
        flips.append(float(1 - kept / max(1, sum(b.size for _, b in known))))
        return RECORD(self, micro_batches, **told)

    return record


def final_weights(built: Any) -> dict[str, torch.Tensor]:
    """What is exported to the rollout engine, and what a checkpoint would hold."""
    found = {}
    if all(each.requires_grad for each in built.module[0].parameters()):  # mbridge names no adapters
        with verl_on_cpu.named_as_fused(built):
            found = {f"exported {name}": value.clone() for name, value in built.get_per_tensor_param()[0]}

    def save(**_: Any) -> None:
        found.update({f"saved {name}": value.detach().clone() for name, value in built.module[0].named_parameters()})

    with patch.object(built.checkpoint_mananager, "save_checkpoint", save):
        built.save_checkpoint("nowhere")
    return found


def moved(built: Any) -> dict[str, int]:
    """Experts away from where Megatron puts them, and copies that stay."""
    run = adapter.run_of(built)
    if run is None:
        return {}
    placement, own = run.balancer.placement, run.balancer.megatron_placement
    return {
        "moved": int((placement.home_rank != own.home_rank).sum()),
        "residents": int((placement.resident_experts >= 0).sum()),
    }


MOVES_ARE_FREE = {"MOE_RL_OBJECTIVE": "imbalance"}


def without_replay() -> dict[str, Any]:
    return rollouts()


def reversed_rollouts() -> dict[str, Any]:
    """What the driver hands to the update is not what the log-prob pass had, in the second rollout and on one rank."""
    return rollouts(reverses=lambda step, rank: (step, rank) == (1, 2))


def copies_that_stay() -> dict[str, Any]:
    """A slot across nodes brings experts to the other node for nothing where arithmetic is slow; here is none."""
    return rollouts(told={"MOE_RL_CROSS_NODE_SLOTS": "0"})


def as_simulated() -> dict[str, Any]:
    """What a run does, told nothing, and what is simulated of the routes that it recorded: one update per rollout."""
    told = {"": {}, "copies that stay": {"MOE_RL_CROSS_NODE_SLOTS": "0"}}
    return {name: beside_simulation(each) for name, each in told.items()}


def beside_simulation(told: dict[str, str]) -> dict[str, Any]:
    shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(shared)
    ran = rollouts(told=told | {"MOE_RL_RECORD": shared[0]}, mini_batches=1, yardstick=0)["balanced"]
    sent = torch.tensor(ran["sent"])
    torch.distributed.all_reduce(sent)
    found = [
        {name: metrics[f"moe_rl/{name}"] for name in ("imbalance", "static_imbalance", "residents")}
        | {"copies": copies}
        for metrics, copies in zip(ran["metrics"], (sent / 4).tolist(), strict=True)
    ]
    if torch.distributed.get_rank() != 0:
        return {"run": found}
    merged = merge_recordings(Path(shared[0]), Path(shared[0]) / "run.moetrace").path
    simulated = []
    for step in range(ROLLOUTS):
        report = moe_rl.simulate(
            str(merged), model="from-trace", step=step, hidden_size=32, moe_ffn_hidden_size=16,
            expert_model_parallel_size=4, ranks_per_node=2, cluster=SLOW, moe_token_dispatcher_type="alltoall",
            resident_slots=2, cross_node_slots=int(told.get("MOE_RL_CROSS_NODE_SLOTS", 1)),
            policy=["static", "moe-rl-unpacked"],
        )  # fmt: skip
        plan, figures = report.plans["moe-rl-unpacked"], report.as_json()["policies"]
        simulated.append(
            {
                "imbalance": figures["moe-rl-unpacked"]["imbalance"],
                "static_imbalance": figures["static"]["imbalance"],
                "residents": int((plan.placement.resident_experts >= 0).sum()),
                "copies": figures["moe-rl-unpacked"]["inter_node_copies_per_token"],
                "static_copies": figures["static"]["inter_node_copies_per_token"],
            }
        )
    return {"run": found, "simulated": simulated}


def packed() -> dict[str, Any]:
    """Sequences that like the experts of one node or of the other, in verl's micro-batches and dealt anew to them; then
    plain verl with those: a sequence's last token predicts the first one of its neighbor, which enters this loss.

    What packing can do alone: replicas level the ranks of a node, and experts stay in their nodes.
    """
    told = {"MOE_RL_REORDERS": "false", "MOE_RL_CROSS_NODE_SLOTS": "0", "MOE_RL_RESIDENT_SLOTS": "0"} | MOVES_ARE_FREE
    formed: list[list[list[int]]] = []
    anew = micro_batches_of_verl.packed_anew

    def noted(original: Any, data: Any, **kwargs: Any) -> Any:
        micro_batches, indices = anew(original, data, **kwargs)
        assert max(len(each["input_ids"].values()) for each in micro_batches) <= data["max_token_len_per_gpu"]
        formed.append(indices)
        return micro_batches, indices

    def again(data: Any, **_: Any) -> Any:
        indices = formed.pop(0)
        return [index_select_tensor_dict(data, each) for each in indices], indices

    def run() -> dict[str, Any]:
        built, batches = engine(ep_size=4, lr=1e-6), []
        for step in range(3):
            draw = np.random.default_rng([drawn.seed(), step, parallel_state.get_data_parallel_rank()])
            data = batch(
                step, tuple(draw.integers(20, 60, 8).tolist()), use_dynamic_bsz=True, max_token_len_per_gpu=120
            )
            for ids in data["routed_experts"].unbind():
                ids[:] = torch.from_numpy(
                    draw.permuted(np.tile(np.arange(4), (*ids.shape[:2], 1)), axis=2)[:, :, :TOP_K]
                )
                ids += 4 * int(draw.integers(2))
            batches.append(data)
        values, metrics = losses(built, batches)
        return {"curve": values, "metrics": metrics}

    found = {}
    with verl_on_cpu.verl_on_cpu():
        for pack in ("false", "true"):
            formed.clear()
            given = settings_from_environment({"MOE_RL": "moe-rl"} | OF_TEST | told | {"MOE_RL_PACK": pack})
            with patch.object(micro_batches_of_verl, "packed_anew", noted):
                uninstall = adapter.install(impl, settings=given)
            found[pack] = run()
            uninstall()
        with patch.object(impl, "prepare_micro_batches", again):
            found["plain"] = run()
    return found


def homes_that_move() -> dict[str, Any]:
    return rollouts(told=MOVES_ARE_FREE, observes=True)


def without_log_probs() -> dict[str, Any]:
    return rollouts(told=MOVES_ARE_FREE, log_prob_pass=False)


def with_r3() -> dict[str, Any]:
    return rollouts(told=MOVES_ARE_FREE, mode="R3")


def on_two_stages() -> dict[str, Any]:
    nodes = {"MOE_RL_RANKS_PER_NODE": "1"}
    return rollouts(told=MOVES_ARE_FREE | nodes, pipeline_model_parallel_size=2, num_layers=4, ep_size=2)


def asleep_between_phases() -> dict[str, Any]:
    with verl_on_cpu.host_beside_device():
        return rollouts(told=MOVES_ARE_FREE, param_offload=True, optimizer_offload=True)


def with_lora() -> dict[str, Any]:
    """Adapters beside both linears of every expert; verl calls its hook before DDP wraps the model."""

    def adapt(model: Any, **_: Any) -> None:
        adapted(model, ("linear_fc1", "linear_fc2"))

    with patch("verl.models.mcore.mbridge.freeze_moe_router", adapt):
        return rollouts(told=MOVES_ARE_FREE, override_mcore_model_config={"moe_config": {"freeze_moe_router": True}})


def expert_tensor_parallel() -> dict[str, Any]:
    """verl's default: expert tensor parallelism as wide as tensor parallelism; a node has one EP rank."""
    nodes = {"MOE_RL_RANKS_PER_NODE": "1"}
    parts = {"tensor_model_parallel_size": 2, "expert_tensor": 2, "ep_size": 2}
    return rollouts(told=MOVES_ARE_FREE | nodes, **parts)


def weights_that_change_fast() -> dict[str, Any]:
    return rollouts(told=MOVES_ARE_FREE, yardstick=0, lr=LEARNING_RATE)


def tensor_parallel() -> dict[str, Any]:
    """Two ranks that share every micro-batch: sequence parallelism gives each a part of its rows."""
    return parallel(tensor_model_parallel_size=2)


def context_parallel() -> dict[str, Any]:
    """Two ranks that share every sequence: each has its zigzag part of the rows."""
    return parallel(context_parallel_size=2)


def pipeline_parallel() -> dict[str, Any]:
    """Two stages of two ranks."""
    return parallel(pipeline_model_parallel_size=2, num_layers=4)


def parallel(num_layers: int = verl_on_cpu.NUM_LAYERS, **sizes: int) -> dict[str, Any]:
    def run(built: Any) -> dict[str, Any]:
        with built.train_mode():
            output = built.train_batch(batch(0, num_layers=num_layers), loss)
        values = [float(each) for each in output.get("metrics", {}).get("loss", [])]
        found = adapter.run_of(built)
        return {"loss": values, "metrics": found.last_metrics if found else {}}

    return both_ways(run, num_layers=num_layers, **sizes)


def moved_apart(balancer: Any) -> ExpertPlacement:
    """The placement of Megatron with experts 0 and 4 in each other's place."""
    home = balancer.megatron_placement.home_rank.copy()
    home[:, [0, 4]] = home[:, [4, 0]]
    return ExpertPlacement.from_home_rank(home, ep_size=2, spare_slots=balancer.placement.slots_per_rank - 4)


def same_weights(built: Any, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in built.module[0].named_parameters())


def weights_of(built: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in built.module[0].named_parameters()}


def reordered_export() -> dict[str, Any]:
    """What mbridge exports to the rollout engine does not depend on where the experts are, nor what verl saves."""

    def exported() -> dict[str, torch.Tensor]:
        with verl_on_cpu.named_as_fused(built):
            return {name: value.clone() for name, value in built.get_per_tensor_param()[0]}

    seen: dict[str, bool] = {}

    def save(**_: Any) -> None:
        seen["save"] = same_weights(built, before)

    with verl_on_cpu.verl_on_cpu():
        uninstall = adapter.install(impl, settings=settings())
        built = engine()
        before, at_home = weights_of(built), exported()
        balancer = adapter.run_of(built).balancer
        balancer.reorder(moved_apart(balancer))
        seen["moved"] = not same_weights(built, before)
        found = exported()
        seen["names"] = list(found) == list(at_home) and sum(".mlp.experts." in name for name in found) == 3 * 8 * 3
        seen["export"] = all(torch.equal(value, at_home[name]) for name, value in found.items())
        # mbridge itself, without the adapter's `canonical()`, would export other experts under these names.
        with (
            verl_on_cpu.named_as_fused(built),
            pytest.raises(InvalidInputError, match="not on the ranks where Megatron puts them"),
        ):
            list(built.bridge.export_weights(built.module))
        seen["refused"] = True
        with patch.object(built.checkpoint_mananager, "save_checkpoint", save):
            built.save_checkpoint("nowhere")
        seen["back"] = not same_weights(built, before)
        uninstall()
    return seen


def offloaded() -> dict[str, Any]:
    """verl puts parameters and optimizer away between phases: the balancer's memory goes with them, and comes back."""
    seen: dict[str, Any] = {"away": []}

    def run(built: Any) -> dict[str, Any]:
        found = adapter.run_of(built)

        def memory() -> int:
            return found.balancer.transport.buffers.weights.numel() if found else 0

        def storage() -> int:
            return sum(each.param_data.untyped_storage().size() for each in built.module[0].expert_parallel_buffers)

        curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        for step in range(2):
            seen["away"].append((storage(), memory()))
            values, metrics = losses(built, [batch(step)])
            for name, each in values.items():
                curve[name] += each
        result = {"curve": curve, "metrics": metrics}
        if found is None:
            return result
        balancer, saved = found.balancer, {}

        def save(**_: Any) -> None:
            saved["home"] = same_weights(built, before)

        def exported() -> dict[str, torch.Tensor]:
            with verl_on_cpu.named_as_fused(built):
                weights = {name: value.clone() for name, value in built.get_per_tensor_param()[0]}
            built.to("cpu")
            return weights

        at_home = exported()
        with built.train_mode():
            seen["there"] = memory()
            before = weights_of(built)
            balancer.reorder(moved_apart(balancer))
            moved = weights_of(built)
        with patch.object(built.checkpoint_mananager, "save_checkpoint", save):
            built.save_checkpoint("nowhere")
        seen["away"].append((storage(), memory()))
        saved["export"] = all(torch.equal(value, at_home[name]) for name, value in exported().items())
        with built.train_mode():
            saved["back"] = same_weights(built, moved) and not same_weights(built, before)
        return result | saved

    with verl_on_cpu.host_beside_device():
        return both_ways(run, param_offload=True, optimizer_offload=True) | seen


def offered() -> dict[str, Any]:
    """What the plug-in adds to verl's own tables gives verl's own numbers under our names."""
    from types import SimpleNamespace

    from verl import DataProto
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig  # noqa: F401 - registers configurations

    draw = torch.Generator().manual_seed(5)
    old, rollout = (-3 * torch.rand(4, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(4, 6, dtype=torch.float64)
    mask[0, 3:] = 0

    def corrected(prefix: str, rejection: str = "token_k1,seq_mean_k3", **how: Any) -> Any:
        options = {
            "rollout_is": f"{prefix}sequence",
            "rollout_is_threshold": "0.5_2.0",
            "rollout_rs": ",".join(prefix + each for each in rejection.split(",")),
            "rollout_rs_threshold": "0.2_4.0,0.5" if "," in rejection else "0.05",
        }
        given = DataProto.from_dict(
            tensors={"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask.clone()}
        )
        result, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(given, options | how)
        return result.batch["rollout_is_weights"], result.batch["response_mask"], metrics

    verls, ours = corrected(""), corrected("moe_rl_")
    shared = sorted(set(verls[2]) & set(ours[2]))
    bypass = {}
    for prefix in ("", "moe_rl_"):
        rollout_correction = {"rollout_is": f"{prefix}token", "loss_type": "reinforce"}
        config = SimpleNamespace(policy_loss={"rollout_correction": rollout_correction}, global_batch_info={})
        value, _ = core_algos.get_policy_loss_fn("bypass_mode")(rollout, old, old.sign(), mask, config=config)
        bypass[prefix] = value.item()
    try:
        corrected("moe_rl_", rollout_is="token")
        mixed = ""
    except InvalidInputError as error:
        mixed = str(error)
    return {
        "same": [bool(torch.allclose(a, b, rtol=0, atol=1e-12)) for a, b in zip(verls[:2], ours[:2], strict=True)],
        "rejected": int((mask - ours[1]).sum()),
        "metrics": max(abs(verls[2][name] - ours[2][name]) / max(1, abs(verls[2][name])) for name in shared),
        "num_metrics": [len(verls[2]), len(shared)],
        "binary_kl": int((mask - corrected("moe_rl_", "binary_kl")[1]).sum()),
        "bypass": bypass,
        "mixed": mixed,
        "loss": core_algos.get_policy_loss_fn("moe_rl_gspo").__doc__,
        "balanced": hasattr(impl.get_forward_backward_func, "__wrapped__"),
    }


def recorded() -> dict[str, Any]:
    shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(shared)
    with verl_on_cpu.verl_on_cpu():
        uninstall = adapter.install(impl, settings=settings(record=Path(shared[0]) / "run"))
        built = engine()
        losses(built, [batch(0), batch(1)])
        adapter.run_of(built).detach()
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
    """One warning and an unbalanced run where EP is 1; with MOE_RL_STRICT=1 an error, as for whatever does not fit."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("moe_rl.frameworks").addHandler(Handler(logging.WARNING))
    said = {}

    def sentence(name: str, call: Callable[[], object]) -> None:
        try:
            call()
            said[name] = ""
        except InvalidInputError as error:
            said[name] = str(error)

    with verl_on_cpu.verl_on_cpu():
        uninstall = adapter.install(impl, settings=settings(strict=False))
        values, metrics = losses(engine(ep_size=1), [batch(0)])
        uninstall()
        of_first = list(lines)
        uninstall = adapter.install(impl, settings=settings())
        sentence("ep_size", lambda: engine(ep_size=1))
        sentence("dense", lambda: engine(ep_size=1, dense=True, mode="disabled"))
        parallel_state.destroy_model_parallel()
        sentence("packing", lambda: engine(use_remove_padding=False))
        with patch("moe_rl.balancing.common_facts.__version__", f"0.{torch.distributed.get_rank()}"):
            sentence("versions", engine)
        sentence("routes", lambda: losses(engine(), [batch(0, num_layers=5)]))
        before = len(lines)
        engine(mode="disabled", use_remove_padding=False)
        uninstall()
    return {"curve": values, "metrics": metrics, "warnings": of_first, "said": said, "padded": lines[before:]}


def contract() -> dict[str, Any]:
    return {"problems": FRAMEWORK.problems(), "tested": FRAMEWORK.version() in FRAMEWORK.tested}
