"""On what a number was measured: processor, clocks, driver, libraries, and the commit with its uncommitted changes."""

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

GPU_QUERIES = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRecord:
    """One machine at one moment. None where the machine does not say."""

    gpu: str | None
    driver: str | None
    sm_clock_mhz: float | None
    """While the record was taken; `sm_clock_max_mhz` is the highest the driver allows."""
    sm_clock_max_mhz: float | None
    memory_clock_mhz: float | None
    power_limit_w: float | None
    temperature_c: float | None
    cpu: str
    cores: int
    load_average: float
    """Of the last minute: whether other programs shared the machine."""
    python: str
    torch: str | None
    triton: str | None
    numpy: str | None
    commit: str | None
    dirty: bool | None
    """True if tracked files differ from the commit."""

    def as_dict(self) -> dict[str, object]:
        """Return what a result file holds."""
        return asdict(self)


def record_hardware(repository: Path) -> HardwareRecord:
    """Return the record of this machine and of the checkout at `repository`."""
    gpu = _query_gpu()
    commit, dirty = _checkout(repository)
    return HardwareRecord(
        gpu=gpu.get("name"),
        driver=gpu.get("driver_version"),
        sm_clock_mhz=_number(gpu.get("clocks.sm")),
        sm_clock_max_mhz=_number(gpu.get("clocks.max.sm")),
        memory_clock_mhz=_number(gpu.get("clocks.mem")),
        power_limit_w=_number(gpu.get("power.limit")),
        temperature_c=_number(gpu.get("temperature.gpu")),
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        torch=_version("torch"),
        triton=_version("triton"),
        numpy=_version("numpy"),
        commit=commit,
        dirty=dirty,
    )


def parse_gpu_query(line: str) -> dict[str, str]:
    """Return the values of one line of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` by query."""
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
