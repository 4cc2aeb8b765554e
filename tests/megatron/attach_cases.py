"""Cases of test_attach.py: what the balancer refuses, falls back from, and leaves behind."""

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from replica_cases import occurring

from moe_rl.balancing.home_choice import HomeChoice
from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.schedule import hardware_of
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.plan import Plan
from moe_rl.frameworks import megatron_run
from moe_rl.megatron import Balancer, BalancerConfig, ElasticMoELayer, attach
from moe_rl.megatron.on_cpu import cpu_megatron

CONFIG = BalancerConfig(policy="ultraep", objective="imbalance")


def refusal(action: Callable[[], Any]) -> str:
    """The sentence with which `action` is refused; empty when it is not."""
    try:
        action()
    except InvalidInputError as error:
        return str(error)
    return ""


def attached() -> tuple[tiny_gpt.Run, Balancer]:
    run = tiny_gpt.build()
    return run, attach([run.model], run.optimizer, CONFIG)


def refusals() -> dict[str, str]:
    found = {}
    with tiny_gpt.parallel(2):
        found["no_moe"] = refusal(lambda: attach(torch.nn.Linear(2, 2), None, CONFIG))
        whole = tiny_gpt.build().model
        lopsided = torch.nn.Linear(2, 2) if dist.get_rank() else whole
        found["one_rank_without"] = refusal(lambda: attach(lopsided, None, CONFIG))
        run, balancer = attached()
        found["twice"] = refusal(lambda: attach([run.model], run.optimizer, CONFIG))
        plan = balancer.plan(occurring(0))
        found["end_first"] = refusal(balancer.end_pass)
        found["nothing"] = refusal(balancer.begin_pass)
        found["ids"] = refusal(lambda: balancer.begin_pass(PassSource.replayed([r + 100 for r in occurring(0)])))
        found["layers"] = refusal(lambda: balancer.begin_pass(PassSource.replayed([r[:, :1] for r in occurring(0)])))
        uneven = occurring(0, count=2 + dist.get_rank())
        found["uneven"] = refusal(lambda: balancer.begin_pass(PassSource.replayed(uneven)))
        balancer.begin_pass(PassSource.given(plan))
        found["nested"] = refusal(lambda: balancer.begin_pass(PassSource.given(plan)))
        found["detach"] = refusal(balancer.detach)
        balancer.end_pass()
        balancer.detach()
        found["after_detach"] = refusal(lambda: attach([run.model], run.optimizer, CONFIG).detach())
        slots = attach(
            [run.model], run.optimizer, BalancerConfig(policy="ultraep", objective="imbalance", replica_slots=2)
        )
        found["slots"] = refusal(lambda: slots.begin_pass(PassSource.given(plan)))
        model_of_ep2 = tiny_gpt.build()
    with cpu_megatron():
        found["no_groups"] = refusal(lambda: attach([model_of_ep2.model], None, CONFIG))
    with tiny_gpt.parallel(1):
        found["world_size"] = refusal(lambda: attach([model_of_ep2.model], None, CONFIG))
    return found


def not_in_common() -> dict[str, str]:
    """What every rank says where rank 1 of two differs in one fact."""
    differs = dist.get_rank() == 1
    settings: dict[str, dict[str, Any]] = {
        "slots": {"replica_slots": 1 + differs},
        "policy": {"policy": "moe-rl" if differs else "ultraep"},
        "objective": {"objective": "time" if differs else "imbalance"},
        "reorders": {"policy": "moe-rl", "reorders": differs},
    }
    found = {}
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()

        def refused_with(config: BalancerConfig) -> str:
            return refusal(lambda: attach(run.models, run.optimizer, config).detach())

        for name, values in settings.items():
            found[name] = refused_with(BalancerConfig(**{"policy": "ultraep", "objective": "imbalance", **values}))
        with patch("moe_rl.balancing.common_facts.__version__", "0.0" if differs else "0.1"):
            found["version"] = refused_with(CONFIG)
        with patch("moe_rl.balancing.common_facts.version", lambda package: f"{package} {2 if differs else 1}"):
            found["package"] = refused_with(CONFIG)
        rates = replace(hardware_of("h100"), rdma_gb_per_s=25.0 if differs else 40.0)
        with patch("moe_rl.balancing.common_facts.hardware_of", lambda _: rates):
            found["cluster"] = refused_with(CONFIG)
        found["nothing"] = refused_with(CONFIG)
    with tiny_gpt.parallel(1, tensor=2):
        run = tiny_gpt.build()
        with patch.dict(os.environ, {"MOE_RL_NATIVE": "0"} if differs else {}):
            found["core"] = refused_with(CONFIG)
    return found


def packed_differently() -> dict[str, Any]:
    """Two ranks of one run that pack to other limits, and what they pack with one."""
    with tiny_gpt.parallel(2):
        _, balancer = attached()
        sequences = occurring(0)
        tokens = [np.arange(len(routes)) for routes in sequences]
        given = [list(range(0, len(tokens), 2)), list(range(1, len(tokens), 2))]
        limit = sum(map(len, tokens))

        def packed(token_budget: int) -> Any:
            return balancer.packed(given, tokens, token_budget=token_budget, routes=sequences)

        asked: list[frozenset[int]] = []
        settle, move = HomeChoice.settle, HomeChoice.move

        def settled(choice: Any, rows: Any) -> bool:
            asked.append(frozenset().union(*(of_batch.sequence_keys for of_batch in rows)))
            return settle(choice, rows)

        def moved(choice: Any) -> bool:
            asked.append(frozenset())
            return move(choice)

        with patch.object(HomeChoice, "settle", settled), patch.object(HomeChoice, "move", moved):
            limits, one_limit = refusal(lambda: packed(limit + dist.get_rank())), len(packed(limit))
        of_update = SequenceRows.of_tokens(tokens).sequence_keys
        return {"limits": limits, "one_limit": one_limit, "settled": asked[-2:] == [of_update, frozenset()]}


def resident_slots_of_least_memory() -> list[int]:
    """Resident slots that ranks choose whose memory has room for 1 and 9 of them, and for 0 and 1."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        of_layer = [layer.experts for layer in run.model.modules() if isinstance(layer, MoELayer)]
        # fp32 weights and gradients of one of the 4 local experts, in every layer.
        slot_bytes = sum(p.numel() * 8 for experts in of_layer for p in experts.parameters()) // 4
        found = []
        for rooms in ((1, 9), (0, 1)):
            # Room for so many and a byte.
            memory = math.ceil((rooms[dist.get_rank()] * slot_bytes + 1) / megatron_run.RESIDENT_SHARE)
            with patch.object(megatron_run, "memory_bytes", lambda memory=memory: memory):
                config = BalancerConfig(policy="moe-rl", ranks_per_node=1)
                found.append(megatron_run.chosen(config, frozenset(), run.models).slots.resident_slots)
        return found


def unknown_option() -> list[str]:
    """What is said of a model whose config has an option that no version is known to have."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_rl.megatron.attach").addHandler(handler)
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        newer = dataclasses.make_dataclass(
            "Newer", [("moe_new_dispatch", bool, False), ("moe_newer", bool, False)], bases=(type(run.config),)
        )
        for layer in run.gpt.decoder.layers:
            layer.mlp.config.__class__ = newer
            layer.mlp.config.moe_new_dispatch = True
        attach([run.model], run.optimizer, CONFIG).detach()
    return said


def without_replicas() -> dict[str, Any]:
    """What passes of a policy that weighs cost say, in their metrics and in the log; the third one has replicas."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_rl.balancing.passes").addHandler(handler)
    why = []
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach([run.model], run.optimizer, BalancerConfig(policy="moe-rl", objective="time"))
        followed = balancer.config.with_words(objective="imbalance")
        for config in (balancer.config, balancer.config, followed, balancer.config):
            balancer.run.config = config
            balancer.begin_pass(PassSource.replayed(occurring(0)), forward_only=True)
            tiny_gpt.forward_backward(run, 0, occurring(0), forward_only=True)
            why.append(balancer.end_pass().notes)
    return {"why": why, "said": said}


def fallbacks() -> dict[str, Any]:
    """Plans that do not hold everywhere: the pass runs without replicas and its loss is Megatron's."""
    found: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        routes = occurring(0)
        run, balancer = attached()
        plan, other = balancer.plan(routes), balancer.plan(occurring(1))
        found["plain"] = tiny_gpt.forward_backward(run, 0, routes, forward_only=True)

        def one_pass(source: PassSource) -> list[Any]:
            balancer.begin_pass(source)
            loss = tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
            metrics = balancer.end_pass()
            return [
                loss,
                metrics.misfit and metrics.misfit.sentence,
                metrics.replicas,
                metrics.pushed_bytes,
                metrics.returned_bytes,
            ]

        found["followed"] = one_pass(PassSource.given(plan))
        found["ranks_differ"] = one_pass(PassSource.given(plan if dist.get_rank() else other))
        layout = replace(plan.layout, micro_batch=plan.layout.micro_batch[::-1].copy())
        found["other_layout"] = one_pass(PassSource.given(plan, layout=layout))
        found["other_placement"] = one_pass(PassSource.given(with_homes_swapped(plan)))
        found["followed_again"] = one_pass(PassSource.given(plan))
    return found


def with_homes_swapped(plan: Plan) -> Plan:
    """The plan with two experts of each layer in each other's home, without replicas."""
    home = plan.placement.home_rank.copy()
    home[:, [0, -1]] = home[:, [-1, 0]]
    placement = plan.placement.from_home_rank(home, ep_size=2, spare_slots=1)
    empty = plan.replicas.empty(
        num_ep_groups=1, num_micro_batches=plan.replicas.num_micro_batches, num_layers=2, ep_size=2
    )
    return replace(plan, placement=placement, replicas=empty)


def passes_in_turn() -> dict[str, Any]:
    """A log-probability pass, then an update, each with its own plan; micro-batches of unequal size."""
    lengths = (16, 5, 11)

    def routes_of(step: int) -> list[torch.Tensor]:
        return [r[: n * tiny_gpt.BATCH] for r, n in zip(occurring(step), lengths, strict=True)]

    def steps(run: tiny_gpt.Run, balancer: Balancer | None) -> tuple[dict[str, list[float]], list[float], list[float]]:
        curve, log_prob, misplaced = tiny_gpt.history(), [], []
        for step in range(2):
            routes = routes_of(step)
            for forward_only in (True, False):
                if balancer:
                    balancer.begin_pass(PassSource.replayed(routes), forward_only=forward_only)
                if forward_only:
                    log_prob.append(tiny_gpt.forward_backward(run, step, routes, forward_only=True))
                else:
                    tiny_gpt.update(run, step, routes, curve)
                if balancer:
                    misplaced.append(balancer.end_pass().as_dict()["moe_rl/misplaced_share"])
        return curve, log_prob, misplaced

    with tiny_gpt.parallel(2):
        plain = steps(tiny_gpt.build(), None)
        found = steps(*attached())
    return {"plain": plain[:2], "balanced": found[:2], "misplaced": found[2]}


def attach_and_detach() -> dict[str, Any]:
    """What changes on the model, and what it costs."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        before = [sorted(run.model.state_dict()), [n for n, _ in run.model.named_parameters()]]
        sharded = sorted(run.gpt.sharded_state_dict())
        balancer = attach([run.model], run.optimizer, CONFIG)
        during = [sorted(run.model.state_dict()), [n for n, _ in run.model.named_parameters()]]
        sharded_during = sorted(run.gpt.sharded_state_dict())
        kinds = [type(layer.mlp) is ElasticMoELayer for layer in run.gpt.decoder.layers]
        own_dispatchers = [layer.mlp.token_dispatcher for layer in run.gpt.decoder.layers]
        balancer.begin_pass(PassSource.replayed(occurring(0)), forward_only=True)
        tiny_gpt.forward_backward(run, 0, occurring(0), forward_only=True)
        replicas = balancer.end_pass().replicas
        expert = sum(p.numel() for p in run.gpt.decoder.layers[0].mlp.experts.local_experts[0].parameters())
        num_bytes = balancer.buffer_bytes
        balancer.detach()
        after = [type(layer.mlp) is MoELayer for layer in run.gpt.decoder.layers]
        after += [
            layer.mlp.token_dispatcher is own
            for layer, own in zip(run.gpt.decoder.layers, own_dispatchers, strict=True)
        ]
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in run.model.modules())
        routes = occurring(0)
        detached = tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
        plain = tiny_gpt.forward_backward(tiny_gpt.build(), 0, routes, forward_only=True)
    return {
        "same_keys": before == during,
        "same_sharded_keys": sharded == sharded_during,
        "elastic": kinds,
        "restored": after,
        "replicas": replicas,
        "hooks": hooks,
        "buffer_bytes": num_bytes,
        "expert_bytes": expert * 4,
        "losses": [detached, plain],
    }


def planned_rows_are_the_actual_rows() -> dict[str, Any]:
    """Per-rank token counts of a pass whose routes were known, against the plan's, and the static ones."""
    with tiny_gpt.parallel(dist.get_world_size()):
        run, balancer = attached()
        routes = occurring(0)
        balancer.begin_pass(PassSource.replayed(routes), forward_only=True)
        tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
        metrics = balancer.end_pass()
    return {
        "actual": metrics.actual_rows.tolist(),
        "predicted": np.asarray(metrics.predicted_rows).tolist(),
        "static": np.asarray(metrics.static_rows).tolist(),
    }


STAGES = {
    "view": ("moe_rl.megatron.attach.experts_of", RuntimeError("no view here")),
    "buffers": ("moe_rl.megatron.attach.ReplicaBuffers", torch.OutOfMemoryError("no memory here")),
    "dispatcher": ("moe_rl.megatron.attach.dispatcher_over_slots", ValueError("no dispatcher here")),
    "balancer": ("moe_rl.megatron.attach.Balancer", KeyError("no balancer here")),
}


def one_rank_fails() -> dict[str, Any]:
    """Attach while one rank fails at a stage: what every rank is told, and what the model trains like afterwards."""
    found: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        routes = occurring(0)
        found["plain"] = tiny_gpt.forward_backward(tiny_gpt.build(), 0, routes)
        for stage, (name, error) in STAGES.items():
            run = tiny_gpt.build()
            groups = len(dist.distributed_c10d._world.pg_map)
            fails = dist.get_rank() == 1
            with patch(name, side_effect=error) if fails else contextlib.nullcontext():
                said = refusal(lambda run=run: attach(run.models, run.optimizer, CONFIG))  # type: ignore[misc]
            hooks = sum(len(module._forward_pre_hooks) for module in run.model.modules())
            plain = sum(len(module._forward_pre_hooks) for module in tiny_gpt.build().model.modules())
            found[stage] = {
                "said": said,
                "loss": tiny_gpt.forward_backward(run, 0, routes),
                "groups": len(dist.distributed_c10d._world.pg_map) - groups,
                "hooks": hooks - plain,
                "elastic": sum(isinstance(module, ElasticMoELayer) for module in run.model.modules()),
                "again": refusal(lambda run=run: attach(run.models, run.optimizer, CONFIG).detach()),  # type: ignore[misc]
            }
    return found
