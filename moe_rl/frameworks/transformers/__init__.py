"""Transformers' expert parallelism."""
