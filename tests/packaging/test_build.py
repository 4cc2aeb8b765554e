"""The wheel: what is in it, what happens without a compiler, and what happens without one where one is required."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "profiling", "simulators", "configs")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree as git would clone it, so that no build writes into the real one."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the files of the project are known from git only")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    copy = tmp_path_factory.mktemp("checkout")
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, copy / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return copy


def build_wheel(checkout: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    have_backend = all(importlib.util.find_spec(name) for name in ("scikit_build_core", "nanobind"))
    isolation = ["--no-build-isolation"] if have_backend else []
    shutil.rmtree(checkout / "build", ignore_errors=True)
    return subprocess.run(
        [sys.executable, "-m", "pip", "wheel", str(checkout), "--no-deps", *isolation, "--wheel-dir", str(out)],
        env={name: value for name, value in os.environ.items() if name not in ("CXX", "MOE_RL_REQUIRE_NATIVE")}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def built_wheel(checkout: Path, out: Path, **environment: str) -> Path:
    result = build_wheel(checkout, out, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def run_in_wheel(wheel: Path, tmp_path: Path, code: str) -> str:
    """Run code with the unpacked wheel as the only moe_rl; -S keeps an editable install's import hook out."""
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    path = [str(unpacked), str(Path(np.__file__).parents[1])]
    return subprocess.run(
        [sys.executable, "-S", "-P", "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


BACKEND = (
    "from moe_rl.core import native; import moe_rl; print(moe_rl.__file__, native.native_core('auto') is not None)"
)


def check_contents(checkout: Path, wheel: Path) -> None:
    names = names_in(wheel)
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"moe_rl"}
    assert not [name for name in names if "csrc" in name or name.endswith((".cpp", ".h", ".pyc"))]
    for folder in LINKED:
        sources = {path.relative_to(checkout).as_posix() for path in (checkout / folder).rglob("*") if path.is_file()}
        assert {f"moe_rl/{source}" for source in sources} <= set(names), folder
    assert "moe_rl/py.typed" in names
    assert "moe_rl/_native.pyi" in names


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_with_a_compiler_the_wheel_holds_moe_rl_and_its_extension_only(checkout: Path, tmp_path: Path) -> None:
    wheel = built_wheel(checkout, tmp_path, MOE_RL_REQUIRE_NATIVE="1")
    check_contents(checkout, wheel)
    (extension,) = [name for name in names_in(wheel) if name.endswith(".so")]
    assert extension.startswith("moe_rl/_native.")
    where, is_native = run_in_wheel(wheel, tmp_path, BACKEND).rsplit(" ", 1)
    assert where.startswith(str(tmp_path))
    assert is_native == "True"


def test_without_a_compiler_the_wheel_is_pure_python_and_works(checkout: Path, tmp_path: Path) -> None:
    wheel = built_wheel(checkout, tmp_path, CXX="/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    check_contents(checkout, wheel)
    assert not [name for name in names_in(wheel) if name.endswith(".so")]
    where, is_native = run_in_wheel(wheel, tmp_path, BACKEND).rsplit(" ", 1)
    assert where.startswith(str(tmp_path))
    assert is_native == "False"


def test_without_a_compiler_a_build_that_requires_the_extension_fails(checkout: Path, tmp_path: Path) -> None:
    result = build_wheel(checkout, tmp_path, CXX="/bin/false", MOE_RL_REQUIRE_NATIVE="1")
    assert result.returncode != 0
    assert not list(tmp_path.glob("*.whl"))
    assert "compiler" in (result.stdout + result.stderr).lower()
