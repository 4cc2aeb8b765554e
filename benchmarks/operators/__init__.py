"""Operators of kernels, checked and timed beside their peers: what `moe-rl bench` and the first call run."""
