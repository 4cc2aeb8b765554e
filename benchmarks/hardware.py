"""On what a number was measured: processor, clocks, driver, libraries, and the commit with its uncommitted changes."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

GPU_NUMBERS = {
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
"""Figures of a record, and the queries of nvidia-smi behind them."""
GPU_QUERIES = ("name", "driver_version", *GPU_NUMBERS.values())
CPU_INFO = Path("/proc/cpuinfo")


def record_hardware(repository: Path) -> dict[str, object]:
    """Return this machine at this moment and the checkout at `repository`, for a result file; None: it does not say.

    Clocks are MHz, while the record is taken and the highest that the driver allows; the power limit is W, the
    temperature degrees Celsius. `load_average` of the last minute shows whether other programs shared the machine, and
    `dirty` whether tracked files differ from the commit.
    """
    gpu = _query_gpu()
    commit, dirty = _checkout(repository)
    return {
        "gpu": gpu.get("name"),
        "driver": gpu.get("driver_version"),
        **{name: _number(gpu.get(query)) for name, query in GPU_NUMBERS.items()},
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{library: _version(library) for library in ("torch", "triton", "numpy")},
        "commit": commit,
        "dirty": dirty,
    }


def parse_gpu_query(line: str) -> dict[str, str]:
    """Return the values of one line of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` by query."""
    # nvidia-smi answers [N/A] where a GPU does not tell.
    values = [value.strip() for value in line.split(",")]
    return {query: value for query, value in zip(GPU_QUERIES, values, strict=True) if "N/A" not in value}


def _query_gpu() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_QUERIES)}", "--format=csv,noheader,nounits"]
    found = _run(command, Path.cwd())
    return parse_gpu_query(found.splitlines()[0]) if found else {}


def _checkout(repository: Path) -> tuple[str | None, bool | None]:
    commit = _run(["git", "rev-parse", "HEAD"], repository)
    if not commit:
        return None, None
    changed = _run(["git", "status", "--porcelain", "--untracked-files=no"], repository)
    return commit.strip(), None if changed is None else bool(changed.strip())


def _run(command: list[str], folder: Path) -> str | None:
    """Return the output, or None if the program is missing or fails: a record is made on any machine."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _cpu_name() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
