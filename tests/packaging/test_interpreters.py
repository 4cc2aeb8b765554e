"""Wheels on every Python that is here, and the image's commands: `make wheels` runs both.

The wheel of CPython 3.11 serves that version alone; the one built on 3.12 uses the stable ABI and serves every later
Python. A Python that is not on this machine is skipped by name.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
STABLE_ABI_FROM = (3, 12)
DOCKERFILE = ROOT / "Dockerfile"

pytestmark = pytest.mark.slow


def interpreter(version: str) -> str:
    """Return a Python of that version that can make environments, from PATH or among pyenv's; skip if there is none."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, installed)):
        if candidate is None:
            continue
        asked = [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return candidate
    pytest.skip(f"not run: there is no Python {version} on this machine")


def bare_environment(programs: Path, **more: str) -> dict[str, str]:
    """Return an environment whose only programs are those of one virtual environment and of the system."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "HOME"}
    return kept | {"PATH": f"{programs}:/usr/bin:/bin"} | more


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def new_environment(python: str, folder: Path) -> Path:
    """Make an empty virtual environment and return the folder of its programs."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return folder / "bin"


def committed_tree(folder: Path) -> Path:
    """Copy what git has, in its present state, so that a build writes nothing into the working tree."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the files of the project are known from git only")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


def build(python: str, source: Path, out: Path) -> Path:
    """Build a wheel with pip's isolation, as `make wheel` does, with the C++ core or not at all."""
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"MOE_RL_REQUIRE_NATIVE": "1", "PIP_CONSTRAINT": str(source / "constraints.txt")}
    pip = [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--wheel-dir", str(out), str(source)], source, environment)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return committed_tree(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def stable_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one wheel for Python 3.12 and every later one."""
    wheel = build(interpreter("3.12"), source, tmp_path_factory.mktemp("stable"))
    assert "-cp312-abi3-" in wheel.name
    return wheel


@pytest.mark.parametrize("version", PYTHONS)
def test_a_wheel_runs_the_demo_with_the_core_in_an_empty_environment(
    version: str, source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = interpreter(version)
    if tuple(map(int, version.split("."))) >= STABLE_ABI_FROM:
        wheel = request.getfixturevalue("stable_wheel")
    else:
        wheel = build(python, source, tmp_path / "wheel")
        assert f"-cp{version.replace('.', '')}-" in wheel.name
    programs = new_environment(python, tmp_path / "empty")
    environment = bare_environment(programs, CC="/bin/false", CXX="/bin/false")
    install = ["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "-c", str(source / "constraints.txt")]
    run([str(programs / "python"), *install, str(wheel)], tmp_path, environment)
    printed = run([str(programs / "moe-rl"), "demo", "--json", "report.json"], tmp_path, environment)
    assert "reference planner" not in printed
    assert "moe-rl" in json.loads((tmp_path / "report.json").read_text())["policies"]


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions as (word, rest), without comments, continued lines joined."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_commands_of_the_image_build_it_in_an_empty_root(tmp_path: Path) -> None:
    """The Dockerfile's own lines, with folders of this test for the image's and an empty environment per stage.

    What this cannot show: the base image, `apt-get` (its one package is a compiler, which is here), and the user.
    """
    (root := tmp_path / "root").mkdir()
    stage, programs, settings = 0, Path(), {}
    entry: list[str] = []
    default: list[str] = []
    folder = root

    def inside(text: str) -> str:
        """Put the image's absolute folders below this test's root."""
        return re.sub(r"(?<![\w.-])/(source|wheels)\b", rf"{root}/\1", text)

    for word, rest in instructions():
        if word == "FROM":
            version = re.match(r"python:(\d+\.\d+)-slim", rest)
            assert version, f"a base image that this test does not know: {rest}"
            stage += 1
            programs = new_environment(interpreter(version[1]), tmp_path / f"stage{stage}")
            settings = {}
        elif word == "COPY" and not rest.startswith("--from"):
            assert rest == ". /source"
            committed_tree(root / "source")
        elif word == "COPY":
            assert rest == "--from=build /wheels /wheels"  # both stages share this test's root
        elif word == "WORKDIR":
            folder = Path(inside(rest))
        elif word == "ENV":
            settings |= dict(pair.split("=", 1) for pair in inside(rest).split())
        elif word == "RUN" and rest.startswith("apt-get"):
            assert rest.endswith("g++")
        elif word == "RUN":
            folder.mkdir(exist_ok=True)
            run(["/bin/sh", "-e", "-c", inside(rest)], folder, bare_environment(programs, **settings))
        elif word in ("ENTRYPOINT", "CMD"):
            entry, default = (json.loads(rest), default) if word == "ENTRYPOINT" else (entry, json.loads(rest))
        else:
            assert (word, rest) == ("USER", "nobody")
    assert stage == 2
    assert not (root / "wheels").exists(), "the second stage leaves the wheels in the image"
    started = bare_environment(programs)
    assert "simulate" in run([str(programs / entry[0]), *default], tmp_path, started)
    commands = re.findall(r"^# .*docker run --rm moe_rl (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert commands, "the Dockerfile shows no command"
    for command in commands:
        assert "moe-rl" in run([str(programs / entry[0]), *command.split()], tmp_path, started)
