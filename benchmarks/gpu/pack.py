"""Lay beside the checkout what a GPU image lacks: packages of pure Python or for its Python, unpacked, in carried/.

    python -m benchmarks.gpu.pack [--out carried]

Wheels are fetched by pip for Python 3.12, whatever runs this: pydantic (the planner's settings), megatron-core (phase
"runtime"), and this package's C++ core in the stable ABI, built by pip where a Python 3.12 is at hand. DeepGEMM's wheel
compiles for the machine that it is on, and is left out unless asked for. What cannot be fetched is said, and the phases
that need it are not reached. Git ignores the folder: it would be 10 MB more in every commit that changes it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITH_NEEDS, ALONE = ("pydantic",), ("megatron-core",)
"""Packages that are fetched with what they need, and without: megatron-core needs torch and numpy, which are there."""
DEEP_GEMM = "sgl-deep-gemm"
SITE_CUSTOMIZE = '''"""Python imports this when it starts: it finds moe_rl's C++ core, which lies here."""

import importlib.util
import sys
from pathlib import Path

CORE = next(iter(sorted((Path(__file__).parent / "moe_rl_core").glob("_native*.so"))), None)


class CoreFinder:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, CORE) if name == "moe_rl._native" and CORE else None


sys.meta_path.append(CoreFinder())
'''
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


def unpack(wheels: Path, into: Path) -> list[str]:
    """Unpack wheels into a folder that a child process imports from last; of ours the core alone."""
    names = []
    for wheel in sorted(wheels.glob("*.whl")):
        is_ours = wheel.name.startswith("moe_rl-")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not is_ours:
                    archive.extract(name, into)
                elif name.startswith("moe_rl/_native") and name.endswith(".so"):
                    (into / "moe_rl_core").mkdir(exist_ok=True)
                    (into / "moe_rl_core" / Path(name).name).write_bytes(archive.read(name))
        names.append(wheel.name)
    return names


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
    parser.add_argument("--deep-gemm", action="store_true", help="carry the wheel of DeepGEMM as a peer, too")
    options = parser.parse_args(arguments)
    shutil.rmtree(options.out, ignore_errors=True)
    site = options.out / "site-packages"
    site.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder)
        missing = [why for package in WITH_NEEDS if (why := fetch(package, wheels, with_needs=True))]
        alone = (*ALONE, DEEP_GEMM) if options.deep_gemm else ALONE
        missing += [why for package in alone if (why := fetch(package, wheels, with_needs=False))]
        if why := build_core(wheels):
            missing.append(why)
        names = unpack(wheels, site)
    (site / "sitecustomize.py").write_text(SITE_CUSTOMIZE, encoding="utf-8")
    print("\n".join([*(f"carried: {name}" for name in names), *(f"not carried: {why}" for why in missing)]))
    total = packed_bytes()
    print(f"{total / 2**20:.1f} MiB travel, of at most {MOST_BYTES / 2**20:.0f}")
    return int(total > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
