"""How many (token, expert) pairs each expert gets, per bin of tokens."""
