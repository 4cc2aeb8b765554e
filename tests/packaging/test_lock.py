"""requirements.lock, which `make lock` writes, is of this checkout's extras and pins."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("test", "lint", "docs", "examples", "browser")
PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def pins(file: str) -> dict[str, Version]:
    return {canonicalize_name(name): Version(version) for name, version in PIN.findall((ROOT / file).read_text())}


def needed(extra: str, project: dict[str, list[str]]) -> list[Requirement]:
    """Return what an extra asks for, the extras that it is made of resolved."""
    found = []
    for line in project[extra]:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == "moe-rl":
            for inner in requirement.extras:
                found += needed(inner, project)
        else:
            found.append(requirement)
    return found


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    locked = pins("requirements.lock")
    shared = {name: version for name, version in pins("constraints.txt").items() if name in locked}
    assert len(shared) >= 20
    assert {name: locked[name].public for name in shared} == {name: str(pin) for name, pin in shared.items()}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_lock_has_what_an_extra_asks_for(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = pins("requirements.lock")
    asked = [*map(Requirement, project["dependencies"]), *needed(extra, project["optional-dependencies"])]
    missing = [str(each) for each in asked if locked.get(canonicalize_name(each.name)) not in each.specifier]
    assert missing == []


def test_the_lock_is_of_registries_alone() -> None:
    """No path of a machine, no repository and no editable install."""
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert PIN.match(line), line
