"""A board of plans: `moe-rl bench planner --board PLAN.npz`, by a judge that shares nothing with the planner.

Three splits of the bundled trace are frozen: its last step in order, 1,024 tokens per EP group and micro-batch as
shares of 8,192 per rank, EP8, 16 and 32 on H100, one replica slot. A plan of any maker is a file that
`Plan.save` wrote; it is scored on the split of its EP size. `tests/plan_recount.py` counts in plain loops
whether the plan keeps its promises, and its rows, of our own policies too.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.core.errors import require
from moe_rl.core.plan import Plan
from moe_rl.core.plan_file import load_plan
from moe_rl.planner.registry import POLICIES
from moe_rl.study import Scenario, SimulationOptions, load_under, make_plans, open_scenario
from moe_rl.study.plan_and_price import pricing_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

TRACE = "countdown-grpo"
SPLITS = (8, 16, 32)

HEAD = ("plan", "EP", "max/mean rank", "max/mean node", "worst cell", "GB moved", "step ms", "broken rule")


def scenario_of(ep: int) -> Scenario:
    """Return the frozen problem of one EP size."""
    options = SimulationOptions(
        expert_model_parallel_size=ep, cluster="h100", ep_group_tokens=1024, tokens_per_rank=8192, layout="in-order"
    )
    return open_scenario(TRACE, options, lambda *_: None)


def judged(scenario: Scenario, name: str, plan: Plan) -> dict[str, Any]:
    """Count what the plan does in every cell; a rank or node that computes most is divided by the mean."""
    from plan_recount import rank_expert_rows, validate_plan

    load = load_under(plan, scenario.batch)
    lengths = np.asarray(scenario.batch.lengths, np.int64)
    broken = validate_plan(scenario.problem, plan, load=load, sequence_lengths=lengths)
    cells = [
        rank_expert_rows(plan, load, group, micro_batch).sum(axis=2)
        for group in range(load.num_ep_groups)
        for micro_batch in range(load.num_micro_batches)
    ]
    rows = np.concatenate([cell for cell in cells if cell.any()])  # [cells x L, P]
    nodes = rows.reshape(len(rows), scenario.topology.num_nodes, -1).sum(axis=2)
    ranks = rows.max(axis=1) / rows.mean(axis=1)
    simulate, _ = pricing_of(
        scenario, {"static": make_plans(scenario, ["static"], lambda *_: None)["static"], name: plan}
    )
    found = simulate(scenario.training_step.setting).policies[name].prediction
    return {
        "plan": name,
        "ep": load.ep_size,
        "imbalance": float(ranks.mean()),
        "node_imbalance": float((nodes.max(axis=1) / nodes.mean(axis=1)).mean()),
        "worst_cell": float(ranks.max()),
        "moved_bytes": found.moved_bytes,
        "step_time_s": found.step_time_s,
        "broken": broken,
    }


def board(entries: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Return the scores of the shipped policies, and of every entry on the split of its EP size."""
    plans = {path: load_plan(path) for path in entries}
    for path, plan in plans.items():
        ep = plan.placement.ep_size
        require(ep in SPLITS, f"{path} is a plan for EP{ep}: the board has {', '.join(map(str, SPLITS))}.")
    rows = []
    for ep in SPLITS:
        scenario = scenario_of(ep)
        shipped = make_plans(scenario, POLICIES.names, lambda *_: None)
        asked = {path.stem: plan for path, plan in plans.items() if plan.placement.ep_size == ep}
        rows += [judged(scenario, name, plan) for name, plan in (shipped | asked).items()]
    return rows


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return one line of the board as words, in the order of `HEAD`."""
    return (
        row["plan"],
        str(row["ep"]),
        f"{row['imbalance']:.3f}",
        f"{row['node_imbalance']:.3f}",
        f"{row['worst_cell']:.2f}",
        f"{row['moved_bytes'] / 1e9:.1f}",
        f"{row['step_time_s'] * 1e3:.1f}",
        row["broken"][0] if row["broken"] else "none",
    )


def as_text(rows: list[dict[str, Any]]) -> str:
    """Return the board as lines of text."""
    lines = [HEAD, *map(cells_of, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join("  ".join(map(str.ljust, line, widths)) for line in lines)
