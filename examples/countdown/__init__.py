"""GRPO on Countdown: a whole RL run, with a rollout engine, replayed routing and a balanced trainer, on a CPU."""
