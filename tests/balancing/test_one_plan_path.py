"""What a simulation promises is what a run plans: ranks that know their own rows alone, beside the whole trace."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.in_memory_exchange import InMemory, on_all_ranks
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_request import PassRequest
from moe_rl.balancing.pass_source import CountedRows
from moe_rl.core.native import native_core
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.base import COPIES, PLACEMENT, Levers
from moe_rl.planner.registry import make_planner
from moe_rl.study.options import SimulationOptions
from moe_rl.study.plan_and_price import pricing_of
from moe_rl.study.scenario import Scenario, state_scenario

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native_core() is None, reason="the C++ core is not built"),
]
EP_SIZE = 32


@cache
def scenario_of(trace: Path, resident_slots: int, dispatcher: str) -> Scenario:
    """GPT-OSS-20B routing, 32 ranks in nodes of 8, a slot across nodes, nothing packed."""
    options = SimulationOptions(
        model="gpt-oss-20b",
        cluster="h100",
        expert_model_parallel_size=EP_SIZE,
        ranks_per_node=8,
        ep_group_tokens=2048,
        tokens_per_rank=8192,
        cross_node_slots=1,
        resident_slots=resident_slots,
        moe_token_dispatcher_type=dispatcher,
        policy=["moe-rl-unpacked"],
    )
    return state_scenario(trace, options, lambda *_: None)


@dataclass(frozen=True)
class Run:
    """The ranks of one EP group, each with its own rows of the scenario."""

    scenario: Scenario

    @property
    def config(self) -> BalancerConfig:
        """What a user would set."""
        problem = self.scenario.problem
        return BalancerConfig(
            policy="moe-rl",
            ranks_per_node=8,
            cross_node_slots=problem.cross_node_slots,
            resident_slots=problem.resident_slots,
        )

    def rows(self, rank: int) -> RankRows:
        """Return what a rank knows: its slice of every micro-batch, counts scaled as those of the scenario are."""
        batch, model = self.scenario.batch, self.scenario.model.spec
        (part,) = batch.parts
        first = np.cumsum(batch.lengths) - batch.lengths
        held = []
        for micro_batch in range(batch.layout.num_micro_batches):
            inside = np.flatnonzero(batch.layout.micro_batch == micro_batch)
            inside = inside[np.argsort(batch.layout.order[inside])]
            tokens = np.concatenate([np.arange(first[one], first[one] + batch.lengths[one]) for one in inside])
            mine = tokens[np.arange(len(tokens)) * EP_SIZE // len(tokens) == rank]
            held.append(part.routed_experts[mine[part.valid[mine]]])
        rows = RankRows.of(held, model=model, layers=range(model.num_moe_layers))
        return replace(rows, pairs=batch.load.pairs[0, :, :, rank], rows=batch.load.tokens[0, :, rank])

    def planned(self, may: Levers, placement: ExpertPlacement) -> Plan:
        """Return the plan that all ranks make together, the same on each."""
        model, setting = self.scenario.model.spec, self.scenario.training_step.setting

        def of_rank(exchange: InMemory) -> Plan:
            planner = PassPlanner(exchange, layers=range(model.num_moe_layers), model=model, setting=setting)
            request = PassRequest(config=self.config, placement=placement, may=may, whole_plan=True)
            return planner.plan_pass(request, CountedRows(self.rows(exchange.rank))).plan

        plans = on_all_ranks(EP_SIZE, of_rank)
        assert len({plan.hash for plan in plans}) == 1
        return replace(plans[0], layout=self.scenario.batch.layout)

    def start(self) -> ExpertPlacement:
        """Return Megatron's placement with the slots of the configuration."""
        return self.scenario.problem.starting_placement().with_slots(
            resident_slots=self.config.slots.resident_slots, spare_slots=self.config.slots.spare
        )

    def reordered(self) -> Plan:
        """Return the plan of a pass after a reorder for the same batch, which pays for the moves."""
        moved = self.planned(PLACEMENT, self.start())
        return replace(self.planned(COPIES, moved.placement), migration=moved.migration)


def of_forced_balance(scenario: Scenario, plans: dict[str, Plan]) -> dict[str, float]:
    """Return the speed of the step under each plan as the simulator sees it, forced balance being 1."""
    simulate, _ = pricing_of(scenario, plans)
    policies = simulate(scenario.training_step.setting).policies
    return {name: float(one.prediction.fraction_of_forced_balance or 0) for name, one in policies.items()}


@pytest.mark.parametrize(("resident_slots", "dispatcher"), [(0, "flex"), (1, "flex"), (1, "alltoall")])
def test_a_run_plans_what_simulate_promises(dev_trace_path: Path, resident_slots: int, dispatcher: str) -> None:
    scenario = scenario_of(dev_trace_path, resident_slots, dispatcher)
    run = Run(scenario).reordered()
    promised = make_planner("moe-rl").plan(scenario.problem, PLACEMENT)
    found = of_forced_balance(scenario, {"run": run, "simulate": promised})
    assert found["run"] == pytest.approx(found["simulate"], rel=0.01)
    filled = [int((plan.placement.resident_experts >= 0).sum()) for plan in (run, promised)]
    assert filled[0] >= 0.95 * filled[1]
    if resident_slots and dispatcher == "flex":
        assert found["run"] >= 1.07


def test_copies_alone_reach_forced_balance(dev_trace_path: Path) -> None:
    """No expert moves: what `begin_pass(PassSource.replayed(routes))` plans by itself."""
    scenario = scenario_of(dev_trace_path, 0, "flex")
    run = Run(scenario).planned(COPIES, Run(scenario).start())
    promised = make_planner("moe-rl").plan(scenario.problem, COPIES)
    found = of_forced_balance(scenario, {"run": run, "simulate": promised})
    assert run.migration.moved_bytes == 0
    assert found["run"] == pytest.approx(found["simulate"], rel=0.01)
    assert found["run"] >= 1.0
