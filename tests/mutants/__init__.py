"""Small faults put into the runtime, one at a time, and whether a test notices."""
