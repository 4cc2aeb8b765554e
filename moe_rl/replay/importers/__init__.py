"""Readers of foreign routing formats. A new one is a file with an `IMPORTER` and a line in `IMPORTERS`."""

from moe_rl.core.registry import Registry
from moe_rl.replay.importers import megatron, nemo_rl, npz, prime_rl, sglang, slime, verl, vllm
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence

IMPORTERS: Registry[Importer] = Registry(
    "trace format",
    [
        npz.IMPORTER,
        vllm.IMPORTER,
        sglang.IMPORTER,
        verl.IMPORTER,
        slime.IMPORTER,
        nemo_rl.IMPORTER,
        prime_rl.IMPORTER,
        megatron.IMPORTER,
    ],
    group="moe_rl.importers",
)

__all__ = ["IMPORTERS", "ImportOptions", "Importer", "RecordedSequence"]
