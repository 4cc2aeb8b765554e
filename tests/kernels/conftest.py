"""Kernels run in Triton's interpreter where there is no GPU (`tests/conftest.py` says so before triton is imported)."""

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: the GPU, or the CPU through the interpreter made faithful."""
    if torch.cuda.is_available():
        return "cuda"
    from moe_rl.kernels import interpreter

    torch.set_num_threads(1)
    interpreter.install()
    return "cpu"
