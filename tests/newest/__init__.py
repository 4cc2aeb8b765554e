"""The runtime and the adapters on the newest releases: `python -m newest`."""
