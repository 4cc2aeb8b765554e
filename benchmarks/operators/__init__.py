"""Operators of kernels, checked and timed beside their peers: what `moe-rl bench` and `make gpu-check` run."""
