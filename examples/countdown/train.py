"""A small GRPO run from Python: train with balanced experts, read what was measured, simulate the recorded routes.

    python -m examples.countdown.train out/countdown_example      # a minute: examples/countdown/small.yaml
    python -m examples.countdown.train out/countdown --config examples/countdown/grpo.yaml

The second is the run of docs/countdown.md. Needs the packages of `pip install '.[countdown]'`.
"""

import argparse
from pathlib import Path

import moe_rl
from examples.countdown.config import load_config
from examples.countdown.metrics import read_metrics
from examples.countdown.run import run


def main() -> None:
    """Run, or go on where a run of the same folder ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the run")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("small.yaml"))
    arguments = parser.parse_args()

    folder = run(load_config(arguments.config, [f"out={arguments.out}"]), resume=True)
    start, *steps = read_metrics(folder)
    print(f"held-out accuracy {start['evaluation/accuracy']:.3f} -> {steps[-1]['evaluation/accuracy']:.3f}")
    for step in steps:
        static, balanced = step["moe_rl/static_imbalance"], step["moe_rl/imbalance"]
        print(f"step {step['step']}: reward {step['reward/mean']:.3f}, busiest rank {static:.2f} -> {balanced:.2f}")

    report = moe_rl.simulate(
        folder / "trace.moetrace",
        model="from-trace",
        cluster="h100",
        expert_model_parallel_size=4,
        ep_group_tokens=256,
        tokens_per_rank=8192,
        seq_length=8192,
        policy=["static", "moe-rl"],
    )
    print(report.table())


if __name__ == "__main__":
    main()
