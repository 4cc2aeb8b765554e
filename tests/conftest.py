"""What every test relies on: this checkout's moe_rl, a generator seeded from the test's name, the development trace.

Also which tests one worker of `make test` takes together.
"""

import os
import sys
import zlib
from pathlib import Path

# One thread per process: the machines that run these tests have two cores, and results must not depend on more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Triton decides at import whether kernels are interpreted, and any test module may import it first.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Under importmode=importlib only this makes `strategies` importable from every test.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import moe_rl

settings.register_profile(
    "moe_rl", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("moe_rl")

ROOT = Path(__file__).resolve().parent.parent
DEV_TRACE = ROOT.parent / "shared" / "data" / "gptoss_dev.npz"


def pytest_configure() -> None:
    """Stop where another checkout's moe_rl, or an installed one, would be tested in place of this one."""
    imported = Path(moe_rl.__file__).resolve()
    if not imported.is_relative_to(ROOT):
        raise pytest.UsageError(
            f"moe_rl is imported from {imported.parent}, not from this checkout: `make test` in {ROOT}."
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of several ranks come first, because they take longest; what shares fixtures shares a worker of xdist."""
    items.sort(key=lambda item: item.get_closest_marker("multi_rank") is None)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    """The launch that a case of tests/megatron is part of; of any other test, its file."""
    marker = item.get_closest_marker("multi_rank")
    launch = marker and marker.kwargs.get("world_size")
    return f"ranks-{launch}" if launch else item.path.stem


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator that differs between tests and never between runs."""
    name = f"{request.node.parent.nodeid}::{request.node.name}"  # xdist adds the group to the node's own id
    return np.random.default_rng(zlib.crc32(name.encode()))


@pytest.fixture(scope="session")
def dev_trace_path() -> Path:
    """Path of the GPT-OSS development trace, which lies beside the checkout and not in it."""
    if not DEV_TRACE.exists():
        pytest.skip("the development trace gptoss_dev.npz is not beside this checkout")
    return DEV_TRACE
