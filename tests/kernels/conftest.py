"""Kernels run in Triton's interpreter where there is no GPU (`tests/conftest.py` says so before triton is imported)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What interprets or compiles kernels is marked, for `make quick` to leave out: nearly everything here."""
    from triton.runtime.interpreter import InterpreterBuilder

    has_scaled_products = hasattr(InterpreterBuilder, "create_dot_scaled")
    no_mx = pytest.mark.skip(reason="Triton before 3.8 interprets no scaled products")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.triton)
            if not has_scaled_products and any(word in item.nodeid for word in ("mx", "scaled_dots")):
                item.add_marker(no_mx)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: the GPU, or the CPU through the interpreter made faithful."""
    if torch.cuda.is_available():
        return "cuda"
    from moe_rl.kernels import interpreter

    torch.set_num_threads(1)
    interpreter.install()
    return "cpu"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch.empty returns holds NaN, so that what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(4).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)
