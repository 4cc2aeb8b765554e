"""Readers of foreign routing formats: `trace.py` of a framework's folder, coded routes and NumPy files."""

from moe_rl.core.registry import Registry
from moe_rl.replay.importers import coded, npz
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence

IMPORTERS: Registry[Importer] = Registry("trace format", [npz.IMPORTER, coded.IMPORTER], part="trace:IMPORTER")

__all__ = ["IMPORTERS", "ImportOptions", "Importer", "RecordedSequence"]
