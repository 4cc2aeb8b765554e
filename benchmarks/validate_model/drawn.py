"""Steps of Qwen3-30B-A3B under drawn routing of a chosen severity, planned and simulated by policy."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.dirichlet import DirichletScenario, dirichlet_steps, expected_load
from moe_rl.config import load_cluster, load_model
from moe_rl.core.layout import BatchLayout
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import make_planner
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import cost_params_for, simulate_policies

LAYERS, MICRO_BATCHES = 16, 8


def planned(
    scenario: DirichletScenario,
    *,
    ep_size: int,
    tokens: int,
    setting: StepSetting,
    cluster: str = "h100",
    names: tuple[str, ...] = ("static", "eplb-oracle", "relibra"),
) -> Callable[[StepSetting], SimulationResult]:
    """Plan once under `setting`; return what simulates the plans."""
    whole = load_model("qwen3-30b-a3b").spec
    # A third of the layers: the vocabulary projection shrinks with them, so that its share stays what it is.
    model = replace(
        whole, num_layers=LAYERS, moe_layer_ids=tuple(range(LAYERS)), vocab_size=whole.vocab_size * LAYERS // 48
    )
    hardware = load_cluster(cluster)
    topology = ClusterTopology(hardware=hardware, ep_size=ep_size, ranks_per_node=min(ep_size, hardware.ranks_per_node))
    previous, current = dirichlet_steps(scenario, num_layers=LAYERS, num_experts=128, top_k=8)
    history, load = (
        expected_load(step, topology=topology, tokens_per_rank=tokens, top_k=8) for step in (previous, current)
    )
    cells = MICRO_BATCHES * ep_size
    layout = BatchLayout(
        micro_batch=np.repeat(np.arange(MICRO_BATCHES, dtype=np.int32), ep_size),
        dp_rank=np.tile(np.arange(ep_size, dtype=np.int32), MICRO_BATCHES),
        order=np.zeros(cells, np.int32),
        num_micro_batches=MICRO_BATCHES,
        num_dp_ranks=ep_size,
        fixed=True,
    )
    step = TrainingStep(
        load=load,
        layout=layout,
        lengths=np.full(cells, tokens),
        model=model,
        topology=topology,
        setting=setting,
    )
    problem = PlanProblem(
        load=load,
        layout=layout,
        model=model,
        topology=topology,
        cost=cost_params_for(step),
        history=history,
        replica_slots=2,
    )
    plans = {name: make_planner(name).plan(problem) for name in names}
    return lambda simulated: simulate_policies(plans, replace(step, setting=simulated))
