"""Lay beside the checkout what a GPU image lacks: wheels for its Python, in carried/.

    python -m benchmarks.gpu.pack [--out carried]

Wheels are fetched by pip for Python 3.12, whatever runs this: pydantic (the planner's settings), megatron-core (phase
"runtime"), DeepGEMM (a peer, which compiles its kernels with the nvcc that is there), and this package's C++ core in
the stable ABI, built by pip where a Python 3.12 is at hand. What cannot be fetched is said, and the phases that need it
are not reached. `first_call.py` unpacks them. Git ignores the folder: else every commit that changes it grows by all.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITH_NEEDS, ALONE = ("pydantic",), ("megatron-core", "sgl-deep-gemm==0.1.5.post1", "apache-tvm-ffi==0.1.11")
"""Packages that are fetched with what they need, and without: torch and numpy are there."""
MOST_BYTES = 45 * 2**20
LEFT_OUT = (".git", ".venv", "out", "build", "dist", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache",
            ".hypothesis", ".benchmarks", "wheels")  # fmt: skip


def fetch(package: str, into: Path, *, with_needs: bool) -> str:
    """Download wheels for Python 3.12; return why that failed, or nothing."""
    pinned = constraint_of(package)
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:",
        *(() if with_needs else ("--no-deps",)),
        "--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none",
        "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64", "--platform",
        "manylinux2014_x86_64", "--dest", str(into), pinned,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{pinned}: {done.stderr.strip().splitlines()[-1]}"


def constraint_of(package: str) -> str:
    """Return a package with the version that constraints.txt pins, if it does."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        if name == package and version:
            return line
    return package


def build_core(into: Path) -> str:
    """Build this checkout's wheel of the stable ABI, for its C++ core; return why that failed, or nothing."""
    known = [shutil.which("python3.12"), *map(str, sorted(Path.home().glob(".pyenv/versions/3.12.*/bin/python")))]
    # A shim may be there for a Python that is not.
    python = next(
        (
            name
            for name in known
            if name and subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode == 0
        ),
        None,
    )
    if python is None:
        return "the C++ core: no Python 3.12 was found; what it plans is planned in numpy"
    done = subprocess.run(
        [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", str(into),
         str(ROOT)], capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if done.returncode == 0 else f"the C++ core: {done.stderr.strip().splitlines()[-1]}"


def packed_bytes(root: Path = ROOT) -> int:
    """Return the bytes of what travels: the checkout without what git ignores, and what is carried beside it."""
    total = 0
    for path in root.iterdir():
        if path.is_symlink() or path.name.startswith(LEFT_OUT):
            continue
        files = [path] if path.is_file() else path.rglob("*")
        total += sum(
            file.stat().st_size for file in files
            if file.is_file() and not file.is_symlink() and not set(file.parts) & {"__pycache__", "egg-info"}
        )  # fmt: skip
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch, build and unpack; say what is missing and how much travels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "carried")
    options = parser.parse_args(arguments)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    missing = [why for package in WITH_NEEDS if (why := fetch(package, options.out, with_needs=True))]
    missing += [why for package in ALONE if (why := fetch(package, options.out, with_needs=False))]
    if why := build_core(options.out):
        missing.append(why)
    names = sorted(wheel.name for wheel in options.out.glob("*.whl"))
    print("\n".join([*(f"carried: {name}" for name in names), *(f"not carried: {why}" for why in missing)]))
    total = packed_bytes()
    print(f"{total / 2**20:.1f} MiB travel, of at most {MOST_BYTES / 2**20:.0f}")
    return int(total > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
