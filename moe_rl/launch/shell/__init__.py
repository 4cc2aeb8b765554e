"""Launch scripts, followed without being run."""
