"""Cases of test_replication.py: the same training with and without replicas, and what breaks it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import tiny_gpt
import torch

from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.streams import Arrival
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron import Balancer, BalancerConfig, attach, elastic_spec
from moe_rl.megatron.exchange import ReplicatedExperts
from moe_rl.megatron.transport import Transport
from moe_rl.profiling import ranges

STEPS = 4
MICRO_BATCHES = 3
ONE_STEP = 2

Curve = dict[str, list[float]]
Routes = list[torch.Tensor]


def occurring(step: int, *, top_k: int = 2, count: int = MICRO_BATCHES) -> Routes:
    return [tiny_gpt.skewed_routes(step, m, top_k=top_k) for m in range(count)]


def as_they_occur(routes: Routes, step: int) -> Routes:
    return routes


def balanced(
    run: tiny_gpt.Run,
    *,
    steps: int = STEPS,
    config: BalancerConfig | None = None,
    predict: Callable[[Routes, int], Routes] = as_they_occur,
    routes_of: Callable[[int], Routes] = occurring,
    around: Callable[[Balancer], contextlib.AbstractContextManager[Any]] = lambda _: contextlib.nullcontext(),
) -> tuple[Curve, list[dict[str, float]]]:
    """Train with a balancer; `predict` turns the routes that will occur into those that the balancer is told."""
    balancer = attach(run.models, run.optimizer, config or BalancerConfig(policy="ultraep", objective="imbalance"))
    curve, metrics = tiny_gpt.history(), []
    with around(balancer):
        for step in range(steps):
            routes = routes_of(step)
            balancer.begin_pass(PassSource.replayed([tiny_gpt.held_rows(r) for r in predict(routes, step)]))
            tiny_gpt.update(run, step, routes, curve)
            metrics.append(balancer.end_pass().as_dict())
    balancer.detach()
    return curve, metrics


def compare(
    ep_size: int,
    *,
    config: BalancerConfig | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """Plain training, and balanced training twice: attached to a built model, and put in by layer spec."""
    top_k = changes.get("moe_router_topk", 2)

    def routes_of(step: int) -> Routes:
        return occurring(step, top_k=top_k)

    with tiny_gpt.parallel(ep_size, tensor=tensor, pipeline=pipeline):
        plain = tiny_gpt.train(tiny_gpt.build(**changes), steps=STEPS, micro_batches=MICRO_BATCHES, top_k=top_k)
        first, metrics = balanced(tiny_gpt.build(**changes), config=config, routes_of=routes_of)
        second, _ = balanced(tiny_gpt.build(elastic_spec, **changes), config=config, routes_of=routes_of)
    return {"plain": plain, "balanced": first, "again": second, "metrics": metrics}


def alltoall() -> dict[str, Any]:
    return compare(2)


def allgather() -> dict[str, Any]:
    return compare(2, moe_token_dispatcher_type="allgather")


def overlapped_gradient_reduction() -> dict[str, Any]:
    return compare(2, overlap_grad_reduce=True)


def full_recompute() -> dict[str, Any]:
    return compare(2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def moe_recompute() -> dict[str, Any]:
    return compare(2, recompute_granularity="selective", recompute_modules=["moe"])


def shared_experts_and_aux_loss() -> dict[str, Any]:
    return compare(
        2,
        moe_shared_expert_intermediate_size=32,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
    )


def expert_bias_and_linear_bias() -> dict[str, Any]:
    return compare(
        2,
        add_bias_linear=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=1e-3,
    )


def bf16() -> dict[str, Any]:
    return compare(2, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)


def ep4_in_two_nodes() -> dict[str, Any]:
    return compare(4, config=BalancerConfig(policy="ultraep", objective="imbalance", ranks_per_node=2))


def ep4_two_slots_top4() -> dict[str, Any]:
    return compare(
        4, config=BalancerConfig(policy="ultraep", objective="imbalance", replica_slots=2), moe_router_topk=4
    )


def tp2_ep2() -> dict[str, Any]:
    return compare(2, tensor=2)


def pp2_ep2() -> dict[str, Any]:
    return compare(2, pipeline=2)


def pp2_ep2_full_recompute() -> dict[str, Any]:
    return compare(2, pipeline=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def ep2_expert_dp2() -> dict[str, Any]:
    return compare(2)


def wrong_predictions() -> dict[str, Any]:
    """Routes shuffled, of another step, partly and wholly missing: same loss, worse balance."""

    def shuffled(routes: Routes, step: int) -> Routes:
        return [(routes[m] + 3) % tiny_gpt.NUM_EXPERTS for m in range(MICRO_BATCHES)]

    def stale(routes: Routes, step: int) -> Routes:
        return occurring(step + 50)

    def partly_missing(routes: Routes, step: int) -> Routes:
        known = [r.clone() for r in routes]
        for micro_batch, r in enumerate(known):
            r[micro_batch::3] = -1
        return known

    def missing(routes: Routes, step: int) -> Routes:
        return [torch.full_like(r, -1) for r in routes]

    with tiny_gpt.parallel(2):
        found: dict[str, Any] = {"right": balanced(tiny_gpt.build(), steps=ONE_STEP)}
        for predict in (shuffled, stale, partly_missing, missing):
            found[predict.__name__] = balanced(tiny_gpt.build(), steps=ONE_STEP, predict=predict)
    return found


def extreme_routes() -> dict[str, Any]:
    """All tokens to one rank's experts (the other rank has none), and experts without any token."""

    def all_to_first(step: int) -> Routes:
        routes = [torch.zeros_like(r) for r in occurring(step)]
        for r in routes:
            r[..., 1] = 1
        return routes

    found = {}
    with tiny_gpt.parallel(2):
        for name, shift in (("first_rank", 0), ("last_rank", 6)):

            def routes_of(step: int, shift: int = shift) -> Routes:
                return [r + shift for r in all_to_first(step)]

            plain = tiny_gpt.history()
            run = tiny_gpt.build()
            for step in range(ONE_STEP):
                tiny_gpt.update(run, step, routes_of(step), plain)
            found[name] = [plain, *balanced(tiny_gpt.build(), steps=ONE_STEP, routes_of=routes_of)]
    return found


@contextlib.contextmanager
def poisoned(balancer: Balancer, *, told: bool) -> Iterator[None]:
    """Overwrite the replica buffers with NaN after every forward; `told` says whether the runtime is told so."""

    def poison(*_: Any) -> None:
        buffers = balancer.transport.buffers
        buffers.weights.fill_(float("nan"))
        buffers.gradients.fill_(float("nan"))
        if told:
            buffers.forget()

    handles = [layer.register_forward_hook(poison) for layer in balancer.layers]
    yield
    for handle in handles:
        handle.remove()


def poisoned_buffers() -> dict[str, Any]:
    """NaN in the buffers between forward and backward does not reach the loss, unless the runtime trusts it."""
    with tiny_gpt.parallel(2):
        clean, _ = balanced(tiny_gpt.build(), steps=ONE_STEP)
        poison, _ = balanced(tiny_gpt.build(), steps=ONE_STEP, around=lambda b: poisoned(b, told=True))
        trusted, _ = balanced(tiny_gpt.build(), steps=ONE_STEP, around=lambda b: poisoned(b, told=False))
    return {"clean": clean, "poisoned": poison, "trusted": trusted}


def controls() -> dict[str, Any]:
    """What a fault in the exchange does to the curve: each must be visible to the comparison of the other tests."""

    def fold_nothing(self: Transport, copy: Any, *_: Any) -> None:
        return

    def push_nothing(self: ReplicatedExperts) -> None:
        return

    with tiny_gpt.parallel(2):
        found: dict[str, Any] = {"right": balanced(tiny_gpt.build(), steps=ONE_STEP)[0]}
        with patch.object(Transport, "_fold", fold_nothing):
            found["gradient_lost"] = balanced(tiny_gpt.build(), steps=ONE_STEP)[0]
        with patch.object(ReplicatedExperts, "start_push", push_nothing):
            found["weights_not_pushed"] = balanced(tiny_gpt.build(), steps=ONE_STEP)[0]
        with patch.object(Arrival, "join", lambda self: None):  # late: weights are NaN until somebody waits
            found["push_not_awaited"] = balanced(tiny_gpt.build(), steps=ONE_STEP)[0]
    return found


def static_costs_nothing() -> dict[str, Any]:
    """Collectives and point-to-point calls of a pass, plain and with an empty plan; and the bits of the curve."""
    with tiny_gpt.parallel(2):
        plain_run, run = tiny_gpt.build(), tiny_gpt.build()
        tiny_gpt.RouterReplay.global_router_replay_instances[:] = []
        with counted() as plain_calls:
            plain = tiny_gpt.forward_backward(plain_run, 0, occurring(0))
        balancer = attach([run.model], run.optimizer, BalancerConfig(policy="static"))
        keys = sorted(run.model.state_dict())
        balancer.begin_pass(PassSource.replayed(occurring(0)))
        with counted() as calls:
            loss = tiny_gpt.forward_backward(run, 0, occurring(0))
        metrics = balancer.end_pass().as_dict()
        gradient = [float(b.grad_data.double().sum()) for b in run.model.expert_parallel_buffers]
        plain_gradient = [float(b.grad_data.double().sum()) for b in plain_run.model.expert_parallel_buffers]
    return {
        "plain": [plain, plain_gradient, plain_calls],
        "static": [loss, gradient, calls],
        "keys": [keys, sorted(plain_run.model.state_dict())],
        "metrics": metrics,
    }


def named_ranges() -> list[str]:
    """Names of ours that torch.profiler sees in one balanced pass."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach([run.model], run.optimizer, BalancerConfig(policy="ultraep", objective="imbalance"))
        ranges.enable(nvtx=True, record_function=True)
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                balancer.begin_pass(PassSource.replayed(occurring(0)))
                tiny_gpt.forward_backward(run, 0, occurring(0))
                balancer.end_pass()
                run.model.zero_grad_buffer()  # experts stay while gradients wait
                home = balancer.placement.home_rank
                balancer.reorder(ExpertPlacement.from_home_rank(home[:, ::-1], ep_size=2, spare_slots=1))
        finally:
            ranges.disable()
    return sorted({event.name for event in profile.events() if event.name.startswith("moe_rl/")})


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the calls of torch.distributed inside the context."""
    calls: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce", "isend", "irecv", "broadcast"):
            original = getattr(torch.distributed, name)

            def call(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                calls[_name] = calls.get(_name, 0) + 1
                return _original(*args, **kwargs)

            stack.enter_context(patch.object(torch.distributed, name, call))
        yield calls
