"""`moe-rl models`, `moe-rl clusters` and `moe-rl policies`: names for the options of a simulation."""

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_rl.cli.console import deliver, json_text
from moe_rl.core.mappings import in_words, without
from moe_rl.core.outputs import check_outputs
from moe_rl.report.tables import figures_table

Rows = Sequence[dict[str, Any]]


def models(json_path: Path | None = None) -> None:
    """List the model names that --model accepts. It also accepts a Hugging Face config.json or a folder that has one.

    The files in configs/models state every number with its source.
    """
    from moe_rl.config import CONFIGS, load_model, model_names

    rows = []
    for name in model_names():
        loaded = load_model(name)
        spec = loaded.spec
        rows.append(
            {
                "model": name,
                "layers": spec.num_layers,
                "MoE layers": spec.num_moe_layers,
                "experts": spec.num_experts,
                "top-k": spec.top_k,
                "hidden": spec.hidden_size,
                "expert width": spec.moe_ffn_hidden_size,
                "assumed": len(loaded.assumptions),
            }
        )
    _deliver(
        rows,
        rows,
        json_path,
        f"Column 'assumed' counts numbers without a source of their own. Files: {CONFIGS / 'models'}",
    )


def clusters(json_path: Path | None = None) -> None:
    """List the cluster names that --cluster accepts. It also accepts a YAML file, e.g. from `moe-rl calibrate`.

    Rates are achieved rates, not peak rates. The files in configs/clusters state every constant with its source.
    """
    from moe_rl.config import CONFIGS, cluster_names, load_cluster

    rows = []
    for name in cluster_names():
        cluster = load_cluster(name)
        hardware = asdict(cluster)
        rows.append(
            {
                "cluster": name,
                "GPUs per NVLink domain": hardware["ranks_per_node"],
                "memory GiB": hardware["hbm_gib"],
                "grouped GEMM TFLOP/s": hardware["gemm_tflops"],
                "HBM GB/s": hardware["hbm_gb_per_s"],
                "NVLink GB/s": hardware["nvlink_gb_per_s"],
                "NIC GB/s": hardware["rdma_gb_per_s"],
                "assumed": sum(source.startswith("assumed") for source in hardware["sources"].values()),
                "mostly assumed": cluster.assumption() is not None,
            }
        )
    _deliver(
        rows,
        rows,
        json_path,
        f"Column 'assumed' counts constants that were not measured. Files: {CONFIGS / 'clusters'}",
    )


def policies(json_path: Path | None = None) -> None:
    """List the policies that --policy accepts, with their parameters. Policies from other packages are included."""
    from moe_rl.planner.registry import POLICIES

    rows: list[dict[str, Any]] = [
        {
            "policy": policy.name,
            "by default": policy.by_default,
            "moves homes": policy.levers.move_homes,
            "needs an earlier step": policy.needs_history,
            "what": policy.summary,
            "parameters": {name: parameter.default for name, parameter in inspect.signature(policy).parameters.items()},
        }
        for policy in POLICIES
    ]
    rows_shown = [without(row, ["parameters"]) for row in rows]
    parameters = [f"  {row['policy']}: {in_words(row['parameters'], '=') or 'none'}" for row in rows]
    _deliver(rows, rows_shown, json_path, "Parameters that --policy-option sets:", *parameters)


def _deliver(rows: Rows, rows_shown: Rows, json_path: Path | None, *below: str) -> None:
    """Write all of the rows as JSON, and show some of their columns with the lines `below` them."""
    check_outputs({"--json": json_path})
    deliver({}, partial(json_text, list(rows)), json_path, partial(_print, rows_shown, below))


def _print(rows: Rows, below: Sequence[str], console: Console) -> None:
    table = figures_table(*rows[0])
    for column in table.columns:
        column.no_wrap = False  # Headings are longer than their figures.
    if isinstance([*rows[0].values()][-1], str):
        table.columns[-1].justify = "left"
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console.print(table)
    for line in below:
        console.print(line, soft_wrap=True)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
