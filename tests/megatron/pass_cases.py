"""Cases of test_passes.py: what a pass must forget, and whether what it reports is so."""

import hashlib
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import cross_node_cases
import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from reorder_cases import random_placement
from replica_cases import occurring

from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.schedule import plan_of_load
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import REPLICA_COLUMNS
from moe_rl.megatron import Balancer, BalancerConfig, PassMetrics, attach
from moe_rl.megatron.activate import PassTables
from moe_rl.megatron.transport import Transport

MICRO_BATCHES = 3
CONFIG = BalancerConfig(objective="imbalance")
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def forward(run: tiny_gpt.Run, balancer: Balancer, routes: list[torch.Tensor]) -> tuple[float, PassMetrics]:
    balancer.begin_pass(PassSource.replayed(routes), forward_only=True)
    loss = tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
    return loss, balancer.end_pass()


def weights_change_between_passes() -> dict[str, Any]:
    """One layer and one micro-batch: the buffers hold at the second pass's first push what the first pass's last left.

    No gradient has gone home in between, which would have told them that they hold nothing.
    """
    with tiny_gpt.parallel(2):
        routes = [tiny_gpt.skewed_routes(0, 0, num_layers=1)]
        plain, run = tiny_gpt.build(num_layers=1), tiny_gpt.build(num_layers=1)
        balancer = attach(run.models, run.optimizer, CONFIG)
        losses: dict[str, list[float]] = {"plain": [], "balanced": []}
        replicas = []
        for _ in range(2):
            losses["plain"].append(tiny_gpt.forward_backward(plain, 0, routes, forward_only=True))
            loss, metrics = forward(run, balancer, routes)
            losses["balanced"].append(loss)
            replicas.append(metrics.replicas)
            for each in (plain, run):
                for parameter in each.gpt.decoder.layers[0].mlp.experts.parameters():
                    parameter.data.mul_(-2.0)
    return {**losses, "replicas": replicas}


def placements_at_top_4() -> list[str]:
    """Digests of what the MoE layers put out under plain Megatron, Megatron's homes, and three random placements."""
    digests = []

    def digest(run: tiny_gpt.Run, forward_pass: Callable[[], Any]) -> None:
        hashed = hashlib.sha256()
        hooks = [
            layer.mlp.register_forward_hook(lambda _, __, output: hashed.update(output[0].detach().numpy().tobytes()))
            for layer in run.gpt.decoder.layers
        ]
        forward_pass()
        for hook in hooks:
            hook.remove()
        digests.append(hashed.hexdigest())

    with tiny_gpt.parallel(2):
        routes = occurring(0, top_k=4)
        plain, run = tiny_gpt.build(moe_router_topk=4), tiny_gpt.build(moe_router_topk=4)
        digest(plain, lambda: tiny_gpt.forward_backward(plain, 0, routes, forward_only=True))
        balancer = attach(
            run.models, run.optimizer, BalancerConfig(policy="static", replica_slots=0, placement_bitwise=True)
        )
        digest(run, lambda: forward(run, balancer, routes))
        for seed in range(3):
            balancer.reorder(random_placement(balancer, seed))
            digest(run, lambda: forward(run, balancer, routes))
    return digests


def static_rows_of_moved_homes() -> dict[str, Any]:
    """What the ranks computed where Megatron puts the experts, and what a pass with moved homes says of that."""
    with tiny_gpt.parallel(2):
        routes = occurring(0)
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, BalancerConfig(policy="static", replica_slots=0))
        _, at_home = forward(run, balancer, routes)
        home = balancer.megatron_placement.home_rank
        by_load = np.argsort(-balancer.load_of(routes).per_expert().sum(axis=(0, 1)), axis=1)
        crowded = np.zeros_like(home)
        np.put_along_axis(crowded, by_load[:, home.shape[1] // 2 :], 1, axis=1)  # the busiest experts on rank 0
        balancer.reorder(ExpertPlacement.from_home_rank(crowded, ep_size=2))
        _, moved = forward(run, balancer, routes)
    assert moved.static_rows is not None
    return {
        "at_home": at_home.actual_rows.tolist(),
        "moved": moved.actual_rows.tolist(),
        "static": moved.static_rows.tolist(),
    }


def bytes_of_an_update() -> list[dict[str, int]]:
    """What the counters say of one update, and what its plan asks of this rank, in bf16 and in float32."""
    found = []
    for changes in (BF16, {}):
        with tiny_gpt.parallel(2):
            run, routes = tiny_gpt.build(**changes), occurring(0)
            balancer = attach(run.models, run.optimizer, CONFIG)
            plan = balancer.begin_pass(PassSource.replayed(routes))
            tiny_gpt.update(run, 0, routes, tiny_gpt.history())
            counters, metrics = balancer.transport.counters, balancer.end_pass()
            rank = balancer.transport.rank
            host = plan.replicas.physical_id // plan.placement.slots_per_rank
            layer = plan.replicas.index_of_replica() % plan.placement.num_layers
            home = plan.placement.home_rank[layer, plan.replicas.expert]
            expert = run.gpt.decoder.layers[0].mlp.experts.local_experts[0]
            found.append(
                {
                    "hosted": int((host == rank).sum()),
                    "at_home": int((home == rank).sum()),
                    "expert_elements": sum(parameter.numel() for parameter in expert.parameters()),
                    "element_bytes": next(expert.parameters()).element_size(),
                    "pushed_bytes": metrics.pushed_bytes,
                    "returned_bytes": metrics.returned_bytes,
                    "pushes": counters.pushes,
                }
            )
    return found


def forward_only_plans() -> dict[str, Any]:
    """Predicted seconds of the same routes in a log-prob pass and in an update, by every way to ask for the plan."""
    with tiny_gpt.parallel(2):
        routes = occurring(0)
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, BalancerConfig(policy="moe-rl"))
        found: dict[str, Any] = {"update": balancer.plan(routes).predicted_cost_s}
        found["plan"] = balancer.plan(routes, forward_only=True).predicted_cost_s
        for forward_only in (True, False):
            name = "log-prob pass" if forward_only else "update pass"
            found[name] = balancer.begin_pass(PassSource.replayed(routes), forward_only=forward_only).predicted_cost_s
            tiny_gpt.forward_backward(run, 0, routes, forward_only=forward_only)
            balancer.end_pass()
        for forward_only in (True, False):
            name = "forecast log-prob pass" if forward_only else "forecast update pass"
            plan = balancer.begin_pass(PassSource.unknown(MICRO_BATCHES), forward_only=forward_only)
            found[name] = plan.predicted_cost_s
            tiny_gpt.forward_backward(run, 0, routes, forward_only=forward_only)
            balancer.end_pass()
    return found


def gradients_on_their_way() -> dict[str, dict[str, int]]:
    """How often a push or a return began while gradients of another layer were on their way, by what is recomputed."""
    found = {}
    for name, changes in RECOMPUTED.items():
        began = {"pushes": 0, "returns": 0, "beside a return": 0}

        def counted(kind: str, method: Any, began: dict[str, int] = began) -> Any:
            def call(self: Transport, *given: Any) -> Any:
                began[kind] += 1
                began["beside a return"] += self._returning is not None
                return method(self, *given)

            return call

        with tiny_gpt.parallel(4):
            run = tiny_gpt.build(num_layers=cross_node_cases.LAYERS, **changes)
            balancer = attach(run.models, run.optimizer, cross_node_cases.CONFIG)
            routes = cross_node_cases.routes_of(0)
            balancer.begin_pass(PassSource.given(cross_node_cases.plan_by_hand(balancer, routes), routes))
            with (
                patch.object(Transport, "start_push", counted("pushes", Transport.start_push)),
                patch.object(Transport, "start_return", counted("returns", Transport.start_return)),
            ):
                tiny_gpt.update(run, 0, routes, tiny_gpt.history())
            balancer.end_pass()
        found[name] = began
    return found


def plans_whatever_the_split() -> dict[str, list[bool]]:
    """Whether ranks that divide the layers plan what one rank does that plans all; with 2 and 4 ranks for 3 layers."""
    found = {}
    for ep_size in (2, 4):
        with tiny_gpt.parallel(ep_size):
            run = tiny_gpt.build(num_layers=3)
            routes = [tiny_gpt.skewed_routes(0, m, num_layers=3) for m in range(MICRO_BATCHES)]
            for policy in ("static", "ultraep", "moe-rl"):
                for objective in ("imbalance", "time"):
                    config = BalancerConfig(policy=policy, objective=objective, replica_slots=2)
                    balancer = attach(run.models, run.optimizer, config)
                    group = dist.get_rank() // ep_size
                    whole = plan_of_load(
                        balancer.load_of(routes), config=config, model=balancer.model, topology=balancer.topology
                    )
                    mine = balancer.plan(routes)
                    expected = whole.replicas.of_layers([0, 1, 2], group=group)
                    found[f"{policy} {objective} {ep_size}"] = [
                        np.array_equal(getattr(mine.replicas, name), getattr(expected, name))
                        for name in ("offsets", *REPLICA_COLUMNS)
                    ]
                    balancer.detach()
    return found


def plans_of_two_groups() -> dict[str, Any]:
    """A pass planned beforehand, EP group by EP group; each has other tokens, and so another plan."""
    with tiny_gpt.parallel(2):
        group = dist.get_rank() // 2
        routes = occurring(group)
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, CONFIG)
        plain = tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
        plan = balancer.plan(routes)
        balancer.begin_pass(PassSource.given(plan))
        loss = tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
        metrics = balancer.end_pass()
        asked = CONFIG.with_words(parameters={"tolerance": 0.1 * (dist.get_rank() == 3)})
        balancer.run.config = asked
        other_loss, other = forward(run, balancer, routes)
    return {
        "group": group,
        "hash": plan.hash,
        "losses": [plain, loss, other_loss],
        "misplaced": metrics.as_dict()["moe_rl/misplaced_share"],
        "replicas": [metrics.replicas, other.replicas],
        "misfits": [each.misfit and each.misfit.kind for each in (metrics, other)],
    }


def prepared_passes() -> dict[str, Any]:
    """Passes that were prepared while another ran, beside the same passes planned when they began."""
    found: dict[str, Any] = {"prepared": [], "at once": [], "plans": []}
    with tiny_gpt.parallel(2):
        for name in ("prepared", "at once"):
            run, curve = tiny_gpt.build(), tiny_gpt.history()
            balancer = attach(run.models, run.optimizer, CONFIG)
            prepared = name == "prepared"
            if prepared:
                balancer.prepare(PassSource.replayed(occurring(0)), forward_only=True)
                balancer.prepare(PassSource.replayed(occurring(0)))
            for step in range(3):
                for forward_only in (True, False):
                    source = None if prepared else PassSource.replayed(occurring(step))
                    found["plans"].append(balancer.begin_pass(source, forward_only=forward_only).hash)
                    if forward_only:
                        tiny_gpt.forward_backward(run, step, occurring(step), forward_only=True)
                    else:
                        if prepared and step < 2:
                            balancer.prepare(PassSource.replayed(occurring(step + 1)), forward_only=True)
                            balancer.prepare(PassSource.replayed(occurring(step + 1)))
                        tiny_gpt.update(run, step, occurring(step), curve)
                    metrics = balancer.end_pass()
                    found[name].append([metrics.replicas, metrics.actual_rows.tolist(), metrics.misfit is None])
            found[f"{name} curve"] = curve
    return found


def begins_before_it_is_ready() -> dict[str, Any]:
    """`prepare` returns while planning is held up; `begin_pass` waits for it, and not for one that is ready."""
    found: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, CONFIG)
        may_go, began = threading.Event(), threading.Event()

        def held_up(*given: Any, plan_pass: Any = PassPlanner.plan_pass) -> Any:
            began.set()
            may_go.wait()
            return plan_pass(*given)

        with patch.object(PassPlanner, "plan_pass", held_up):
            balancer.prepare(PassSource.replayed(occurring(0)), forward_only=True)
            began.wait()
            (waiting,) = balancer._queue.passes
            found["returned before it was planned"] = not waiting.parts[0].done()
            found["other"] = refusal(lambda: balancer.begin_pass(PassSource.replayed(occurring(1))))
            threading.Timer(0.2, may_go.set).start()
            balancer.begin_pass()
        tiny_gpt.forward_backward(run, 0, occurring(0), forward_only=True)
        held_up_s = balancer.end_pass().plan_wait_s
        balancer.prepare(PassSource.replayed(occurring(0)), forward_only=True)
        balancer._queue.passes[0].parts[0].result()
        balancer.begin_pass()
        tiny_gpt.forward_backward(run, 0, occurring(0), forward_only=True)
        found["waited longer"] = held_up_s > balancer.end_pass().plan_wait_s
    return found


def planning_fails_on_one_rank() -> dict[str, Any]:
    """Routes that are none, and a policy that fails, on rank 1 alone; what both ranks say, and the pass after it."""
    found: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, CONFIG)
        second, routes = dist.get_rank() == 1, occurring(0)
        nan = [np.where(each.numpy() == 0, np.nan, each.numpy()) for each in routes]
        balancer.prepare(PassSource.replayed(nan if second else routes))
        found["nan"] = refusal(balancer.begin_pass)
        outside = [each - 2 for each in routes]
        found["outside"] = refusal(lambda: balancer.begin_pass(PassSource.replayed(outside if second else routes)))

        def fails(*_: Any) -> Any:
            raise ZeroDivisionError("in the policy")

        with patch.object(PassPlanner, "_plan_share", fails if second else PassPlanner._plan_share):
            found["policy"] = refusal(
                lambda: balancer.begin_pass(PassSource.replayed(routes)), (InvalidInputError, ZeroDivisionError)
            )
        with patch.object(PassTables, "of_pass", fails if second else PassTables.of_pass):
            found["tables"] = refusal(
                lambda: balancer.begin_pass(PassSource.replayed(routes)), (InvalidInputError, ZeroDivisionError)
            )
        loss, metrics = forward(run, balancer, routes)
        found["then"] = [loss == tiny_gpt.forward_backward(run, 0, routes, forward_only=True), metrics.replicas]
    return found


def refusal(action: Callable[[], Any], kinds: Any = InvalidInputError) -> str:
    try:
        action()
    except kinds as error:
        return str(error)
    return ""


def experts_move_after_prepare() -> dict[str, Any]:
    """A pass that was prepared for other homes runs without replicas; the one prepared after it has them."""
    with tiny_gpt.parallel(2):
        run, routes = tiny_gpt.build(), occurring(0)
        balancer = attach(run.models, run.optimizer, CONFIG)
        plain = tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
        balancer.prepare(PassSource.replayed(routes), forward_only=True)
        balancer.reorder(random_placement(balancer, 0))
        balancer.prepare(PassSource.replayed(routes), forward_only=True)
        losses, metrics = [], []
        for _ in range(2):
            balancer.begin_pass()
            losses.append(tiny_gpt.forward_backward(run, 0, routes, forward_only=True))
            metrics.append(balancer.end_pass())
    return {
        "plain": plain,
        "losses": losses,
        "misfits": [each.misfit and each.misfit.sentence for each in metrics],
        "replicas": [each.replicas for each in metrics],
    }
