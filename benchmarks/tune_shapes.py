"""The table of docs/tune.md: the best two parallel layouts of a model on a cluster, with engine and levers.

    python -m benchmarks.tune_shapes TRACE [--models deepseek-v3 ...] [--clusters h100 gb200] [--gpus 64 256 512]

Prints a row of the table when its search is done (1 to 15 minutes each). The routes of the models are synthetic, and
like those of the trace.
"""

import argparse
from typing import Any

import moe_rl
from moe_rl.core.errors import InvalidInputError
from moe_rl.report.tuned_settings import ShapeLevers
from moe_rl.report.tuning import Tuned

MODELS = ("gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v3")
CLUSTERS = ("h100", "gb200")
GPUS = (64, 256, 512)
BATCH: dict[str, Any] = {"num_samples": 2048, "mean_length": 8000, "max_length": 32768, "length_spread": 0.8}
"""Sequences of lognormal lengths: their number, mean and maximum in tokens, and the spread of the logarithms."""
HEAD = (
    "| model | GPUs | best layout | tokens/s/GPU | gain over static placement | second layout "
    "| extra step time | part that grows most |\n|---|---|---|---|---|---|---|---|"
)


def row_of(found: Tuned) -> str:
    """Return the line of the table; without a second layout its cells are empty."""
    best, *others = found.levers
    gain = best.fastest / best.speeds["static"] - 1.0
    cells = [found.model, f"{found.gpus} {found.cluster.upper()}", best.name, f"{best.fastest:,.0f}", f"{gain:.1%}"]
    return "| " + " | ".join(cells + _second(found, best, others[0] if others else None)) + " |"


def _second(found: Tuned, best: ShapeLevers, other: ShapeLevers | None) -> list[str]:
    if other is None:
        return ["", "", ""]
    part, growth = found.grown_part(best.setting, other.setting)
    return [other.name, f"{best.fastest / other.fastest - 1.0:.1%}", f"{part}, {growth:+.1%}"]


def main() -> None:
    """Search for every combination that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS)
    parser.add_argument("--jobs", type=int, default=None)
    args = parser.parse_args()
    print(HEAD, flush=True)
    for model in args.models:
        for cluster in args.clusters:
            for gpus in args.gpus:
                try:
                    found = moe_rl.tune(
                        model=model, cluster=cluster, gpus=gpus, routes_like=args.trace, jobs=args.jobs, **BATCH
                    )
                except InvalidInputError as refusal:
                    print(f"| {model} | {gpus} {cluster.upper()} | {refusal} | | | | | |", flush=True)
                else:
                    print(row_of(found), flush=True)


if __name__ == "__main__":
    main()
