"""Kernel benchmarks: real model shapes and routings, every provider checked before it is timed.

`cases` (shapes, routing), `harness` (check and time one problem), `kernel_suites` and `gemm_suites` (the problems),
`run` (suites -> document). Behind `moe-rl bench`, `benchmarks/bench_kernels.py` and `benchmarks/gpu_check.py`.
"""
