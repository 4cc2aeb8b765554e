"""Small complete runs: each module is a script (`python -m moe_rl.recipes.<name>`) that produces something real."""
