"""The frameworks whose runs can be read: `settings.py` of their folders."""

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.registry import Registry
from moe_rl.launch.keys import Reader
from moe_rl.launch.settings import ReadRun
from moe_rl.launch.sources import RawRun

READERS: Registry[Reader] = Registry("framework", part="settings:READER")


def interpret(raw: RawRun, framework: str | None = None) -> ReadRun:
    """Return the run in Megatron's words, by the reader named `framework` or the first that recognizes it."""
    if framework is not None:
        return READERS[framework].read(raw)
    for reader in READERS:
        if reader.recognizes(raw):
            return reader.read(raw)
    raise InvalidInputError(
        f"the settings in {', '.join(raw.files)} do not show which framework reads them. Name it with --framework "
        f"({', '.join(sorted(READERS.names))})."
    )
