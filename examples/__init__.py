"""Programs to start from; `examples.countdown` is a whole RL run."""
