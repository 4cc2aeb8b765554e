"""Readers of foreign routing formats: `trace.py` of a framework's folder, and NumPy files."""

from moe_rl.core.registry import Registry
from moe_rl.replay.importers import npz
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence

IMPORTERS: Registry[Importer] = Registry("trace format", [npz.IMPORTER], part="trace:IMPORTER")

__all__ = ["IMPORTERS", "ImportOptions", "Importer", "RecordedSequence"]
