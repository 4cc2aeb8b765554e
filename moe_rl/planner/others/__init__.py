"""Policies that others have published, each in one file that names its source; ours is `planner.moe_rl_policy`."""
