"""Triton kernels for the expert MLP of an MoE RL step. Imported as `moe_rl.kernels`.

One folder per operator: `op` (contract, checks, registration), `reference` (plain torch), `triton_kernel`, `tiling`.
"""
