"""Grouped GEMM of the expert MLP: ragged groups without padding, weights in one tensor or behind a pointer table."""
