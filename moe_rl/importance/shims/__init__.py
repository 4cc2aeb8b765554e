"""Thin fronts with the signatures that slime, prime-rl and NeMo-RL call; none imports its framework."""
