"""Compact, sharded routes, and the check that they are right (docs/routes.md)."""

from moe_rl.routes.check import CheckedSequence, check_routes
from moe_rl.routes.faults import THREADS, Fault
from moe_rl.routes.reader import RoutesReader
from moe_rl.routes.verdict import Verdict
from moe_rl.routes.writer import RoutesWriter

__all__ = ["THREADS", "CheckedSequence", "Fault", "RoutesReader", "RoutesWriter", "Verdict", "check_routes"]
