"""What another package adds to moe_rl; docs/extending.md explains it."""
