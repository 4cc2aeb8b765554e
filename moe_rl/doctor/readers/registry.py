"""The frameworks whose runs can be read; a new one is one module and one line here."""

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.registry import Registry
from moe_rl.doctor.readers import megatron, miles, nemo_rl, slime, verl
from moe_rl.doctor.readers.keys import Reader
from moe_rl.doctor.settings import ReadRun
from moe_rl.doctor.sources import RawRun

READERS: Registry[Reader] = Registry(
    "framework", [verl.READER, nemo_rl.READER, miles.READER, slime.READER, megatron.READER]
)
"""In the order in which they are asked: slime and miles have all of Megatron's arguments, miles all of slime's."""


def interpret(raw: RawRun, framework: str | None = None) -> ReadRun:
    """Return the run in Megatron's words, by the reader named `framework` or the first that recognizes it."""
    if framework is not None:
        return READERS[framework].read(raw)
    for reader in READERS:
        if reader.recognizes(raw):
            return reader.read(raw)
    raise InvalidInputError(
        f"{', '.join(raw.files)}: not readable as a run, no framework has these settings; name one by --framework "
        f"({', '.join(sorted(READERS.names))}) if it is one of theirs."
    )
