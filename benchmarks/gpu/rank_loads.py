"""Rows that every slot of every EP rank gets in a recorded step under three plans, and what simulate says they take.

    python -m benchmarks.gpu.rank_loads TRACE        writes benchmarks/gpu/rank_loads.json, which a GPU machine reads

Experts have the widths of Qwen3-30B-A3B, whatever model was recorded: the routes are the trace's. Predicted are seconds
of each rank's expert MLP by `core.cost.gemm_time`, the simulator's own, with the constants of an H100.

Example: layer 3, rank 5 has rows [900, 4000, 70, 1200, 0, 800]: four homes, an empty replica slot, a replica. Static
placement gives the same rank [900, 4800, 70, 1200].
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

FILE = Path(__file__).with_name("rank_loads.json")
POLICIES = ("static", "ultraep", "moe-rl")
BASELINE, OURS = "static", "moe-rl"
NUM_CELLS = 8


@dataclass(frozen=True, kw_only=True)
class RankLoads:
    """What the planner's promise is measured on."""

    trace: str
    command: str
    hidden: int
    intermediate: int
    cells: list[list[int]]
    """(EP group, micro-batch, layer) of each cell."""
    rows: Mapping[str, list[list[list[int]]]]
    """By policy: rows [cell][rank][slot], homes and replicas."""
    predicted_s: Mapping[str, Mapping[str, list[list[float]]]]
    """By type (bf16, fp8) and policy: seconds [cell][rank] of the expert MLP, forward and backward."""

    @classmethod
    def read(cls, path: Path = FILE) -> Self:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path = FILE) -> None:
        """Write JSON."""
        path.write_text(json.dumps(asdict(self), separators=(",", ":")) + "\n", encoding="utf-8")


def slot_rows(plan: Any, load: Any, cell: tuple[int, int, int]) -> np.ndarray:
    """Return rows [rank, slot] of a cell under a plan: what replicas do not take stays at home."""
    pairs_E = load.per_expert()[cell]
    slots = plan.placement.slots_per_rank
    rows = np.zeros(plan.placement.physical_to_logical_map.shape[1], np.int64)
    at = plan.replicas.slice_of(*cell)
    at_home_E = pairs_E.astype(np.int64)
    np.subtract.at(at_home_E, plan.replicas.expert[at], plan.replicas.quota[at])
    rows[plan.placement.home_slot()[cell[2]]] += at_home_E
    np.add.at(rows, plan.replicas.physical_id[at], plan.replicas.quota[at])
    if rows.sum() != pairs_E.sum() or rows.min() < 0:
        raise ValueError(f"cell {cell}: {rows.sum()} rows of {pairs_E.sum()} pairs")
    return rows.reshape(-1, slots)


def predicted_seconds(rows: np.ndarray, params: Any) -> np.ndarray:
    """Return seconds [rank] of forward and backward of each rank's expert MLP, from rows [rank, slot]."""
    from moe_rl.core.cost import LayerRows, gemm_time

    tile = int(params.gemm_tile_rows)
    nothing = np.zeros(1)
    at = LayerRows(
        rows=rows.sum(axis=1).astype(float), padded_rows=(-(-rows // tile) * tile).sum(axis=1).astype(float),
        active_experts=(rows > 0).sum(axis=1).astype(float), rank_visits=nothing, nic_ingress=nothing,
        nic_egress=nothing, replicas=nothing, cross_node_replicas=nothing,
    )  # fmt: skip
    return np.asarray(gemm_time(params, at) + gemm_time(params, at, backward=True))


def predictions(rows: Mapping[str, list[np.ndarray]], params: Any) -> dict[str, list[list[float]]]:
    """Return seconds [cell][rank] by policy."""
    return {name: [predicted_seconds(cell, params).tolist() for cell in cells] for name, cells in rows.items()}


def layer_params(ep: int) -> dict[str, Any]:
    """Return what prices a layer of experts with the widths of Qwen3-30B-A3B on an H100, by type."""
    from moe_rl.config import load_cluster, load_model
    from moe_rl.core.cost import layer_cost_params
    from moe_rl.core.topology import ClusterTopology

    topology = ClusterTopology(hardware=load_cluster("h100"), ep_size=ep)
    widths = load_model("qwen3-30b-a3b").spec
    return {kind: layer_cost_params(widths, topology, fp8=kind == "fp8") for kind in ("bf16", "fp8")}


def collect(trace: str, command: str, *, ep: int, tokens_per_rank: int) -> RankLoads:
    """Plan a step of the trace by every policy, and return evenly spread layers of a micro-batch."""
    from moe_rl.config import load_model
    from moe_rl.study.options import SimulationOptions, merge_options
    from moe_rl.study.plan_and_price import make_plans, pricing_of
    from moe_rl.study.resident_slots import open_scenario

    def silent(_what: str, _done: int, _total: int) -> None:
        """Progress that nobody watches."""

    widths = load_model("qwen3-30b-a3b").spec
    asked = {
        "cluster": "h100", "expert_model_parallel_size": ep, "tokens_per_rank": tokens_per_rank,
        "policy": ",".join(POLICIES), "hidden_size": widths.hidden_size,
        "moe_ffn_hidden_size": widths.moe_ffn_hidden_size,
    }  # fmt: skip
    scenario = open_scenario(trace, merge_options(SimulationOptions, asked, None), silent)
    plans = make_plans(scenario, POLICIES, silent)
    _, loads = pricing_of(scenario, plans)
    params = layer_params(ep)
    pairs = loads[BASELINE].per_expert()
    filled = [cell for cell in np.ndindex(*pairs.shape[:3]) if pairs[cell].sum() and cell[:2] == (0, 0)]
    cells = [filled[int(at)] for at in np.unique(np.linspace(0, len(filled) - 1, NUM_CELLS).round())]
    rows = {name: [slot_rows(plans[name], loads[name], cell) for cell in cells] for name in POLICIES}
    return RankLoads(
        trace=Path(trace).name, command=command, hidden=widths.hidden_size, intermediate=widths.moe_ffn_hidden_size,
        cells=[list(map(int, cell)) for cell in cells],
        rows={name: [of_cell.tolist() for of_cell in found] for name, found in rows.items()},
        predicted_s={kind: predictions(rows, of_kind) for kind, of_kind in params.items()},
    )  # fmt: skip


def main() -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", help="left out with --predict")
    parser.add_argument("--predict", action="store_true", help="price the rows of the file anew")
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--tokens-per-rank", type=int, default=4096)
    options = parser.parse_args()
    if options.predict or not options.trace:
        known = RankLoads.read()
        rows = {name: [np.array(cell) for cell in cells] for name, cells in known.rows.items()}
        params = layer_params(len(known.rows[BASELINE][0]))
        replace(known, predicted_s={kind: predictions(rows, of_kind) for kind, of_kind in params.items()}).save()
        print(f"priced the rows of {FILE} anew")
        return 0
    command = f"python -m benchmarks.gpu.rank_loads {Path(options.trace).name}"
    found = collect(options.trace, command, ep=options.ep, tokens_per_rank=options.sequences.tokens_per_rank)
    found.save()
    for name in POLICIES:
        slowest_s = sum(max(cell) for cell in found.predicted_s["bf16"][name])
        print(f"{name}: slowest ranks {slowest_s * 1e3:.2f} ms")
    print(f"wrote {FILE}: {FILE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
