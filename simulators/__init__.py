"""Predict what a step costs under a policy, and make the traces and loads to try it on. Needs numpy only."""
