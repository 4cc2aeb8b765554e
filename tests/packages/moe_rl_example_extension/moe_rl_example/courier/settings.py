"""The settings of Courier's runs: Megatron's options in a YAML block `courier:`."""

from moe_rl.frameworks import MEGATRON_KEYS, Reader

READER = Reader(
    name="courier",
    title="Courier",
    recognizes=lambda raw: any(entry.key.startswith("courier.") for entry in raw.entries),
    keys={f"courier.{name}": rule for name, rule in MEGATRON_KEYS.items()},
    complete=lambda known, raw: known,
)
