"""A package of a test's own, installed by pip as a user installs it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the module's `SOURCE`, without network; the build writes into a copy."""
    source: Path = request.module.SOURCE
    copy = tmp_path_factory.mktemp("source") / source.name
    shutil.copytree(source, copy)
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
    made = subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(target), str(copy)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return target
