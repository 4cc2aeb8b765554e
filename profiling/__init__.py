"""Measuring what runs: GPU timers, recordings attributed to the parts of a step, cluster constants fitted to them.

Imported as `moe_rl.profiling`.
"""
