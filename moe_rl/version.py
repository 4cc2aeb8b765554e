"""The version of moe_rl, importable from every part of it."""

__version__ = "0.1.0"

INSTALLED_FROM = "/path/to/moe_rl"
"""What pip gets in the lines that moe_rl prints: a checkout. Once a release is on an index: "moe-rl"."""


def install_line(extra: str) -> str:
    """Return the line that installs moe_rl with an extra, e.g. "pip install '/path/to/moe_rl[ray]'"."""
    return f"pip install '{INSTALLED_FROM}[{extra}]'"
