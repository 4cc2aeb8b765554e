"""Wheel and sdist: what is in them, that they work, without a compiler too, and where one is required."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "profiling", "simulators", "configs")
"""Folders of the package that have a link at the top, too."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree as git would clone it, so that no build writes into the real one."""
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed beside these tests")
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


def environment(**changes: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("CXX", "MOE_RL_REQUIRE_NATIVE")} | changes


def build_wheel(source: Path, out: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Build with the backend of this environment (`make test` installs it), so that nothing is downloaded."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    return subprocess.run(
        [*pip, str(source)],
        env=environment(**changes),
        capture_output=True,
        text=True,
        check=False,
    )


def built_wheel(source: Path, out: Path, **changes: str) -> Path:
    result = build_wheel(source, out, **changes)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def run_in_wheel(wheel: Path, folder: Path, code: str) -> str:
    """Run code with the unpacked wheel as the only moe_rl; -S keeps an editable install's import hook out."""
    unpacked = folder / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    path = [str(unpacked), str(Path(np.__file__).parents[1])]
    ran = subprocess.run(
        [sys.executable, "-S", "-P", "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.strip()


WHERE = "import importlib.util, moe_rl; print(moe_rl.__file__, importlib.util.find_spec('moe_rl._native') is not None)"
DEMO = "from moe_rl.cli import main; sys.argv[1:] = 'demo --html report.html --json report.json'.split(); main()"


def check_demo(wheel: Path, folder: Path) -> str:
    printed = run_in_wheel(wheel, folder, DEMO)
    assert "moe-rl" in json.loads((folder / "report.json").read_text())["policies"]
    assert "<svg" in (folder / "report.html").read_text()
    return printed


def check_contents(checkout: Path, wheel: Path) -> None:
    names = names_in(wheel)
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"moe_rl"}
    assert not [name for name in names if "csrc" in name or name.endswith((".cpp", ".h", ".pyc"))]
    for folder in LINKED:
        sources = {path for path in (checkout / "moe_rl" / folder).rglob("*") if path.is_file()}
        assert {path.relative_to(checkout).as_posix() for path in sources} <= set(names), folder
    assert "moe_rl/py.typed" in names
    assert "moe_rl/_native.pyi" in names


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    build = f"import scikit_build_core.build as backend; backend.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, env=environment())
    (archive,) = out.glob("*.tar.gz")
    return archive


def test_the_sdist_holds_every_file_once(checkout: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    links = {name: member.linkname for name, member in members.items() if member.issym()}
    assert links == {folder: f"moe_rl/{folder}" for folder in LINKED}
    for folder in ("moe_rl", "tests"):
        sources = {path for path in (checkout / folder).rglob("*") if path.is_file() and not path.is_symlink()}
        assert {path.relative_to(checkout).as_posix() for path in sources} <= set(members), folder


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_wheel_of_the_sdist_holds_moe_rl_and_its_extension_only_and_runs_the_demo(
    checkout: Path, sdist: Path, tmp_path: Path
) -> None:
    wheel = built_wheel(sdist, tmp_path, MOE_RL_REQUIRE_NATIVE="1")
    check_contents(checkout, wheel)
    (extension,) = [name for name in names_in(wheel) if name.endswith(".so")]
    assert extension.startswith("moe_rl/_native.")
    where, is_native = run_in_wheel(wheel, tmp_path, WHERE).rsplit(" ", 1)
    assert where.startswith(str(tmp_path))
    assert is_native == "True"
    assert "reference planner" not in check_demo(wheel, tmp_path)


@pytest.mark.parametrize("form", ["zip", "tar.gz"])
def test_the_wheel_of_an_archive_of_git_is_whole_and_runs_the_demo(checkout: Path, form: str, tmp_path: Path) -> None:
    """What hosts of git repositories offer for download. pip unpacks a zip's links as text files."""
    source = tmp_path / "source"
    shutil.copytree(checkout, source, symlinks=True)
    author = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
    for command in (["init", "--quiet"], ["add", "--all", "--force"], [*author, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *command], cwd=source, check=True)
    archive = tmp_path / f"moe_rl-main.{form}"
    subprocess.run(
        ["git", "archive", f"--format={form}", "--prefix=moe_rl-main/", f"--output={archive}", "HEAD"],
        cwd=source,
        check=True,
    )
    wheel = built_wheel(archive, tmp_path / "wheels", CXX="/bin/false")
    check_contents(checkout, wheel)
    check_demo(wheel, tmp_path)


def test_without_a_compiler_the_wheel_is_pure_python_and_runs_the_demo(checkout: Path, tmp_path: Path) -> None:
    wheel = built_wheel(checkout, tmp_path, CXX="/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    check_contents(checkout, wheel)
    assert not [name for name in names_in(wheel) if name.endswith(".so")]
    where, is_native = run_in_wheel(wheel, tmp_path, WHERE).rsplit(" ", 1)
    assert where.startswith(str(tmp_path))
    assert is_native == "False"
    assert "reference planner" in check_demo(wheel, tmp_path)


def test_without_a_compiler_a_build_that_requires_the_extension_fails(checkout: Path, tmp_path: Path) -> None:
    result = build_wheel(checkout, tmp_path, CXX="/bin/false", MOE_RL_REQUIRE_NATIVE="1")
    assert result.returncode != 0
    assert not list(tmp_path.glob("*.whl"))
    assert "compiler" in (result.stdout + result.stderr).lower()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_wheel_of_make_installs_in_an_empty_environment_and_runs_the_demo_elsewhere(
    checkout: Path, tmp_path: Path
) -> None:
    """What comes in are wheels alone, from the registry; no compiler can be found, and nothing of torch is there."""
    make = ["make", "wheel", f"PYTHON={sys.executable}"]
    subprocess.run(make, cwd=checkout, check=True, env=environment(MOE_RL_REQUIRE_NATIVE="1"))
    (wheel,) = (checkout / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    programs, elsewhere = tmp_path / "empty" / "bin", tmp_path / "elsewhere"
    elsewhere.mkdir()
    bare = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "HOME"}
    bare |= {"PATH": str(programs), "CC": "/bin/false", "CXX": "/bin/false"}

    def run(*command: str) -> str:
        ran = subprocess.run(command, cwd=elsewhere, env=bare, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    pip = [str(programs / "python"), "-m", "pip"]
    run(*pip, "install", "--quiet", "--only-binary", ":all:", "-c", str(checkout / "constraints.txt"), str(wheel))
    installed = json.loads(run(*pip, "list", "--format", "json", "--disable-pip-version-check"))
    names = {each["name"].lower() for each in installed}
    assert {"moe_rl", "moe-rl"} & names
    assert not {"torch", "triton", "megatron-core", "transformers"} & names
    said = run(str(programs / "moe-rl"), "demo", "--html", "report.html", "--json", "report.json")
    assert "reference planner" not in said
    assert "moe-rl" in json.loads((elsewhere / "report.json").read_text())["policies"]
    assert "<svg" in (elsewhere / "report.html").read_text()
    for page in ("README.md", "docs/tutorials/trace.md", "docs/tutorials/kernels.md"):
        for code in pasted((ROOT / page).read_text()):
            ran = subprocess.run(
                [str(programs / code[0]), *code[1:]],
                cwd=elsewhere,
                env=bare,
                capture_output=True,
                text=True,
                check=False,
            )
            # What needs more than the wheel brings says so: one sentence that names it.
            sentence = ran.stderr.strip().splitlines()[-1:]
            assert ran.returncode == 0 or any("torch" in line or "checkout" in line for line in sentence), (
                code,
                ran.stdout,
                ran.stderr,
            )


def pasted(text: str) -> list[list[str]]:
    """Return the programs of a page's blocks, of `trace.md` those of a reader without a recording.

    Left out are `make`, scripts of a checkout, recordings of engines, and blocks that say why no test runs them.
    """
    sys.path.insert(0, str(ROOT / "tests" / "docs"))
    from pages import blocks, words

    found = []
    for block in blocks(text):
        if block.reason is None and block.python:
            found.append(["python", "-c", block.python])
        elif block.reason is None:
            found += [words(line) for line in block.lines if line.startswith("moe-rl ") and " --format " not in line]
    assert found
    return found
