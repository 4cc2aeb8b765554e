"""ROLL: what its runs set."""
