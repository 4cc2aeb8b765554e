"""What every test relies on: this checkout's moe_rl, a generator seeded from the test's name, the development trace.

Also which tests one worker of `make test` takes together, and the launches of several ranks: the cases of
`@pytest.mark.multi_rank(case="module.function", world_size=...)` tests of a folder run in one launch per world size,
per `launch=` where those of a world size must not share imports, and per `backend=` ("gloo" without it). `outcome` is
what every rank returned for this test's case. When a case fails, those after it have no result: select the test alone
to see the others.
"""

import gc
import os
import sys
import warnings
import zlib
from pathlib import Path

# One thread per process: the machines that run these tests have two cores, and results must not depend on more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Triton 3.9 warns that 3.10 will no longer fuse multiplications and additions by itself.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# Triton decides at import whether kernels are interpreted, and any test module may import it first.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Under importmode=importlib only this makes `strategies` importable from every test.
sys.path.insert(0, str(Path(__file__).parent))
# Tests of the planner take the objective `rms` from the example package.
sys.path.append(str(Path(__file__).parent / "packages" / "moe_rl_example_extension"))

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from drawn import SEED, days, seed, waiting
from hypothesis import HealthCheck, settings
from local_ranks import Launch, run_cases

import moe_rl

settings.register_profile(
    "moe_rl", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("moe_rl")

ROOT = Path(__file__).resolve().parent.parent
DEV_TRACE = ROOT.parent / "shared" / "data" / "gptoss_dev.npz"
CASE_TIMEOUT_S = 240.0
"""Of the start and of every case of several ranks: far above what one takes on a busy machine."""
_launches: dict[tuple[Path, int, str, str], Launch] = {}


def pytest_configure() -> None:
    """Stop where another checkout's moe_rl, or an installed one, would be tested in place of this one."""
    imported = Path(moe_rl.__file__).resolve()
    if not imported.is_relative_to(ROOT):
        raise pytest.UsageError(
            f"moe_rl is imported from {imported.parent}, not from this checkout: `make test` in {ROOT}."
        )
    seed()  # before workers and ranks start: all of them draw by it


def pytest_report_header() -> str:
    """Say by which seed tests draw their combinations today."""
    return f"drawn combinations: {SEED}={seed()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of several ranks come first, because they take longest; what shares fixtures shares a worker of xdist.

    With `MOE_RL_TEST_DAYS=10`, as `make test` sets it, nine of ten tests that take seconds wait for another day.
    """
    left_out = _of_other_days(items)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    items.sort(key=lambda item: item.get_closest_marker("multi_rank") is None)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _of_other_days(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return, of every file, the tests of several ranks and the lengthy ones that wait for another day."""
    of_files: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("multi_rank") or item.get_closest_marker("lengthy"):
            of_files.setdefault(item.nodeid.partition("::")[0], {})[item.nodeid] = item
    left_out = []
    for file, costly in of_files.items():
        left_out += [costly[name] for name in waiting(costly, of=file, days=days())]
    return left_out


def _launch_of(item: pytest.Item) -> tuple[Path, int, str, str] | None:
    marker = item.get_closest_marker("multi_rank")
    if marker is None or "case" not in marker.kwargs:
        return None
    how = marker.kwargs
    return item.path.parent, how["world_size"], how.get("launch", ""), how.get("backend", "gloo")


def _group(item: pytest.Item) -> str:
    """The launch that a case of several ranks is part of; Ray's cluster; of any other test, its file."""
    launch = _launch_of(item)
    if launch:
        backend = "" if launch[3] == "gloo" else launch[3]
        return "-".join(["ranks", launch[0].name, str(launch[1]), *filter(None, (launch[2], backend))])
    return "ray" if "ray_cluster" in getattr(item, "fixturenames", ()) else item.path.stem


@pytest.fixture
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What every rank returned for the case of this test."""
    launch = _launch_of(request.node)
    if launch is None:
        raise ValueError(f"{request.node.nodeid} lacks the multi_rank marker with case and world_size.")
    if launch not in _launches:
        selected = [item for item in request.session.items if _launch_of(item) == launch]
        cases = dict.fromkeys(item.get_closest_marker("multi_rank").kwargs["case"] for item in selected)
        _launches[launch] = run_cases(
            launch[0],
            list(cases),
            world_size=launch[1],
            folder=tmp_path_factory.mktemp(_group(request.node)),
            timeout_s=CASE_TIMEOUT_S,
            backend=launch[3],
        )
    return _launches[launch].of(request.node.get_closest_marker("multi_rank").kwargs["case"])


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator that differs between tests and never between runs."""
    name = f"{request.node.parent.nodeid}::{request.node.name}"  # xdist adds the group to the node's own id
    return np.random.default_rng(zlib.crc32(name.encode()))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray on this machine, started once for all tests: starting takes seconds of both cores."""
    import ray

    for last in (False, False, True):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
            break
        except Exception:  # Ray raises no other kind when its node has not answered within 30 s
            if last:
                raise
            ray.shutdown()
    yield ray
    with warnings.catch_warnings():
        # Ray ends its processes without waiting for them, at the end of a session whose last test may be any.
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        gc.collect()


@pytest.fixture(scope="session")
def dev_trace_path() -> Path:
    """Path of the GPT-OSS development trace, which lies beside the checkout and not in it."""
    if not DEV_TRACE.exists():
        pytest.skip("the development trace gptoss_dev.npz is not beside this checkout")
    return DEV_TRACE
