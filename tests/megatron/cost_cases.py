"""Cases of test_cost.py: what an attached balancer adds to a run, counted in calls and in bytes."""

import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from reorder_cases import random_placement, routes_of
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rl.balancing import migrate
from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import BalancerConfig, attach

SLOTS = [(1, 0), (2, 1), (0, 2), (0, 0)]
"""(R, C)"""
SLOT_TABLES = 4096
"""Bytes that tables of slots may take (test_cost.py asks it)."""


class CountedCalls(TorchDispatchMode):
    """Counts every operation that reaches a device, by name: compute, copies, collectives and point-to-point."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class AllocatedBytes(TorchDispatchMode):
    """Keeps every storage that an operation makes, to ask later which of them are still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[Any, bool, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._made[storage._cdata] = (storage._weak_ref(), each.is_floating_point(), storage.nbytes())
        return result

    def alive(self) -> dict[str, int]:
        """Bytes of floating-point and of other storages that are still there.

        gloo's own thread lets go of a collective's tensors only after it has woken the waiting one; on a busy machine
        that is many milliseconds later (49 kB of a finished gather were counted once).
        """
        deadline = time.monotonic() + 10.0
        while (found := self._alive())["other"] >= SLOT_TABLES and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _alive(self) -> dict[str, int]:
        gc.collect()
        found = {"float": 0, "other": 0}
        for reference, is_float, num_bytes in self._made.values():
            if not torch.UntypedStorage._expired(reference):
                found["float" if is_float else "other"] += num_bytes
        return found


def counted(action: Callable[[], Any]) -> dict[str, int]:
    """What `action` calls, by name."""
    with CountedCalls() as counter:
        action()
    return dict(counter.calls)


def empty_plan() -> dict[str, Any]:
    """Calls of the second training step: plain, attached without a pass, with an empty plan, and with replicas."""
    found: dict[str, Any] = {}

    def second_step(policy: str = "", *, with_pass: bool = False) -> dict[str, int]:
        run, routes = tiny_gpt.build(), routes_of(0)
        tiny_gpt.update(run, 0, routes, tiny_gpt.history())  # makes the optimizer's state
        if policy:
            balancer = attach(run.models, run.optimizer, BalancerConfig(policy=policy, objective="imbalance"))
        if with_pass:
            balancer.begin_pass(PassSource.replayed(routes))
        calls = counted(lambda: tiny_gpt.update(run, 0, routes, tiny_gpt.history()))
        if with_pass:
            balancer.end_pass()
        return calls

    with tiny_gpt.parallel(2):
        found["plain"] = second_step()
        found["attached"] = second_step("static")
        found["empty_plan"] = second_step("static", with_pass=True)
        found["replicas"] = second_step("ultraep", with_pass=True)
    return found


WAITS = (
    "aten.nonzero.default",
    "aten._local_scalar_dense.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.is_nonzero.default",
    "aten.repeat_interleave.Tensor",
)
"""Operations after which the host waits for a device: it needs a number that is there, or the size of a result."""


def host_waits() -> dict[str, dict[str, int]]:
    """How often a top-8 step makes the host wait: plain, and with replicas and moved homes under several settings."""
    shape = {"num_experts": 16, "top_k": 8}
    changes = {"num_moe_experts": 16, "moe_router_topk": 8}
    found = {}

    def step(config: BalancerConfig | None) -> dict[str, int]:
        run, routes = tiny_gpt.build(**changes), routes_of(0, **shape)
        curve = tiny_gpt.history()
        if config is not None:
            balancer = attach(run.models, run.optimizer, config)
            balancer.reorder(random_placement(balancer, 0))
            plan = balancer.begin_pass(PassSource.replayed(routes))
            assert plan.replicas.copies > 0
        calls = counted(lambda: tiny_gpt.update(run, 0, routes, curve))
        return {name: calls.get(name, 0) for name in WAITS}

    with tiny_gpt.parallel(2):
        found["plain"] = step(None)
        for name, settings in {
            "own experts": {},
            "grouped experts": {"experts": "grouped"},
            "placement_bitwise": {"placement_bitwise": True},
        }.items():
            found[name] = step(BalancerConfig(policy="ultraep", objective="imbalance", **settings))
    return found


def reorder_calls() -> dict[str, Any]:
    """Calls of a reorder that moves nothing, and of one that moves something."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, BalancerConfig(policy="static"))
        tiny_gpt.update(run, 0, routes_of(0), tiny_gpt.history())
        target = random_placement(balancer, 0)
        found = {"moves": counted(lambda: balancer.reorder(target))}
        found["again"] = counted(lambda: balancer.reorder(target))
    return found


def buffer_memory() -> list[dict[str, int]]:
    """Bytes that attach keeps, for several numbers of replica slots, in fp32 and bf16; and those of one expert."""
    found = []
    with tiny_gpt.parallel(2):
        for dtype in (torch.float32, torch.bfloat16):
            for replica_slots, cross_node_slots in SLOTS:
                run = tiny_gpt.build(bf16=dtype == torch.bfloat16, params_dtype=dtype, pipeline_dtype=dtype)
                config = BalancerConfig(
                    policy="moe-rl", replica_slots=replica_slots, cross_node_slots=cross_node_slots, ranks_per_node=1
                )
                with AllocatedBytes() as allocated:
                    balancer = attach(run.models, run.optimizer, config)
                expert = list(run.gpt.decoder.layers[0].mlp.experts.local_experts[0].parameters())
                found.append(
                    {
                        "slots": replica_slots + 2 * cross_node_slots,
                        "weights": sum(p.nbytes for p in expert),
                        "gradient": sum(p.numel() * 4 for p in expert),
                        "buffer_bytes": balancer.buffer_bytes,
                        **allocated.alive(),
                    }
                )
                balancer.detach()
    return found


def scratch_memory() -> list[dict[str, Any]]:
    """Scratch bytes and rounds of one reorder of every expert, by the limit that it was given."""
    found: list[dict[str, Any]] = []
    with tiny_gpt.parallel(2):
        for limit in (0, 2**17, 2**18, 2**30):
            run = tiny_gpt.build()
            tiny_gpt.update(run, 0, routes_of(0), tiny_gpt.history())
            balancer = attach(run.models, run.optimizer, BalancerConfig(reorder_scratch_bytes=limit))
            made, rounds, scratch, exchange = [], [], migrate._scratch, migrate._exchange

            def noted_scratch(*given: Any, made: list = made, scratch: Any = scratch, **named: Any) -> torch.Tensor:
                made.append(scratch(*given, **named))
                return made[-1]

            def noted_exchange(*given: Any, rounds: list = rounds, exchange: Any = exchange) -> None:
                rounds.append(1)
                exchange(*given)

            with patch.object(migrate, "_scratch", noted_scratch), patch.object(migrate, "_exchange", noted_exchange):
                before, after = balancer.megatron_placement, random_placement(balancer, 5)
                received = balancer.reorder(after)
            maps = (before.physical_to_logical_map, after.physical_to_logical_map)
            homes_before, homes_after = (slots[slots >= 0].reshape(len(slots), -1) for slots in maps)
            changed = homes_before != homes_after
            expert = sum(p.nbytes for p in run.gpt.decoder.layers[0].mlp.experts.local_experts[0].parameters())
            found.append(
                {
                    "limit": limit,
                    "two_experts": 2 * 3 * expert,
                    "scratch": made[0].nbytes,
                    "rounds": len(rounds),
                    "received": received,
                    "changed": 3 * expert * int(np.split(changed, 2, axis=1)[dist.get_rank()].sum()),
                }
            )
        dist.barrier()
    return found
