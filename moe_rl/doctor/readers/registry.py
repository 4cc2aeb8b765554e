"""The frameworks whose runs can be read; a new one is one module and one line here."""

from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.doctor.readers import megatron, miles, nemo_rl, slime, verl
from moe_rl.doctor.readers.keys import Reader
from moe_rl.doctor.settings import ReadRun
from moe_rl.doctor.sources import RawRun

READERS: tuple[Reader, ...] = (
    verl.READER,
    nemo_rl.READER,
    miles.READER,
    slime.READER,
    megatron.READER,
)
"""In the order in which they are asked: slime and miles have all of Megatron's arguments, miles all of slime's."""

FRAMEWORKS = tuple(reader.name for reader in READERS)
TITLES = {reader.name: reader.title for reader in READERS}


def interpret(raw: RawRun, framework: str | None = None) -> ReadRun:
    """Return the run in Megatron's words, by the reader named `framework` or the first that recognizes it."""
    if framework is not None:
        by_name = {reader.name: reader for reader in READERS}
        if framework not in by_name:
            raise InvalidInputError(f"unknown framework {framework!r}.{nearest_name(framework, by_name)}")
        return by_name[framework].read(raw)
    reader = next((reader for reader in READERS if reader.recognizes(raw)), None)
    require(
        reader is not None,
        f"{', '.join(raw.files)}: no framework has these settings; name one by --framework "
        f"({', '.join(sorted(FRAMEWORKS))}).",
    )
    assert reader is not None
    return reader.read(raw)
