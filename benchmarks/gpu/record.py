"""The records that a run leaves: tiles that the kernels may choose. Standard library only, until there is one."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks.gpu.rows import Outcome, Row


def write_records(out: Path, rows: Sequence[Row]) -> None:
    """Write what a thousand runs of every form have proven, and what some runs have shown, for the next phases."""
    machine = next((row.figures for row in rows if (row.phase, row.step) == ("facts", "machine") and row.figures), None)
    if machine is None:
        return
    chip, name = str(machine["chip"]), str(machine["gpu"])
    for phase, folder in (("loops", out / "provisional"), ("soak", out)):
        tiles = proven_tiles(rows, phase)
        if tiles:
            from moe_rl.kernels.gemm.proven import ProvenTiles

            made = ProvenTiles(chip=chip, measured_on=name, tiles=tuple(tiles))  # type: ignore[arg-type]  # of ProvenTile
            made.save(folder / f"proven-{chip}.json")


def proven_tiles(rows: Iterable[Row], phase: str) -> list[object]:
    """Return the tiles whose forms were all right in a phase, and that were faster than the plain loop."""
    from benchmarks.gpu.products import FORMS

    of_phase = {row.step: row for row in rows if row.phase == phase}
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speedup = row.figures.get("speedup")
        if row.phase == "roofs" and row.outcome is Outcome.RIGHT and isinstance(speedup, float):
            speeds.setdefault(" ".join(str(row.figures["loop"]).split()[:2]), []).append(speedup)
    found: list[object] = []
    for loop in dict.fromkeys(f"{op} {scaling}" for op, scaling, _ in FORMS):
        forms = [" ".join(form) for form in FORMS if f"{form[0]} {form[1]}" == loop]
        made = [of_phase.get(form) for form in forms]
        if any(row is None or row.outcome is not Outcome.RIGHT for row in made) or not speeds.get(loop):
            continue
        speedup = geometric_mean(speeds[loop])
        if speedup > 1.0:
            found.append(_proven(loop, [row for row in made if row is not None], speedup))
    return found


def _proven(loop: str, rows: Sequence[Row], speedup: float) -> object:
    from moe_rl.kernels.gemm.proven import ProvenTile
    from moe_rl.kernels.gemm.tiling import HOPPER, GemmProblem, candidates

    op, scaling = loop.split()
    problem = GemmProblem(op=op, scaling=scaling, num_rows=4096, num_groups=1, n=2048, k=2048, capability=HOPPER)  # type: ignore[arg-type]
    tile = next(tile for tile in candidates(problem) if str(tile) == rows[0].figures["tile"])
    codes = {code for row in rows for code in row.figures["codes"]}  # type: ignore[union-attr]  # a list of them
    return ProvenTile(op=op, scaling=scaling, tile=tile, speedup=round(speedup, 3), code=tuple(sorted(codes)),  # type: ignore[arg-type]
                      runs=min(int(row.figures["runs"]) for row in rows))  # type: ignore[arg-type]  # fmt: skip
