"""What benchmarks run under: Triton's fusion of products and sums as `make` sets it, and which machine is compared."""

import os

import pytest

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, object]) -> None:
    """Figures of kernels are the same on every machine, or of the GPU that the baseline's folder names."""
    if any("bench_kernel_figures" in argument for argument in config.args):
        machine_info.clear()
