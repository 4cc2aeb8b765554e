"""Cases of test_megatron_loops.py: a Megatron loop whose schedule function is wrapped, and slime's hooks around one."""

import contextlib
import logging
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))  # the tiny model that Megatron's own tests train
import tap_cases
import tiny_gpt
from give_up_cases import OfTheUserError, in_the_loss
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from rollout_cases import held
from what_ran_cases import Warnings

from moe_rl.balancing.exchange import PlanExchange
from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks import Settings, forward_backward, settings_from_environment
from moe_rl.frameworks import router_shift as shifts
from moe_rl.frameworks.contract import Framework
from moe_rl.frameworks.megatron.attach import routes_of_nemo_rl, routes_of_padded, routes_of_skyrl
from moe_rl.frameworks.megatron.contract import FRAMEWORK
from moe_rl.frameworks.megatron_run import MegatronRun
from moe_rl.frameworks.miles import attach as miles
from moe_rl.frameworks.slime import attach as slime
from moe_rl.frameworks.slime.micro_batches import next_routes
from moe_rl.importance import all_reduce_sum
from moe_rl.megatron import BalancerConfig, attach
from moe_rl.megatron.groups import ExpertGroups
from moe_rl.megatron.routed_rows import RowSlice
from moe_rl.replay import TraceReader

CONFIG = BalancerConfig(objective="imbalance", replica_slots=2)
STEPS, MICRO_BATCHES = 2, 4


def batches(step: int, num_layers: int = tiny_gpt.NUM_LAYERS) -> list[torch.Tensor]:
    return [tiny_gpt.skewed_routes(step, m, num_layers=num_layers) for m in range(MICRO_BATCHES)]


def trained(run: tiny_gpt.Run, schedule: Callable[[], Callable[..., Any]]) -> dict[str, list[float]]:
    curve = tiny_gpt.history()
    with patch.object(tiny_gpt, "get_forward_backward_func", schedule):
        for step in range(STEPS):
            tiny_gpt.update(run, step, batches(step, run.config.num_layers), curve)
    return curve


def by_sequence(rows: torch.Tensor) -> torch.Tensor:
    """[B, S, L, K] of [S * B, L, K]."""
    return rows.view(tiny_gpt.SEQUENCE, tiny_gpt.BATCH, *rows.shape[1:]).transpose(0, 1)


def wrapped_schedule() -> dict[str, Any]:
    """Under virtual stages too: one data iterator per chunk, all looked into."""
    results: dict[str, Any] = {}
    for name, sizes in (("one stage", {}), ("virtual stages", {"pipeline": 2, "virtual": 2})):
        ranks = torch.distributed.get_world_size()
        settings = {"overlap_p2p_comm": True, "batch_p2p_comm": False, "num_layers": 4} if sizes else {}
        with tiny_gpt.parallel(ranks // 2 if sizes else ranks, **sizes):
            plain = trained(tiny_gpt.build(**settings), get_forward_backward_func)
            run = tiny_gpt.build(**settings)
            balancer = attach(run.models, run.optimizer, CONFIG)
            metrics: list[dict[str, float]] = []
            seen: list[int] = []
            step = iter(range(STEPS))

            def routes(
                micro_batches: list[Any],
                seen: list[int] = seen,
                step: Iterator[int] = step,
                layers: int = settings.get("num_layers", tiny_gpt.NUM_LAYERS),
            ) -> list[Any]:
                seen += [number for number, _ in micro_batches]
                now = next(step)
                return [tiny_gpt.skewed_routes(now, number, num_layers=layers) for number, _ in micro_batches]

            def schedule(balancer: Any = balancer, routes: Any = routes, metrics: Any = metrics) -> Callable[..., Any]:
                return forward_backward(get_forward_backward_func(), balancer, routes, on_metrics=metrics.append)

            balanced = trained(run, schedule)
            results[name] = {"plain": plain, "balanced": balanced, "metrics": metrics, "seen": seen}
    return results


def router_shift() -> dict[str, Any]:
    """Two stages whose activations are recomputed; gamma is read in the loop's own calls of the schedule."""
    with patch.object(shifts, "WORD", torch.int32), tiny_gpt.parallel(1, pipeline=2):
        run = tiny_gpt.build(**tap_cases.FULL_RECOMPUTE)
        shift, routes, forwards = shifts.RouterShiftRun(run.models, floor=1e-6), batches(0), [0]
        kept: dict[int, torch.Tensor] = {}

        def keys_of(micro_batches: list[Any], forward_only: bool) -> list[Any]:
            keys = [shift.keys(list(tokens), forward_only=forward_only) for _, tokens in micro_batches]
            rows = [torch.stack([each[:-1] for each in of_batch], dim=1).flatten() for of_batch in keys]
            kept.update(zip((number for number, _ in micro_batches), rows, strict=True))
            return list(zip(keys, rows, strict=True))

        def passed(*, forward_only: bool) -> list[torch.Tensor]:
            schedule = shift.reading(get_forward_backward_func(), keys_of)
            with patch.object(tiny_gpt, "get_forward_backward_func", lambda: schedule):
                tiny_gpt.forward_backward(run, 0, routes, forward_only=forward_only)
            last = not forward_only and parallel_state.is_pipeline_last_stage()
            return [shift.of(kept[number]).ratio for number in range(MICRO_BATCHES)] if last else []

        run.models[0].register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
        passed(forward_only=True)
        taken = dict(kept)
        passed(forward_only=True)  # a reference model's: it leaves the store as it is
        again = max(int(rows.max()) for rows in kept.values())
        unmoved = passed(forward_only=False)
        own = forwards[0]
        before = tap_cases.every_router(run, routes)
        tap_cases.drift(run.gpt)
        after = tap_cases.every_router(run, routes)
        moved = passed(forward_only=False)
        stages = all_reduce_sum(parallel_state.get_pipeline_model_parallel_group())
        expected = [tap_cases.by_brute_force(before, after, m, stages) for m in range(MICRO_BATCHES)]
        with pytest.raises(InvalidInputError) as raised:
            shift.keys([torch.arange(3)], forward_only=False)
        return {
            "last": bool(moved),
            "unmoved": min((float(each.min()) for each in unmoved), default=1.0),
            "difference": max((float((a - b).abs().max()) for a, b in zip(moved, expected, strict=False)), default=0.0),
            "largest": max(float(each.max()) for each in expected),
            "passes": own / MICRO_BATCHES,
            "keys": [sum(len(rows) for rows in taken.values()), again],
            "bytes": shift.num_bytes,
            "said": str(raised.value),
        }


def a_loss_raises() -> dict[str, Any]:
    """In a wrapped schedule, and in a run with recorder and telemetry: it breaks off, saves, and goes on."""
    shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(shared)
    results: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        for name in ("plain", "wrapped", "run"):
            run, schedule, canonical = tiny_gpt.build(), get_forward_backward_func, contextlib.nullcontext
            if name == "wrapped":
                balancer = attach(run.models, run.optimizer, CONFIG)
                schedule, canonical = wrapped_by(balancer), balancer.canonical
            if name == "run":
                given = Settings(balancer=CONFIG, strict=True, telemetry=True, record=Path(shared[0]) / "recorded")
                around = MegatronRun.attach(FRAMEWORK, run.models, run.optimizer, given)
                schedule, canonical = around_of(around), around.balancer.canonical
            found: dict[str, Any] = {"curve": tiny_gpt.history()}
            with patch.object(tiny_gpt, "get_forward_backward_func", schedule):
                tiny_gpt.update(run, 0, batches(0), found["curve"])
                with in_the_loss(1, OfTheUserError), pytest.raises(OfTheUserError):
                    tiny_gpt.update(run, 0, batches(0), found["curve"])
                with canonical():
                    found["saved"] = len(run.gpt.state_dict())
                with in_the_loss(0, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                    tiny_gpt.forward_backward(run, 0, batches(0), forward_only=True)
                with torch.no_grad():
                    tiny_gpt.forward_backward(run, 0, batches(0), forward_only=True)
                tiny_gpt.update(run, 0, batches(0), found["curve"])
            if name == "run":
                found["metrics"] = sorted(around.last_metrics)
                around.detach()
                found["steps"] = list(TraceReader(Path(shared[0]) / "recorded" / "dp00000.moetrace").steps)
            results[name] = found
    return results


def wrapped_by(balancer: Any) -> Callable[[], Callable[..., Any]]:
    return lambda: forward_backward(get_forward_backward_func(), balancer, lambda _: batches(0))


def around_of(run: MegatronRun) -> Callable[[], Callable[..., Any]]:
    def schedule() -> Callable[..., Any]:
        function = get_forward_backward_func()

        def planned(**kwargs: Any) -> Any:
            source = PassSource.replayed(batches(0))
            return run.around(lambda: function(**kwargs), source, forward_only=kwargs["forward_only"])

        return planned

    return schedule


def measured_alone() -> dict[str, Any]:
    """MOE_RL=static beside the plain run and beside a balancer whose policy is static; with full recomputation, and a
    forward of the user's between micro-batches."""
    gathers = [0]

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*given: Any, **named: Any) -> Any:
            gathers[0] += 1
            return original(*given, **named)

        return gather

    results: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        for recompute in ({}, tap_cases.FULL_RECOMPUTE):
            plain = trained(tiny_gpt.build(**recompute), get_forward_backward_func)
            planned = tiny_gpt.build(**recompute)
            balancer = attach(planned.models, planned.optimizer, BalancerConfig(policy="static"))
            expected: list[dict[str, float]] = []
            step = iter(range(STEPS))

            def schedule(
                balancer: Any = balancer, expected: Any = expected, step: Iterator[int] = step
            ) -> Callable[..., Any]:
                routes = batches(next(step))
                return forward_backward(
                    get_forward_backward_func(), balancer, lambda _: routes, on_metrics=expected.append
                )

            trained(planned, schedule)
            run = tiny_gpt.build(**recompute)
            given = settings_from_environment({"MOE_RL": "static", "MOE_RL_STRICT": "1"})
            assert given is not None
            exchange = patch.object(PlanExchange, "gather", counting(PlanExchange.gather))
            with exchange:
                around = MegatronRun.attach(FRAMEWORK, run.models, run.optimizer, given)
                metrics: list[dict[str, float]] = []

                def measured(around: MegatronRun = around, metrics: Any = metrics) -> Callable[..., Any]:
                    function = around_of(around)()

                    def noted(**kwargs: Any) -> Any:
                        result = function(**kwargs)
                        metrics.append(around.last_metrics)
                        return result

                    return noted

                curve = trained(run, measured)
            around.detach()
            name = "recomputed" if recompute else "kept"
            results[name] = {"plain": plain, "curve": curve, "metrics": metrics, "expected": expected}
            results[name]["balancer"] = around.balancer is not None
    return results | {"gathers": gathers[0]}


def switched_off() -> dict[str, Any]:
    """After two of four updates, by their number and by a file that appears; experts have moved by then."""
    shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(shared)
    file, results = Path(shared[0]) / "off", {}
    with tiny_gpt.parallel(2):
        plain = tiny_gpt.build()
        results["plain"] = tiny_gpt.train(plain, steps=4, micro_batches=MICRO_BATCHES)
        for until in ("2", str(file)):
            told = {"MOE_RL": "moe-rl", "MOE_RL_OBJECTIVE": "imbalance", "MOE_RL_STRICT": "1", "MOE_RL_UNTIL": until}
            given = settings_from_environment(told)
            assert given is not None
            run, curve = tiny_gpt.build(), tiny_gpt.history()
            around = MegatronRun.attach(FRAMEWORK, run.models, run.optimizer, given, guarded=True)
            found: dict[str, Any] = {"balanced": [], "metrics": []}
            for step in range(4):
                if step == 2 and torch.distributed.get_rank() == 0:
                    found["moved"] = around.balancer.placement.home_rank.tolist()
                    Path(shared[0], "off" if "/" in until else "other").touch()

                def schedule(step: int = step, around: MegatronRun = around) -> Callable[..., Any]:
                    source = PassSource.replayed(batches(step), [held(step, m) for m in range(MICRO_BATCHES)])
                    function = get_forward_backward_func()
                    return lambda **kwargs: around.around(lambda: function(**kwargs), source, forward_only=False)

                with patch.object(tiny_gpt, "get_forward_backward_func", schedule):
                    tiny_gpt.update(run, step, batches(step), curve)
                found["balanced"].append(around.balancer is not None)
                found["metrics"].append("moe_rl/imbalance" in around.last_metrics)
            named = zip(plain.gpt.named_parameters(), run.gpt.named_parameters(), strict=True)
            found["apart"] = max(float((ours - theirs).detach().abs().max()) for (_, ours), (_, theirs) in named)
            found["classes"] = {type(layer.mlp).__name__ for layer in run.gpt.decoder.layers} == {"MoELayer"}
            around.detach()
            results["file" if "/" in until else "updates"] = found | {"curve": curve}
    return results


def router_shift_after_a_break() -> dict[str, Any]:
    """The pass of the old log-probabilities breaks off and runs again; an update then finds all of its tokens."""
    with tiny_gpt.parallel(1, pipeline=2):
        run, routes = tiny_gpt.build(), batches(0)
        shift = shifts.RouterShiftRun(run.models, floor=1e-6)
        kept: list[torch.Tensor] = []

        def keys_of(micro_batches: list[Any], forward_only: bool) -> list[Any]:
            keys = [shift.keys(list(tokens), forward_only=forward_only) for _, tokens in micro_batches]
            kept[:] = [torch.stack([each[:-1] for each in of_batch], dim=1).flatten() for of_batch in keys]
            return list(zip(keys, kept, strict=True))

        def passed(*, forward_only: bool) -> None:
            schedule = shift.reading(tiny_gpt.get_forward_backward_func(), keys_of)
            with patch.object(tiny_gpt, "get_forward_backward_func", lambda: schedule):
                tiny_gpt.forward_backward(run, 0, routes, forward_only=forward_only)

        with in_the_loss(0, OfTheUserError), pytest.raises(OfTheUserError):
            passed(forward_only=True)
        passed(forward_only=True)
        passed(forward_only=False)
        found = {"least": 1.0, "metrics": True}
        if parallel_state.is_pipeline_last_stage():
            found["least"] = min(float(shift.of(rows).ratio.min()) for rows in kept)
            found["metrics"] = bool(shift.metrics())  # raises where tokens have no route in the old pass
        return found


def layouts() -> dict[str, Any]:
    """What NeMo-RL and SkyRL call their routes, and what cannot be looked into."""
    with tiny_gpt.parallel(2):
        routes = tiny_gpt.skewed_routes(0, 0)
        padded = by_sequence(routes)
        nemo = types.SimpleNamespace(data_dict={"routed_experts": padded}, packed_seq_params=None)
        lengths = torch.tensor([5, 9])
        packed = types.SimpleNamespace(
            data_dict={"routed_experts": padded, "input_lengths": lengths},
            packed_seq_params=types.SimpleNamespace(cu_seqlens_q=None, cu_seqlens_q_padded=torch.tensor([0, 8, 20])),
        )
        expected = np.full((20, *routes.shape[1:]), -1)
        expected[:5], expected[8:17] = padded[0, :5], padded[1, :9]
        mask = torch.ones(tiny_gpt.BATCH, tiny_gpt.SEQUENCE)
        mask[0, 3:] = 0
        hidden = by_sequence(torch.from_numpy(routes_of_padded("r", mask="m")([{"r": padded, "m": mask}])[0]))
        run = tiny_gpt.build()
        balancer = attach(run.models, None, CONFIG)
        other_model = routes[..., :1]
        balanced = forward_backward(lambda **_: None, balancer, lambda _: [other_model])
        # Wrong on one rank alone: no other may wait for it in a collective.
        own_routes = other_model if torch.distributed.get_rank() == 1 else routes
        one_wrong = forward_backward(lambda **_: None, balancer, lambda _: [own_routes, own_routes])
        refused = []
        two = [(0, None), (1, None)]
        for call, data in (
            (balanced, {"a": 1}), (balanced, iter(two[:1])), (balanced, iter(two)), (one_wrong, iter(two)),
        ):  # fmt: skip
            try:
                call(data_iterator=data, num_microbatches=2, model=run.models, forward_step_func=None)
            except InvalidInputError as error:
                refused.append(str(error))
        return {
            "nemo_rl": np.array_equal(routes_of_nemo_rl([nemo])[0], routes),
            "packed": np.array_equal(routes_of_nemo_rl([packed])[0], expected),
            "skyrl": skyrl_is_packed(padded),
            "mask": bool((hidden[0, 3:] == -1).all() and (hidden[1] == padded[1]).all()),
            "none": routes_of_padded("other")([{"routed_experts": padded}]) is None,
            "refused": refused,
        }


def skyrl_is_packed(padded: torch.Tensor) -> bool:
    """Whether rows are those that SkyRL dispatches: no padding on the left, at the end what TP asks for."""
    mask = torch.zeros(tiny_gpt.BATCH, tiny_gpt.SEQUENCE)
    mask[0, 3:], mask[1, 10:] = 1, 1
    batch = {"rollout_expert_indices": padded, "attention_mask": mask}
    with patch.object(RowSlice, "current", return_value=RowSlice(tp_size=4, tp_rank=1)):
        (rows,) = routes_of_skyrl([batch]) or [None]
    whole = np.full((16 + 8, *padded.shape[2:]), -1)
    whole[:13], whole[16:22] = padded[0, 3:], padded[1, 10:]
    several = routes_of_skyrl([{**batch, "sub_seq_lengths": [[3, 4]]}])
    return np.array_equal(rows, whole[6:12]) and several is None


def contract() -> dict[str, Any]:
    return {"problems": FRAMEWORK.problems(), "tested": FRAMEWORK.version() in FRAMEWORK.tested}


class RoutingReplay:
    """What slime's worker reads of its class: a list of targets and how many of them forward has taken."""

    def __init__(self) -> None:
        self.forward_index = 0
        self.top_indices_list: list[Any] = []

    def record(self, top_indices: torch.Tensor) -> None:
        self.top_indices_list.append(top_indices)


class Lazy:
    """Targets that are read once, when they are used."""

    def materialize_for_routing_replay(self, stage: str) -> torch.Tensor:
        raise AssertionError("an adapter must not use it up")


def modules_of(package: str) -> dict[str, types.ModuleType]:
    """What the adapters import of slime or miles."""
    utils = f"{package}.backends.megatron_utils"
    names = (package, f"{package}.backends", utils, f"{utils}.model", f"{utils}.actor", f"{package}.utils")
    replay = ("slime.utils.routing_replay", "miles.utils.replay_base", "slime.utils.tensor_backper")
    modules = {name: types.ModuleType(name) for name in (*names, *replay)}
    modules[f"{utils}.model"].get_forward_backward_func = get_forward_backward_func
    modules[f"{utils}.actor"].reload_process_groups = lambda: "reloaded"
    for reader in ("save", "save_hf_model_to_path", "load_checkpoint"):
        setattr(modules[f"{utils}.actor"], reader, lambda: None)
    backups = modules[replay[2]]
    methods = {name: lambda self, tag: None for name in ("backup", "restore")}
    backups.TensorBackuper = type("TensorBackuper", (), methods)
    backups._TensorBackuperNormal = type("_TensorBackuperNormal", (backups.TensorBackuper,), dict(methods))
    modules[replay[0]].RoutingReplay = RoutingReplay
    modules[replay[1]].routing_replay_manager = types.SimpleNamespace(stage="replay_backward")
    return modules


def slime_hooks() -> dict[str, Any]:
    return hooked(slime.WORKER)


def miles_hooks() -> dict[str, Any]:
    return hooked(miles.WORKER)


def hooked(worker: Any) -> dict[str, Any]:
    """Two optimizer steps of one rollout, whose targets lie in the replay objects of the routers from the start."""
    package = worker.framework.name
    modules = modules_of(package)
    utils = f"{package}.backends.megatron_utils"
    version = patch.object(Framework, "version", lambda _: "a checkout")
    with tiny_gpt.parallel(2), patch.dict(sys.modules, modules), version:
        plain = trained(tiny_gpt.build(), get_forward_backward_func)
        run = with_replay_lists(tiny_gpt.build())
        shared = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
        torch.distributed.broadcast_object_list(shared)
        record = Path(shared[0]) / "slime-recording"
        switched = {"MOE_RL": "ultraep", "MOE_RL_REPLICA_SLOTS": "2", "MOE_RL_OBJECTIVE": "imbalance"}
        metrics, curve, lazy, connected = [], tiny_gpt.history(), None, []
        with patch.dict(os.environ, {**switched, "MOE_RL_STRICT": "1", "MOE_RL_RECORD": str(record)}):
            worker.init(None)
            worker.init(None)  # a second actor in the process wraps nothing twice
            schedule = modules[f"{utils}.model"].get_forward_backward_func
            with patch.object(tiny_gpt, "get_forward_backward_func", schedule):
                for step in range(STEPS):
                    worker.before_train_step(None, 0, step, run.models, run.optimizer, None)
                    with patch.object(ExpertGroups, "warm", autospec=True, side_effect=ExpertGroups.warm) as warmed:
                        reloaded = modules[f"{utils}.actor"].reload_process_groups()
                    connected.append((reloaded, warmed.call_count))
                    tiny_gpt.update(run, step, batches(step), curve)
                    metrics.append(dict(worker.run.last_metrics))
                    for layer in run.gpt.decoder.layers:
                        layer.mlp.router.routing_replay.forward_index += MICRO_BATCHES
            layers = worker.run.balancer.layers
            for layer in layers:
                layer.router.routing_replay.top_indices_list = [Lazy()] * MICRO_BATCHES
                layer.router.routing_replay.forward_index = 0
            lazy = next_routes(
                [layer.router.routing_replay for layer in layers],
                layer_ids=[0, 1],
                num_layers=2,
                num_micro_batches=MICRO_BATCHES,
            )
            worker.run.detach()
        manifest = TraceReader(record / "dp00000.moetrace").manifest
    return {
        "plain": plain,
        "balanced": curve,
        "metrics": metrics,
        "lazy": lazy is None,
        "connected": connected,
        "recorded": manifest.num_sequences,
    }


def with_replay_lists(run: tiny_gpt.Run) -> tiny_gpt.Run:
    """The routes of all steps in the routers' own lists, as slime's worker fills them."""
    for layer in run.gpt.decoder.layers:
        layer.mlp.router.routing_replay = RoutingReplay()
        for step in range(STEPS):
            for routes in batches(step):
                layer.mlp.router.routing_replay.record(routes[:, layer.layer_number - 1].int())
    return run


def slime_observes() -> dict[str, Any]:
    """slime's hooks under MOE_RL=observe, beside the run without moe_rl and the one that does it."""
    variables = {
        "MOE_RL_REPLICA_SLOTS": "2",
        "MOE_RL_OBJECTIVE": "imbalance",
        "MOE_RL_REORDERS": "false",
        "MOE_RL_STRICT": "1",
    }
    found: dict[str, Any] = {}
    version = patch.object(Framework, "version", lambda _: "a checkout")
    with tiny_gpt.parallel(2), version:
        found["plain"] = trained(tiny_gpt.build(), get_forward_backward_func)
        for policy in ("moe-rl", "observe"):
            with patch.dict(os.environ, variables | {"MOE_RL": policy}):
                found[policy] = hooked_run(replace(slime.WORKER, settings=None, run=None, step=None))
    return found


def hooked_run(worker: Any) -> dict[str, Any]:
    """What slime's loop trains and reports through this worker's hooks."""
    modules = modules_of("slime")
    curve, metrics = tiny_gpt.history(), []
    with patch.dict(sys.modules, modules):
        run = with_replay_lists(tiny_gpt.build())
        worker.init(None)
        schedule = modules["slime.backends.megatron_utils.model"].get_forward_backward_func
        with patch.object(tiny_gpt, "get_forward_backward_func", schedule):
            for step in range(STEPS):
                worker.before_train_step(None, 0, step, run.models, run.optimizer, None)
                tiny_gpt.update(run, step, batches(step), curve)
                metrics.append(dict(worker.run.last_metrics))
                for layer in run.gpt.decoder.layers:
                    layer.mlp.router.routing_replay.forward_index += MICRO_BATCHES
        worker.run.detach()
    return {"curve": curve, "metrics": metrics}


def slots_without_nodes() -> dict[str, str]:
    """What a run is told that asks for slots which only an EP group on several nodes fills."""
    said = {}
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        for name in ("resident_slots", "cross_node_slots"):
            balancer = BalancerConfig(policy="moe-rl", objective="imbalance", **{name: 1})
            given = Settings(balancer=balancer, given=frozenset({"policy", name}), strict=True)
            with pytest.raises(InvalidInputError) as raised:
                MegatronRun.attach(FRAMEWORK, run.models, run.optimizer, given)
            said[name] = str(raised.value)
    return said


def levers_that_cannot_act() -> dict[str, list[str]]:
    """What a run logs of levers that are on and do nothing."""
    warnings = Warnings()
    log = logging.getLogger("moe_rl.frameworks")
    log.addHandler(warnings)
    no_core = patch.multiple(
        "moe_rl.frameworks.megatron_run", native_core=lambda: None, why_not_native=lambda: "the core was not built"
    )
    cases: dict[str, tuple[dict[str, str], contextlib.AbstractContextManager[Any], bool]] = {
        "all act": ({"MOE_RL_REORDERS": "true"}, contextlib.nullcontext(), True),
        "without the core": ({}, no_core, True),
        "without the core, not asked": ({"MOE_RL_PACK": "false"}, no_core, True),
        "not guarded": ({"MOE_RL_REORDERS": "true"}, contextlib.nullcontext(), False),
        "not guarded, not asked": ({}, contextlib.nullcontext(), False),
    }
    said = {}
    with tiny_gpt.parallel(2):
        for name, (variables, changes, guarded) in cases.items():
            run, given = tiny_gpt.build(), settings_from_environment({"MOE_RL": "moe-rl", **variables})
            assert given is not None
            before = len(warnings.sentences)
            with changes:
                MegatronRun.attach(FRAMEWORK, run.models, run.optimizer, given, guarded=guarded).detach()
            said[name] = [line for line in warnings.sentences[before:] if "has no effect" in line]
    log.removeHandler(warnings)
    return said


def one_ranks_check_fails() -> dict[str, Any]:
    """The framework's own check fails on rank 1 with what no adapter foresees: the run goes on, or stops everywhere."""
    found: dict[str, Any] = {"stopped": ""}
    fails = torch.distributed.get_rank() == 1
    failing = patch.object(Framework, "check", side_effect=OSError("its folder is gone"))
    with tiny_gpt.parallel(2):
        found["plain"] = trained(tiny_gpt.build(), get_forward_backward_func)
        run = tiny_gpt.build()
        with failing if fails else contextlib.nullcontext():
            attached = MegatronRun.attach(FRAMEWORK, run.models, run.optimizer, Settings(balancer=CONFIG))
            try:
                MegatronRun.attach(FRAMEWORK, run.models, run.optimizer, Settings(balancer=CONFIG, strict=True))
            except InvalidInputError as error:
                found["stopped"] = str(error)
        found["balanced"] = attached.balancer is not None
        found["curve"] = trained(run, get_forward_backward_func)
    return found
