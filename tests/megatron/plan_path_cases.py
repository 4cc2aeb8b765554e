"""Cases of test_plan_path.py: what plans say of rows and of copies between nodes, and what ranks then send."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.schedule import plan_of_load
from moe_rl.core.visits import count_visits
from moe_rl.megatron import BalancerConfig, attach
from moe_rl.simulators.movement import moved_bytes
from moe_rl.simulators.pricing import StepPricing
from moe_rl.simulators.setting import StepSetting, TrainingRun

LAYERS, MICRO_BATCHES, RANKS_PER_NODE = 2, 6, 2
SLOW = str(Path(__file__).with_name("slow_cluster.yaml"))


@contextmanager
def copies_sent(*, deduplicated: bool = True) -> Iterator[list[int]]:
    """What this rank sends: for every run of a layer, how many (token, other node) pairs its slots make, or rows."""
    sent, preprocess = [], MoELayer.preprocess
    nodes = parallel_state.get_expert_model_parallel_world_size() // RANKS_PER_NODE
    own = parallel_state.get_expert_model_parallel_rank() // RANKS_PER_NODE

    def counted(self: Any, hidden_states: Any, probs: Any, routing_map: torch.Tensor) -> Any:
        visited = routing_map.view(len(routing_map), nodes, -1).sum(dim=2)
        visited = visited.clamp(max=1) if deduplicated else visited
        sent.append(int(visited.sum() - visited[:, own].sum()))
        return preprocess(self, hidden_states, probs, routing_map)

    with patch.object(MoELayer, "preprocess", counted):
        yield sent


def replayed() -> list[dict[str, Any]]:
    """Two steps of homes, residents, replicas and copies across nodes: predicted, and what was done."""
    config = BalancerConfig(
        policy="moe-rl",
        cluster=SLOW,
        dispatcher="deepep",
        cross_node_slots=1,
        resident_slots=1,
        ranks_per_node=RANKS_PER_NODE,
    )
    found = []
    with tiny_gpt.parallel(4):
        run = tiny_gpt.build(num_layers=LAYERS, moe_ffn_hidden_size=16)
        balancer = attach(run.models, run.optimizer, config)
        for step in range(2):
            routes = [tiny_gpt.skewed_routes(step, m, num_layers=LAYERS) for m in range(MICRO_BATCHES)]
            load = balancer.load_of(routes)
            received = balancer.reorder(balancer.plan_reorder(routes))
            plan = balancer.plan(routes)  # with the columns of all ranks
            balancer.begin_pass(PassSource.replayed(routes))
            with copies_sent() as sent:
                tiny_gpt.update(run, step, routes, tiny_gpt.history())
            metrics = balancer.end_pass()
            assert metrics.predicted_rows is not None
            between = count_visits(plan, load, balancer.topology).between_nodes[0].sum(axis=(-1, -2))
            executed = torch.tensor(sent).view(MICRO_BATCHES, LAYERS)
            dist.all_reduce(executed)
            found.append(
                {
                    "received": received,
                    "rows": [metrics.predicted_rows.tolist(), metrics.actual_rows.tolist()],
                    "copies": [np.rint(between).astype(int).tolist(), executed.tolist()],
                    "static": int(count_visits_of_homes(balancer, load)),
                    "residents": int((plan.placement.resident_experts >= 0).sum()),
                    "replicas": plan.replicas.copies,
                    "across": plan.cross_node_replicas_per_plan(balancer.topology.node_of_rank),
                }
            )
    return found


def count_visits_of_homes(balancer: Any, load: Any) -> float:
    """Copies between nodes where Megatron puts the experts."""
    static = plan_of_load(
        load,
        config=BalancerConfig(policy="static", replica_slots=0, ranks_per_node=RANKS_PER_NODE),
        model=balancer.model,
        topology=balancer.topology,
    )
    return float(count_visits(static, load, balancer.topology).between_nodes.sum())


NOTHING = {"replica_slots": 0, "ranks_per_node": RANKS_PER_NODE, "cluster": SLOW, "dispatcher": "deepep"}
LEVERS: dict[str, tuple[bool, dict[str, Any]]] = {
    "none": (False, {"policy": "static"}),
    "homes": (True, {}),
    "homes and resident copies": (True, {"resident_slots": 1}),
    "replicas inside the node": (False, {"replica_slots": 1}),
    "copies across nodes": (False, {"cross_node_slots": 1}),
    "all of them": (True, {"replica_slots": 1, "cross_node_slots": 1, "resident_slots": 1}),
}
"""Whether experts may move, and slots."""


def levers() -> dict[str, dict[str, list[int]]]:
    """Of an update by every lever: rows of the busiest rank, copies between nodes, bytes; as predicted, and done."""
    found = {}
    with tiny_gpt.parallel(4):
        for name, (moves, slots) in LEVERS.items():
            run = tiny_gpt.build(
                num_layers=LAYERS, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16
            )
            balancer = attach(run.models, run.optimizer, BalancerConfig(**NOTHING | slots))
            tiny_gpt.update(run, 1, [tiny_gpt.skewed_routes(1, 0)], tiny_gpt.history())  # so that Adam has its moments
            routes = [tiny_gpt.skewed_routes(0, m, num_layers=LAYERS) for m in range(MICRO_BATCHES)]
            load = balancer.load_of(routes)
            setting = StepSetting()
            pricing = StepPricing.without_windows(
                TrainingRun(model=balancer.model, topology=balancer.topology, setting=setting)
            )
            predicted = received = 0
            if moves:
                homes = balancer.plan_reorder(routes)
                predicted, received = homes.migration.moved_bytes, balancer.reorder(homes)
            plan = balancer.plan(routes)  # with the columns of all ranks
            balancer.begin_pass(PassSource.replayed(routes))
            predicted += moved_bytes(plan, pricing)
            with copies_sent() as sent:
                tiny_gpt.update(run, 0, routes, tiny_gpt.history())
            metrics = balancer.end_pass()
            assert metrics.predicted_rows is not None
            between = count_visits(plan, load, balancer.topology).between_nodes.sum()
            done = torch.tensor([sum(sent), received + metrics.pushed_bytes + metrics.returned_bytes])
            dist.all_reduce(done)
            rows = [int(each.max(axis=2).sum()) for each in (metrics.predicted_rows, metrics.actual_rows)]
            moved = [predicted, int(done[1])]
            found[name] = {"rows": rows, "copies": [round(float(between)), int(done[0])], "bytes": moved}
    return found
