"""The phases of a run on a GPU machine, in the order of what one would rather have. Standard library only."""

import importlib
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps that one child process makes, as long as none of them hangs or faults."""

    name: str
    module: str
    """Of `benchmarks.gpu`: it has STEPS, names, and `run(step, machine)`; its import needs nothing installed."""
    limit_s: int
    expected: str
    """What was predicted before, for the page."""
    in_second_call: bool = False
    """Whether it waits for `--resume`."""

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps; one that bears the phase's name where the module is not there."""
        try:
            steps: tuple[str, ...] = importlib.import_module(f"benchmarks.gpu.{self.module}").STEPS
        except ImportError:
            return (self.name,)
        return steps


PHASES = (
    Phase(name="facts", module="facts", limit_s=25, expected="every cubin loads; 66 clusters of two SMs fit"),
    Phase(name="loops", module="loops", limit_s=80,
          expected="equal bits; most likely to break: the second lap of `both_empty`, a table's descriptors, the end"),
    Phase(name="roofs", module="roofs", limit_s=75,
          expected="roofs 1759 (FP8), 990 (bf16), 1111 (weight gradients) TFLOPS; an H200 reached: FP8 1069-1240, "
                   "bf16 670-716, weight gradients 718-769"),
    Phase(name="promise", module="promise", limit_s=65,
          expected="the slowest ranks' ratio between plans within 5 % of simulate's for the same cells; an "
                   "H200: 5 to 8 %"),
    Phase(name="runtime", module="runtime", limit_s=125,
          expected="losses and gradient norms of plain Megatron up to the order of sums: 1e-6, in bf16 2^-8"),
    Phase(name="peers", module="peers", limit_s=35,
          expected="an H200: torch bf16 686-734 TFLOPS; DeepGEMM 1242-1373. If ours reaches less than 85 % of DeepGEMM "
                   "for weights in one tensor, homes go through DeepGEMM and we keep the table loop"),
    Phase(name="ceilings", module="ceilings", limit_s=20,
          expected="copy 3.0 TB/s (H100) or 4.3 (H200); bf16 770-800 and FP8 1200-1450 TFLOPS; L2 5.5-7 TB/s, where "
                   "the proof page assumes 8"),
    Phase(name="small groups", module="small_groups", limit_s=20,
          expected="roofs 388 / 710 / 1211 / 1759 TFLOPS (FP8) with 64 / 128 / 256 / 512 rows per group"),
    Phase(name="memory-bound", module="memory_bound", limit_s=20,
          expected="75 % of the copy; an H200: 39 to 85 %, five of nine below"),
    Phase(name="ncu", module="why", limit_s=35, expected="no membar among the first three reasons to stall"),
    Phase(name="casts", module="casts", limit_s=60, expected="no differing code", in_second_call=True),
    Phase(name="soak", module="soak", limit_s=150, expected="equal bits a thousand times", in_second_call=True),
)  # fmt: skip


def phase_of(name: str) -> Phase:
    """Return a phase by its name."""
    return next(phase for phase in PHASES if phase.name == name)
