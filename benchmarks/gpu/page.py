"""The last page of a run: what is right, wrong, or was not reached, and every figure beside what was expected."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.gpu.phases import PHASES
from benchmarks.gpu.rows import Figure, Outcome, Row

MOST_NAMED = 8
LEAST_SHARE = 0.85
"""Of DeepGEMM's rate, that our FP8 forward must reach for weights in one tensor."""


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return what a reader wants to know first, in at most a dozen lines."""
    ours = [row for row in rows if not row.is_peer]
    counts = Counter(row.outcome for row in ours)
    wrong = [row for row in ours if row.outcome is Outcome.WRONG]
    left = [row for row in rows if row.outcome is Outcome.NOT_REACHED]
    head = "WRONG" if wrong else "right, as far as it was reached" if counts[Outcome.RIGHT] else "nothing was reached"
    lines = [
        f"VERDICT: {head}; {counts[Outcome.RIGHT]} steps of ours right, {counts[Outcome.WRONG]} wrong, "
        f"{counts[Outcome.NOT_REACHED]} not reached"
    ]
    lines += [f"  wrong: {row.phase}, {row.step}: {row.why}" for row in wrong[:MOST_NAMED]]
    reasons = Counter((row.phase, row.why.splitlines()[0][:160] if row.why else "") for row in left)
    for (phase, why), count in reasons.most_common(MOST_NAMED):
        lines.append(f"  not reached: {phase}, {count} steps: {why}")
    return lines


def beside_deep_gemm(rows: Sequence[Row]) -> list[str]:
    """Return what was agreed on beforehand: which loop the homes' weights, in one tensor, go through from now on."""
    rates = {(row.phase, row.step): row.figures.get("TFLOPS") for row in rows if row.outcome is Outcome.RIGHT}
    shares: dict[str, float] = {}
    for (phase, step), theirs in rates.items():
        kind, _, shape = step.rpartition(" ")
        ours = rates.get(("roofs", f"FP8 forward {shape}"))
        if (phase, kind) == ("peers", "DeepGEMM FP8") and isinstance(ours, float) and isinstance(theirs, float):
            shares[shape] = ours / theirs
    if not shares:
        return ["Beside DeepGEMM: not reached, so it is open which loop is better for weights in one tensor."]
    each = ", ".join(f"{share:.0%} ({shape})" for shape, share in shares.items())
    stays = min(shares.values()) >= LEAST_SHARE
    rule = "ours stays for homes" if stays else "homes go through DeepGEMM, and we keep the table loop"
    return [f"Beside DeepGEMM our FP8 forward reaches {each}; the limit was {LEAST_SHARE:.0%}: {rule}."]


def page(rows: Sequence[Row], *, is_rehearsal: bool) -> str:
    """Return the page."""
    lines = ["# A run of benchmarks/first_call.py", ""]
    if is_rehearsal:
        lines += ["A rehearsal on a CPU, with an emulator as libcuda: outcomes count, and no time means anything.", ""]
    lines += [*verdict(rows), "", *beside_deep_gemm(rows), ""]
    for phase in PHASES:
        of_phase = [row for row in rows if row.phase == phase.name]
        if of_phase:
            lines += [f"## {phase.name}", "", f"Expected: {phase.expected}.", "", *_table(of_phase), ""]
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["| step | outcome | seconds | figures |", "|---|---|--:|---|"]
    for row in rows:
        figures = ", ".join(f"{name} {_shown(value)}" for name, value in row.figures.items() if value is not None)
        why = row.why.splitlines()[0][:300] if row.why else ""
        lines.append(f"| {row.step} | {row.outcome} | {row.seconds:.1f} | {why or figures} |")
    return lines


def _shown(value: Figure) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{len(value)} values]"
    return str(value)
