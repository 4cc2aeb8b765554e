"""What benchmarks run under: Triton's fusion of products and sums as `make` sets it."""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
