"""Cases of test_collectives.py: gradients are reduced in small buckets as they become ready, while EP groups of one
expert-DP group follow different plans."""

import standins  # noqa: F401, I001 - before Megatron

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import deep_ep
import grouped_cases
import tiny_gpt
import torch
from matrix_cases import NAMES
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from reorder_cases import SMALL, random_placement

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import Balancer, BalancerConfig, attach
from moe_rl.megatron.expert_views.grouped_module import grouped_spec
from moe_rl.megatron.param_gather import ParameterGather

BUCKET = 2000
"""Parameters: less than half an expert, which has 3 * 32 * 48."""
STEPS, MICRO_BATCHES = 2, 3
UNTIL_SEEN = 3
"""Steps after which weights that are one update old differ by far more than sums in another order."""
RECOMPUTED = {
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@contextmanager
def bucket_order(run: tiny_gpt.Run) -> Iterator[dict[str, list[int]]]:
    """The buckets of experts whose reduction and whose gather starts, by number, in the order in which it does."""
    groups = [group for model in run.models for group in model.expert_parallel_bucket_groups]
    number = {id(group): index for index, group in enumerate(groups)}
    started: dict[str, list[int]] = {"grad": [], "param": []}

    def noted(of: Callable[..., None], order: list[int]) -> Callable[..., None]:
        def start(self: Any, **how: Any) -> None:
            if id(self) in number:
                order.append(number[id(self)])
            of(self, **how)

        return start

    with contextlib.ExitStack() as stack:
        for kind, order in started.items():
            name = f"start_{kind}_sync"
            of = getattr(_ParamAndGradBucketGroup, name)
            stack.enter_context(patch.object(_ParamAndGradBucketGroup, name, noted(of, order)))
        yield started


def train(
    run: tiny_gpt.Run,
    balancer: Balancer | None,
    seen: list[dict[str, list[int]]],
    *,
    steps: int = STEPS,
    reorders: bool = True,
    shape: dict[str, int],
) -> tuple[dict[str, list[float]], list[int]]:
    """A few steps; the curve, and how many replicas this EP group had in each of them."""
    curve, replicas = tiny_gpt.history(), []
    for step in range(steps):
        routes = [tiny_gpt.skewed_routes(step, m, **shape) for m in range(MICRO_BATCHES)]
        with bucket_order(run) as started:
            if balancer is not None:
                if reorders:
                    balancer.reorder(random_placement(balancer, step))
                balancer.begin_pass(PassSource.replayed([tiny_gpt.held_rows(each) for each in routes]))
            tiny_gpt.update(run, step, routes, curve)
        seen.append(started)
        if balancer is not None:
            replicas.append(balancer.end_pass().replicas)
    return curve, replicas


def compare(
    config: BalancerConfig,
    spec_of: Callable[[Any], Any] = lambda spec: spec,
    *,
    steps: int = STEPS,
    reorders: bool = True,
    overlap_param_gather: bool = False,
    bucket_size: int | None = BUCKET,
    shape: dict[str, int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Plain Megatron and balanced, in the same buckets; expert-DP 2, so that two EP groups reduce together."""
    order: dict[str, list[dict[str, list[int]]]] = {"plain": [], "balanced": []}
    shape = shape or {}
    changes |= {NAMES[name]: value for name, value in shape.items()}
    with deep_ep.any_float(), tiny_gpt.parallel(2):
        build = functools.partial(tiny_gpt.build, spec_of, overlap_grad_reduce=True, bucket_size=bucket_size, **changes)
        plain, _ = train(grouped_cases.with_distinct_experts(build()), None, order["plain"], steps=steps, shape=shape)
        run = grouped_cases.with_distinct_experts(build(overlap_param_gather=overlap_param_gather))
        balancer = attach(run.models, run.optimizer, config)
        curve, replicas = train(run, balancer, order["balanced"], steps=steps, reorders=reorders, shape=shape)
    return {"plain": plain, "balanced": curve, "replicas": replicas, "order": order}


OWN = BalancerConfig(policy="ultraep", objective="imbalance")
GROUPED = BalancerConfig(policy="ultraep", objective="imbalance", experts="grouped", experimental=True)


def sequential() -> dict[str, Any]:
    return compare(OWN)


def sequential_allgather() -> dict[str, Any]:
    return compare(OWN, moe_token_dispatcher_type="allgather")


def sequential_layers_recomputed() -> dict[str, Any]:
    return compare(OWN, **RECOMPUTED["layers"])


def sequential_moe_recomputed() -> dict[str, Any]:
    return compare(OWN, **RECOMPUTED["moe"])


def grouped() -> dict[str, Any]:
    return compare(GROUPED)


def grouped_moe_recomputed() -> dict[str, Any]:
    return compare(GROUPED, **RECOMPUTED["moe"])


def grouped_module() -> dict[str, Any]:
    return compare(OWN, grouped_spec)


def te_grouped() -> dict[str, Any]:
    return compare(GROUPED, tiny_gpt.te_spec)


FUSED = {"gradient_accumulation_fusion": True}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}


def te_own() -> dict[str, Any]:
    return compare(OWN, tiny_gpt.te_spec)


def te_fused() -> dict[str, Any]:
    return compare(OWN, tiny_gpt.te_spec, **FUSED)


def te_fused_moe_recomputed() -> dict[str, Any]:
    return compare(OWN, tiny_gpt.te_spec, **FUSED, **RECOMPUTED["moe"])


def te_deepep() -> dict[str, Any]:
    return compare(OWN, tiny_gpt.te_spec, **FLEX, moe_permute_fusion=True)


def te_hybridep_fused() -> dict[str, Any]:
    return compare(OWN, tiny_gpt.te_spec, **FLEX, **FUSED, moe_flex_dispatcher_backend="hybridep")


def sequential_deepep() -> dict[str, Any]:
    return compare(OWN, **FLEX)


def bf16() -> dict[str, Any]:
    return compare(OWN, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)


GATHERED = {"overlap_param_gather": True}


def gathered() -> dict[str, Any]:
    return compare(OWN, **GATHERED)


def gathered_layers_recomputed() -> dict[str, Any]:
    return compare(OWN, **GATHERED, **RECOMPUTED["layers"])


def gathered_grouped() -> dict[str, Any]:
    return compare(GROUPED, **GATHERED)


def gathered_in_place() -> dict[str, Any]:
    return compare(OWN, reorders=False, **GATHERED)


def gathered_grouped_in_place() -> dict[str, Any]:
    return compare(GROUPED, reorders=False, **GATHERED)


def gathered_te_grouped() -> dict[str, Any]:
    return compare(GROUPED, tiny_gpt.te_spec, **GATHERED)


def gathered_te_fused() -> dict[str, Any]:
    return compare(OWN, tiny_gpt.te_spec, **FUSED, **GATHERED)


def gathered_across_nodes() -> dict[str, Any]:
    """Pushes to other nodes begin a layer early: for layers that have not waited for their weights themselves."""
    config = BalancerConfig(policy="moe-rl", objective="imbalance", ranks_per_node=1, cross_node_slots=1)
    return compare(config, reorders=False, **GATHERED)


def gathered_bf16() -> dict[str, Any]:
    return compare(OWN, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, **GATHERED)


def gathered_without_replicas() -> dict[str, Any]:
    """Grouped experts read the weights past the module, whose hook would wait for them."""
    return compare(BalancerConfig(policy="static", experts="grouped"), steps=UNTIL_SEEN, reorders=False, **GATHERED)


def gathered_and_not_waited_for() -> dict[str, Any]:
    """The fault that the wait prevents, for the comparison to see."""
    with patch.object(ParameterGather, "wait", lambda self: None):
        return compare(GROUPED, steps=UNTIL_SEEN, reorders=False, **GATHERED)


def gathered_and_moved() -> dict[str, Any]:
    """One bucket of all experts: an expert lies in another rank's shard when it has moved, in part or as a whole."""
    return compare(OWN, steps=UNTIL_SEEN, bucket_size=None, shape=SMALL, **GATHERED)


def gathered_and_moved_in_part() -> dict[str, Any]:
    """The same where a reorder does not wait for what the rank has no shard of."""
    with patch.object(ParameterGather, "complete", lambda self: None):
        return compare(OWN, steps=UNTIL_SEEN, bucket_size=None, shape=SMALL, **GATHERED)
