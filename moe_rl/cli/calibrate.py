"""`moe-rl calibrate`: refit the constants of a cluster to measurements made on it."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moe_rl.cli.console import deliver, json_text, progress_bar
from moe_rl.config import cluster_num_nodes, cluster_yaml, load_cluster, load_software, software_yaml
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.calibration import CONSTANTS, SOFTWARE_CONSTANTS, CalibrationResult, Timed, calibrate

YAML_SUFFIXES = (".yaml", ".yml")


def calibrate_cluster(
    measurements: list[Path],
    out: Path,
    cluster: str,
    constants: str = "",
    software: str = "typical",
    json_path: Path | None = None,
) -> None:
    """Fit the forecast's constants for a cluster to measurements, print the remaining errors, and write a cluster file.

    The held-out error of a group comes from a fit to all other groups. A constant that the measurements do not
    determine keeps its value. Whole-step measurements also determine software costs, which are written to a second
    file.

    Example: moe-rl calibrate run.csv --cluster h100 --constants gemm_tflops,nvlink_gb_per_s --out mine.yaml
    """
    from moe_rl.study.measured import predicted_seconds, read_timed

    require(out.suffix in YAML_SUFFIXES, f"--out {out} must end in .yaml, so that --cluster reads it as a file.")
    check_outputs({"--out": out, "--json": json_path}, inputs=tuple(measurements))
    before = load_cluster(cluster)
    names = [name.strip() for name in constants.split(",") if name.strip()]
    kind = load_software(software)
    with progress_bar() as advance:
        advance("reading measurements", 0, 1)
        rows: list[Timed] = []
        for path in measurements:
            rows += read_timed(path, cluster)
        advance("fitting", 0, 1)
        result = calibrate(rows, before, names, source="", predict=predicted_seconds, software=kind)
    hardware = _named(result, before, rows, measurements, out)
    files = {out: cluster_yaml(hardware, num_nodes=cluster_num_nodes(cluster)).encode()}
    moved = [item.name for item in result.constants if item.name in SOFTWARE_CONSTANTS]
    if moved:
        sources = {**result.software.sources, **{name: _source(result, name, rows, measurements) for name in moved}}
        calibrated = replace(result.software, name=out.stem, sources=sources)
        files[out.with_suffix(f".software{out.suffix}")] = software_yaml(calibrated).encode()
    document = partial(json_text, _document(result, hardware, out))
    deliver(files, document, json_path, partial(_print, result, cluster))


def _named(
    result: CalibrationResult, before: HardwareSpec, rows: Sequence[object], files: Sequence[Path], out: Path
) -> HardwareSpec:
    """Return the fitted hardware, named after its file; its sources name the measurements behind each constant."""
    fitted = {item.name: _source(result, item.name, rows, files) for item in result.constants if item.name in CONSTANTS}
    constants = {
        name: text if text.startswith("cluster ") else f"cluster {before.name}: {text}"
        for name, text in before.sources.items()
    }
    return replace(result.hardware, name=out.stem, sources=constants | fitted)


def _source(result: CalibrationResult, name: str, rows: Sequence[object], files: Sequence[Path]) -> str:
    """Return which measurements a constant was fitted to, the error that remains, and its value before."""
    item = next(item for item in result.constants if item.name == name)
    error = result.mean_error("held_out")
    held_out = ""
    if error is not None:
        held_out = f", {error:.1%} on held-out groups"
    return (
        f"moe-rl calibrate: from {len(rows)} measurements in {', '.join(path.name for path in files)}; mean error "
        f"{result.mean_error('in_sample'):.1%}{held_out}; standard deviation {item.uncertainty:.1%}; previous value "
        f"{item.before:g}"
    )


def _document(result: CalibrationResult, hardware: HardwareSpec, out: Path) -> dict[str, object]:
    """Return the result as plain values, without numbers that do not exist."""
    groups = {group.group: _known(asdict(group) | {"group": None}) for group in result.groups}
    return _known(
        {
            "schema": "moe_rl.calibrate/1",
            "cluster": hardware.name,
            "file": str(out),
            "num_measurements": result.num_measurements,
            "constants": {
                item.name: {"source": hardware.sources.get(item.name, "the software's file"), **asdict(item)}
                for item in result.constants
            },
            "error_before": result.mean_error("before"),
            "in_sample_error": result.mean_error("in_sample"),
            "groups": groups,
            "held_out_error": result.mean_error("held_out"),
        }
    )


def _known(figures: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in figures.items() if value not in (None, "")}


def _print(result: CalibrationResult, cluster: str, console: Console) -> None:
    from moe_rl.report.tables import figures_table

    constants = figures_table("constant", cluster, "fitted", "change", "standard deviation", gap=2)
    for item in result.constants:
        change = item.after / item.before - 1.0
        figures = f"{item.before:.4g}", f"{item.after:.4g}", f"{change:+.1%}", f"{item.uncertainty:.1%}"
        constants.add_row(Text(item.name), *figures)
    console.print(constants)
    errors = figures_table("mean error of", "points", f"with {cluster}", "fitted", "held out", gap=2)

    def add(name: str, count: int, *shares: float | None) -> None:
        errors.add_row(Text(name), str(count), *("" if share is None else f"{share:.1%}" for share in shares))

    for group in result.groups:
        add(group.group, group.num_measurements, group.before, group.in_sample, group.held_out)
    errors.add_section()
    means = [result.mean_error(figure) for figure in ("before", "in_sample", "held_out")]
    add("all", result.num_measurements, *means)
    console.print(errors)
    if len(result.groups) == 1:
        console.print(Text("note: held-out errors need at least two groups in the column `group`.", style="yellow"))
