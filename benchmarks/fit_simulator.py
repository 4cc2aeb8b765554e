"""Fit the simulator's global constants on published whole runs; print what each becomes and how well it carries over.

    python benchmarks/fit_simulator.py [whole_runs.yaml] [--held-out]

Constants are those of `benchmarks/validate_model/fit.py`: none is fitted per run. configs/clusters and
`core.cost.SoftwareCosts` ship what the fit finds.
"""

import argparse
from pathlib import Path

import numpy as np
import yaml

from benchmarks.validate_model import fit as fitting
from moe_rl.config import load_cluster, load_model
from moe_rl.simulators.whole_runs import WholeRun

SEEDS = 5
"""Ways to deal settings to three parts: one of them may be lucky."""
RUNS = Path(__file__).parent.parent / "tests" / "simulators" / "data" / "whole_runs.yaml"


def main() -> None:
    """Print constants and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=RUNS)
    parser.add_argument("--held-out", action="store_true", help="also leave out settings, clusters and models in turn")
    options = parser.parse_args()
    rows = yaml.safe_load(options.runs.read_text(encoding="utf-8"))["points"]
    runs = [WholeRun.of(row, lambda name: load_model(name).spec, load_cluster) for row in rows]
    first = fitting.first_fit(load_cluster)
    found = fitting.fit(runs, first)
    print(f"{'constant':20} {'first':>8} {'fitted':>8} {'/ shipped':>9}")
    for name, constant in fitting.CONSTANTS.items():
        value = constant.first / first.factors[name] * found.factors[name]
        print(f"{name:20} {constant.first:8.4g} {value:8.4g} {found.factors[name]:9.3f}")
    _report("shipped constants", fitting.SHIPPED.errors(runs))
    _report("fitted constants", found.errors(runs))
    if options.held_out:
        _report_held_out(runs, first)


def _report_held_out(runs: list[WholeRun], first: fitting.Fit) -> None:
    for by in ("setting", "cluster", "model"):
        for seed in range(SEEDS if by == "setting" else 1):
            errors = fitting.held_out_errors(runs, first, by, seed=seed)
            for value, (_, of_value) in errors.items() if by != "setting" else ():
                _report(f"  {by} {value} held out", of_value)
            dealt = f", dealt by seed {seed}" if by == "setting" else ""
            _report(f"every {by} held out{dealt}", np.concatenate([some for _, some in errors.values()]))


def _report(what: str, errors: fitting.Floats) -> None:
    size = np.abs(errors)
    print(f"{what:34} {len(size):3} runs, mean error {size.mean():.1%}, median {np.median(size):.1%}")


if __name__ == "__main__":
    main()
