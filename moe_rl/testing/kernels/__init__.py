"""Kernels without a GPU: the problems that tests and benchmarks share, and what the compiler makes of every launch."""
