"""Compact, sharded routes, and the check that they are right (docs/routes.md)."""

from moe_rl.routes.reader import RoutesReader
from moe_rl.routes.writer import RoutesWriter

__all__ = ["RoutesReader", "RoutesWriter"]
