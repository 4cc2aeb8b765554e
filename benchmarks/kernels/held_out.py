"""How far predictions of `moe-rl bench layer` are off: predicted beside measured times, which gave no rate to them.

    python -m benchmarks.kernels.held_out            # prints predicted / measured
    python -m benchmarks.kernels.held_out --save     # also writes benchmarks/results/static/expert_times.json

The file also has predictions for layers that no GPU has timed.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.rank_loads import BASELINE, POLICIES, RankLoads
from benchmarks.gpu.rows import read
from benchmarks.kernels.expert_times import ExpertTimes, RecipeTimes, save
from benchmarks.kernels.predicted_layer import MEASURED, RECIPES, TB_PER_S, Forecast, even_shares, expert_launches
from moe_rl.config import load_model
from moe_rl.kernels import BF16, FP8_BLOCK

MEASURED_MODEL = "Qwen3-30B-A3B"
EXAMPLES = ("qwen3-30b-a3b", "qwen3-235b-a22b")
EXAMPLE_EP_SIZE, EXAMPLE_TOKENS = 8, (4096, 16384)
"""What docs/kernels.md predicts beside the recorded ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Predicted over measured times of the expert MLP of Qwen3-30B-A3B, on the ranks of a recorded step."""

    what: str
    ratios: tuple[float, ...]

    def __str__(self) -> str:
        mean, low, high = statistics.mean(self.ratios), min(self.ratios), max(self.ratios)
        spread = f"{low:.2f} to {high:.2f} on {len(self.ratios)} ranks"
        return f"{self.what}: predicted / measured {mean:.2f} on average, {spread}"


def held_out(ranks: Sequence[ExpertTimes]) -> Iterator[HeldOut]:
    """Compare predictions with the H200's times, which no rate was taken from: each recipe, then FP8's speed-up."""
    bf16, fp8 = [], []
    for rank in ranks:
        assert rank.measured is not None
        bf16.append(rank.h200.bf16_us / rank.measured.bf16_us)
        fp8.append(rank.h200.fp8_us / rank.measured.fp8_us)
    yield HeldOut(what=f"time in {BF16.name}", ratios=tuple(bf16))
    yield HeldOut(what=f"time in {FP8_BLOCK.name}", ratios=tuple(fp8))
    speedups = tuple(of_bf16 / of_fp8 for of_bf16, of_fp8 in zip(bf16, fp8, strict=True))
    yield HeldOut(what="speed-up of FP8", ratios=speedups)


def predicted_times(rows: Sequence[int], hidden: int, intermediate: int) -> dict[str, RecipeTimes]:
    """Predict the expert MLP for both GPUs."""
    launches = [expert_launches(rows, hidden, intermediate, recipe) for recipe in RECIPES]
    times = {}
    for gpu in TB_PER_S:
        bf16_us, fp8_us = map(Forecast.of(gpu).microseconds, launches)
        times[gpu] = RecipeTimes(bf16_us=bf16_us, fp8_us=fp8_us)
    return times


def recorded_ranks(policy: str = BASELINE, every: int = 1) -> Iterator[ExpertTimes]:
    """Yield predicted and measured times of each `every`th rank of the recorded step under a policy."""
    loads = RankLoads.read()
    measured = {row.step: row.figures for row in read(MEASURED) if row.phase == "promise"}
    times_us = []
    for step in ("bf16", "fp8"):
        of_policies = measured[step]["us of rows"]
        assert isinstance(of_policies, list)
        # Of every rank of every cell the policies were timed in turn.
        times_us.append([float(time_us) for time_us in of_policies[POLICIES.index(policy) :: len(POLICIES)]])
    ranks = [rows for cell in loads.rows[policy] for rows in cell]
    for rows, bf16_us, fp8_us in list(zip(ranks, *times_us, strict=True))[::every]:
        yield ExpertTimes(
            model=MEASURED_MODEL, rows=sum(rows), tokens=None, measured=RecipeTimes(bf16_us=bf16_us, fp8_us=fp8_us),
            **predicted_times(rows, loads.hidden, loads.intermediate),
        )  # fmt: skip


def even_layers() -> Iterator[ExpertTimes]:
    """Yield what `moe-rl bench layer` predicts for the models of docs/kernels.md with EP8."""
    for spec in (load_model(name).spec for name in EXAMPLES):
        for tokens in EXAMPLE_TOKENS:
            rows = even_shares(tokens * spec.top_k, spec.num_experts // EXAMPLE_EP_SIZE)
            yield ExpertTimes(
                model=spec.name, rows=sum(rows), tokens=tokens, measured=None,
                **predicted_times(rows, spec.hidden_size, spec.moe_ffn_hidden_size),
            )  # fmt: skip


def main() -> None:
    """Print how far off predictions are; `--save` also writes `expert_times.json`."""
    ranks = list(recorded_ranks())
    if "--save" in sys.argv[1:]:
        save([*ranks, *even_layers()])
    for comparison in held_out(ranks):
        print(comparison)


if __name__ == "__main__":
    main()
