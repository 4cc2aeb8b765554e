"""A process that has imported what all tests need but for the code under test, and forks one test session per request.

Importing torch and Megatron takes longer than most tests. A session is a fork that imports the runtime with the fault
in it and runs tests; so are the launches of several ranks that they ask for. Two kinds of process are needed, as of
launches: Megatron builds with what it finds when it is imported, so `standins` has imported tests/standins before.
"""

import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
HOOK = Path(__file__).parent / "hook"
MUTATED = ("moe_rl.balancing", "moe_rl.megatron", "moe_rl.frameworks")
FLAVORS = ("", "standins")
"""The latter is of launches with that name in `multi_rank(launch=...)`, the former of all others."""
IMPORTED = """
    numpy yaml pytest hypothesis torch torch.distributed triton local_ranks
    megatron.core.distributed megatron.core.models.gpt.gpt_layer_specs megatron.core.optimizer
    megatron.core.pipeline_parallel megatron.core.dist_checkpointing megatron.core.extensions
    moe_rl.core moe_rl.planner moe_rl.config moe_rl.replay moe_rl.routes moe_rl.simulators moe_rl.importance
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRITON_DEFAULT_FP_FUSION": "1",
    "TRITON_INTERPRET": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""What tests/conftest.py and tests/local_ranks.py set, before torch is imported."""
fork = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One call of pytest."""

    tests: Sequence[str]
    """Files or node ids."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """MOE_RL_TEST_MUTANT_*, as hook/sitecustomize.py reads them; empty without a fault."""
    reach: Path | None = None
    """Where to write which lines the tests reach (reach.py); None: the first failure ends the session."""
    flavor: str = ""
    log: Path
    limit_s: float


class Zygote:
    """The process, seen from the program; one session at a time."""

    def __init__(self, flavor: str) -> None:
        self._requests, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=serve, args=(theirs, flavor), daemon=False)
        self._process.start()

    def run(self, session: Session) -> int:
        """Return pytest's exit code; that of `kill` (-9) where the session overran its limit."""
        self._requests.send(session)
        return self._requests.recv()

    def close(self) -> None:
        """End the process."""
        self._requests.send(None)
        self._process.join()


def serve(requests: Connection, flavor: str) -> None:
    """Import, then answer requests until None comes."""
    os.environ |= ENVIRONMENT
    os.chdir(ROOT)
    sys.path[:0] = [str(TESTS), str(ROOT)]
    as_python_begins = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if flavor == "standins":
            sys.path.insert(0, str(TESTS / "megatron"))
            importlib.import_module("standins")
        for module in IMPORTED.split():
            importlib.import_module(module)
    early = sorted(name for name in sys.modules if name.startswith(MUTATED))
    if early:
        raise RuntimeError(f"{early[0]} is imported before it could be given a fault.")
    while (session := requests.recv()) is not None:
        process = fork.Process(target=_run, args=(session, as_python_begins))
        process.start()
        process.join(session.limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
        requests.send(process.exitcode)


def _run(session: Session, filters: list[Any]) -> NoReturn:
    """Run the tests of a session in this fork and end it with pytest's exit code."""
    os.setsid()
    _write_to(session.log.open("ab"))
    import local_ranks
    import pytest

    def launched(arguments: Sequence[str], log: BinaryIO, environment: Mapping[str, str]) -> int:
        """A launch of several ranks as a fork: see `local_ranks.run_launch`."""
        launch = fork.Process(target=_launch, args=(arguments, log, environment, filters))
        launch.start()
        try:
            launch.join()
        finally:
            launch.terminate()
        return launch.exitcode or 0

    local_ranks.run_launch = launched
    # Processes that a test starts by itself find the fault, too.
    path = os.pathsep.join([str(HOOK), str(TESTS), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"PYTHONPATH": path} | session.environment
    runpy.run_path(str(HOOK / "sitecustomize.py"))
    plugins: list[Any] = [OfFlavor(session.flavor)]
    options = ["-q", "-s", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    if session.reach is None:
        options.append("-x")
    else:
        from mutants.reach import Recorder

        plugins.append(Recorder(session.reach))
    warnings.filters[:] = filters
    code = int(pytest.main([*options, *session.tests], plugins=plugins))
    sys.stdout.flush()
    os._exit(code)


def _launch(arguments: Sequence[str], log: BinaryIO, environment: Mapping[str, str], filters: list[Any]) -> None:
    import local_ranks

    os.setpgid(0, 0)
    _write_to(log)
    os.environ |= environment
    warnings.filters[:] = filters
    warnings._filters_mutated()  # type: ignore[attr-defined]
    local_ranks.main(arguments)


def _write_to(log: BinaryIO) -> None:
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115


class OfFlavor:
    """A plugin of pytest: of the tests that were asked for, those whose launch this process can fork."""

    def __init__(self, flavor: str) -> None:
        self._flavor = flavor

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Deselect the others."""
        ours = [item for item in items if flavor_of(item) == self._flavor]
        config.hook.pytest_deselected(items=[item for item in items if flavor_of(item) != self._flavor])
        items[:] = ours


def flavor_of(item: Any) -> str:
    """Return the flavor of a test: whether its launch imports the stand-ins."""
    marker = item.get_closest_marker("multi_rank")
    return "standins" if marker and marker.kwargs.get("launch") == "standins" else ""
