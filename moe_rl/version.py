"""The version of moe_rl, importable from every part of it."""

__version__ = "0.1.0"
