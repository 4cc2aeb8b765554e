"""The row of what remains to be planned where the dispatcher balances the ranks of a node by itself.

An engine (MoonEP, HybridEP, UltraEP) cannot change which rows a node gets. Sequences, homes across nodes and copies
that stay decide that, and a plan made before the step knows the rows that a rank can get at most.

Example: a launch script names HybridEP. Then the table starts with `moe-rl+hybridep`, a plan over HybridEP's own
copies. With `--domain-balance engine:moonep`, `moe-rl` itself is planned so, and comes first.
"""

from collections.abc import Sequence

from moe_rl.core.plan import Plan
from moe_rl.planner.registry import POLICIES
from moe_rl.study.conditions import MOE_RL
from moe_rl.study.scenario import Scenario


def leading_row(scenario: Scenario, policies: Sequence[str]) -> str:
    """Return the row that leads the table: `moe-rl` above the engine; empty if there is no engine, or no `moe-rl`.

    Where the user names the engine it is the row of `moe-rl`. Else it is a row of its own, beside that of `moe-rl` with
    its own copies.
    """
    engine = scenario.engine
    if engine is None or MOE_RL not in policies:
        return ""
    if scenario.problem.has_domain_engine:
        return MOE_RL
    return f"{MOE_RL}+{engine.removeprefix('engine:')}"


def planned_as(scenario: Scenario, name: str) -> tuple[Scenario, str]:
    """Return the scenario and the policy by which the row of this name is planned."""
    if name in POLICIES or scenario.engine is None:
        return scenario, name
    return scenario.over_engine(scenario.engine), MOE_RL


def remaining_levers(scenario: Scenario, name: str, plan: Plan) -> str:
    """Say what the row above the engine decides."""
    node, start_home = scenario.topology.node_of_rank, scenario.problem.starting_placement().home_rank
    num_moved = int((node[plan.placement.home_rank] != node[start_home]).sum())
    residents = int((plan.placement.resident_experts >= 0).sum())
    if plan.layout.same_cells(scenario.batch.layout):
        packing = "keeps the sequences where they are"
    else:
        packing = "packs the sequences"
    return (
        f"{scenario.engine} balances every node at dispatch. {name} adds what the engine does not do: it {packing}, "
        f"moves {num_moved:,} homes to other nodes and keeps {residents:,} resident copies."
    )


def in_order(policies: Sequence[str], leading: str) -> list[str]:
    """Return the rows of the table, the leading one first."""
    return [*filter(None, [leading]), *(name for name in policies if name != leading)]
