"""The log-probabilities that a router gives to chosen experts, read off its logits in one pass."""
