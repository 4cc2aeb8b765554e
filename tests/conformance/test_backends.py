"""Every kernel backend computes what it says it implements, or says why it cannot here; one that runs is executed."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="kernels need torch")

import torch

from benchmarks.operators.cases import TINY, TINY_OAI, Case
from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.operators.harness import Problem, Row, run_problem
from benchmarks.operators.run import device_here, with_providers
from moe_rl.kernels import BACKENDS, BackendUnavailableError, KernelBackend, operators

pytestmark = pytest.mark.triton
REGISTRY = BACKENDS
DEVICE = device_here()
OPERATORS = {operator.name: operator for operator in operators()}
CASES = (Case(model=TINY, tokens=6, routing="zipf"), Case(model=TINY_OAI, tokens=6, routing="dropped"))
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
interpreted_is_slow = pytest.mark.parametrize(
    "backend",
    [pytest.param(backend, marks=[pytest.mark.slow] * (backend.name == "triton")) for backend in BACKENDS],
    ids=lambda backend: backend.name,
)
"""Triton's interpreter takes a minute: `make test-emulator` runs it."""


def problems_of(backend: KernelBackend) -> Iterator[Problem]:
    """The benchmark's problems of one operator that this backend solves here, on a few tokens."""
    torch.set_num_threads(1)
    for name, build in ALL_SUITES.items():
        # The whole expert MLP only composes operators; tests/kernels/test_grouped_experts.py has it.
        for case in CASES if name != "experts" else ():
            for made in build(case, DEVICE):
                yield with_providers(made, (backend.name,))


@every_backend
def test_a_backend_names_operators_that_there_are(backend: KernelBackend) -> None:
    assert set(backend.operators or ()) <= set(OPERATORS)
    assert backend.operators != ()
    assert backend.devices
    assert set(backend.auto_on) <= set(backend.devices)


@interpreted_is_slow
def test_a_backend_is_right_wherever_it_says_that_it_runs(backend: KernelBackend) -> None:
    claimed = {name for name in OPERATORS if backend.implements(name)}
    runs = {name for name in claimed if not OPERATORS[name].why_not(backend.name, DEVICE)}
    rows: list[Row] = [row for made in problems_of(backend) for row in run_problem(made, None)]
    assert [row for row in rows if row["passed"] is False] == []
    executed = {str(row["operator"]) for row in rows if row["passed"]}
    assert runs <= executed, f"never executed: {sorted(runs - executed)}"
    for name in claimed - runs:
        with pytest.raises(BackendUnavailableError, match=rf"backend '{backend.name}' of {name} \w+"):
            OPERATORS[name].resolve(backend.name, DEVICE)
    assert DEVICE not in backend.devices or runs, "it claims a device and runs nothing there"


def test_a_backend_is_refused_for_what_it_does_not_implement() -> None:
    for backend in BACKENDS:
        for name in OPERATORS:
            if not backend.implements(name):
                assert "does not implement" in OPERATORS[name].why_not(backend.name, DEVICE)


def test_somewhere_every_operator_has_an_automatic_choice() -> None:
    for operator in OPERATORS.values():
        for device in ("cpu", "cuda"):
            assert any(device in backend.auto_on and backend.implements(operator.name) for backend in BACKENDS)
