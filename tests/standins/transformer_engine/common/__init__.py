"""What is common to all frameworks: the FP8 recipes."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
