"""What every test relies on: a generator seeded from the test's name, and the development trace when it is there."""

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

settings.register_profile(
    "moe_rl", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("moe_rl")

ROOT = Path(__file__).resolve().parent.parent
DEV_TRACE = ROOT.parent / "shared" / "data" / "gptoss_dev.npz"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator that differs between tests and never between runs."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def dev_trace_path() -> Path:
    """Path of the GPT-OSS development trace, which lies beside the checkout and not in it."""
    if not DEV_TRACE.exists():
        pytest.skip("the development trace gptoss_dev.npz is not beside this checkout")
    return DEV_TRACE
