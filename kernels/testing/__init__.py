"""What kernel tests and kernel benchmarks share: a faithful interpreter, cases, and how results are compared."""
