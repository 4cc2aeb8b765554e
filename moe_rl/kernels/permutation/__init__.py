"""Sort (token, expert) pairs by slot and back: no padding, no host sync, a fixed order of every sum."""
