"""What a run of `gpu_check.py` leaves: the page, the record of proven tiles, the refitted prediction, the exit code."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from benchmarks import targets
from benchmarks.kernels.prediction import STATIC, Model, Shares
from benchmarks.kernels.specialized_suite import proven
from benchmarks.operators.harness import Row, as_json, backend_of, table
from moe_rl.kernels import BACKENDS, operators
from moe_rl.kernels.gemm.proven import ProvenTile, ProvenTiles, kernels_digest, record_path

SPECIALIZED = "specialized"


def is_ours(row: Row) -> bool:
    """Whether a row is of this project's kernels, or of nobody's: a peer's fault is not ours."""
    provider = str(row["provider"])
    return provider.partition(":")[0] not in BACKENDS or not backend_of(provider).is_peer


def faults(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that make the exit code 1."""
    return [row for row in rows if row["passed"] is False and is_ours(row)]


def proven_of(rows: Sequence[Row]) -> tuple[ProvenTile, ...]:
    """Return the specialized tiles that all rows of their suite prove."""
    return proven([row for row in rows if row["suite"] == SPECIALIZED and row["provider"] != "?"])


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return what a reader wants to know first, in at most a dozen lines."""
    failed = faults(rows)
    checked = Counter(row["passed"] for row in rows if is_ours(row))
    tiles = [f"{tile.op} {tile.scaling} {tile.tile}: {tile.speedup:.2f} times as fast" for tile in proven_of(rows)]
    where = Counter(f"{row['phase']} {row['suite']}, {row['operator']} {row['variant']}" for row in failed)
    return [
        f"VERDICT: {'WRONG' if failed else 'all of ours right'}; {checked[True]} checks of ours passed, "
        f"{checked[False]} failed, {checked[None]} not available",
        *(f"  failed {count} times: {what}" for what, count in where.most_common(5)),
        *(f"  proven: {tile}" for tile in tiles or ("no specialized tile",)),
    ]


def code_digest(root: Path) -> str:
    """Return what changes with the text of any kernel, or of what checks them."""
    files = sorted([*(root / "moe_rl" / "kernels").rglob("*.py"), *(root / "benchmarks" / "kernels").glob("*.py"),
                    *(root / "benchmarks" / "operators").glob("*.py")])  # fmt: skip
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def finished_rows(path: Path, code: str) -> list[Row]:
    """Return the rows of the sections that an earlier run of the same code finished; of a section without all, none."""
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("code") != code:
        return []
    rows: list[Row] = [row for row in document["rows"] if row["phase"] != "compile"]
    cut_short = {(row["phase"], row["suite"]) for row in rows if row["operator"] == "?"}
    return [row for row in rows if (row["phase"], row["suite"]) not in cut_short]


def uncovered_operators(rows: Sequence[Row]) -> list[str]:
    """Return the registered operators that no row names: nobody checked them."""
    return sorted({operator.name for operator in operators()} - {str(row["operator"]) for row in rows})


def report(document: dict[str, object], rows: Sequence[Row]) -> str:
    """Return the Markdown page of a run."""
    machine, roofline = document["machine"], document["roofline"]
    assert isinstance(machine, dict)
    assert isinstance(roofline, dict)
    checked = Counter(row["passed"] for row in rows)
    lines = [
        f"# Kernels on {machine['gpu']}", "",
        f"`{document['command']}` at commit {machine['commit']}{' with changes' if machine['dirty'] else ''}, driver "
        f"{machine['driver']}, torch {machine['torch']}, triton {machine['triton']}, SM clock at most "
        f"{machine['sm_clock_max_mhz']} MHz, power limit {machine['power_limit_w']} W.", "",
        f"Measured on this machine: copy {roofline['copy_gb_per_s']:.0f} GB/s, fill {roofline['fill_gb_per_s']:.0f} "
        f"GB/s, bf16 {roofline['bf16_tflops']:.0f} TFLOPS, fp8 {roofline['fp8_tflops'] or 0:.0f} TFLOPS.", "",
        f"Checks: {checked[True]} passed, {checked[False]} failed, {checked[None]} not available. Inputs of "
        f"`benchmarks/gpu_check.py`; L2 flushed before every sample; GB/s and TFLOPS of real rows.", "",
    ]  # fmt: skip
    uncovered = document["operators_without_checks"]
    if uncovered:
        # the document is JSON: this entry of it is a list of names
        lines += [f"Operators without checks: {', '.join(map(str, uncovered))}.", ""]  # type: ignore[call-overload]
    peers = [row for row in rows if row["passed"] is False and not is_ours(row)]
    for heading, failed in (("Failed", faults(rows)), ("Peers that failed", peers)):
        if failed:
            lines += [f"## {heading}", ""]
            lines += [
                f"- {row['phase']} {row['operator']} {row['variant']}, {row['case']}, {row['provider']}: "
                f"{row['problem']}" for row in failed
            ]  # fmt: skip
            lines.append("")
    lines += [str(line) for line in document.get("learned", ())]  # type: ignore[attr-defined]  # JSON: a list
    missing = sorted({(str(row["provider"]), str(row["problem"])) for row in rows if row["passed"] is None})
    if missing:
        lines += ["## Not available", "", *(f"- {provider}: {problem}" for provider, problem in missing), ""]
    judged = targets.judge(rows)
    if judged:
        lines += ["## Targets", "", targets.table(judged)]
    return "\n".join([*lines, "## Timings", "", table(rows)])


def refitted(shares: Shares, rows: Sequence[dict[str, object]], source: str) -> Shares:
    """Return shares with which the median row takes as long as it was measured; those without rows stay."""
    found = {}
    for kind in ("product", "memory"):
        ratios = ratios_of(rows, kind)
        if ratios:
            found[kind] = getattr(shares, kind) * median(ratios)
    return replace(shares, **found, source=source) if found else shares


def ratios_of(rows: Iterable[dict[str, object]], kind: str) -> list[float]:
    """Return predicted over measured of every row that `kind` bounds, smallest first."""
    found = []
    for row in rows:
        times, predicted = row.get("time_us"), row.get("predicted_us")
        if row.get("bound_by") == kind and isinstance(times, dict) and isinstance(predicted, float):
            found.append(predicted / float(times["p50"]))
    return sorted(found)


def learn(rows: Sequence[Row], gpu: str, name: str) -> list[str]:
    """Record which specialized tiles may run, refit the prediction, and return what the page says of both."""
    import triton

    lines = ["## What was learned", ""]
    if any(row["suite"] == SPECIALIZED and row["phase"] == "numerics" for row in rows):
        tiles = proven_of(rows)
        record = ProvenTiles(gpu=gpu, triton=triton.__version__, kernels=kernels_digest(), tiles=tiles)
        record.save(record_path(gpu))
        lines.append(f"- `{record_path(gpu)}` lets the kernels choose {len(tiles)} specialized tiles:")
        lines += [f"  - {tile.op} {tile.scaling} {tile.tile}: {tile.speedup:.2f} x the plain loop" for tile in tiles]
    model = Model.load(STATIC)
    if model is not None:
        timed = [row for row in rows if row["passed"] is True]
        shares = refitted(model.shares, timed, f"gpu_check on {name}")
        (STATIC / "shares.json").write_text(json.dumps(asdict(shares), indent=1) + "\n", encoding="utf-8")
        lines.append(f"- Shares of roofs, before: {asdict(model.shares)}; refitted: {asdict(shares)}.")
        for kind in ("product", "memory"):
            ratios = ratios_of(timed, kind)
            if ratios:
                low, mid, high = (ratios[int(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9))
                lines.append(
                    f"- Predicted over measured, {len(ratios)} rows bound by {kind}: {low:.2f} / {mid:.2f} / "
                    f"{high:.2f} (10, 50, 90 %)."
                )
    return [*lines, ""]


def write_results(folder: Path, document: dict[str, object], rows: Sequence[Row]) -> None:
    """Write what there is so far."""
    complete = {**document, "operators_without_checks": uncovered_operators(rows), "rows": list(rows)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_check.json").write_text(as_json(complete, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu_check.md").write_text(report(complete, rows), encoding="utf-8")
