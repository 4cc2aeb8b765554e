"""Policies that decide where experts sit and which instance takes a token; see `registry.make_planner`."""
