"""miles: a fork of slime; the same arguments, and launchers written in Python.

Keys: radixark/miles:miles/utils/arguments.py.
"""

from moe_rl.frameworks.slime import settings as slime
from moe_rl.launch.keys import Reader
from moe_rl.launch.sources import RawRun


def _recognizes(raw: RawRun) -> bool:
    if not slime.recognizes(raw):
        return False
    # Its arguments are slime's: the name stands in a path, a module or a value.
    texts = [*raw.words, *raw.files]
    for entry in raw.entries:
        texts += [str(entry.key), str(entry.value)]
    return "miles" in "\n".join(texts).lower()


READER = Reader(
    name="miles",
    title="miles",
    recognizes=_recognizes,
    batch=slime.FACTS["batch"],
    batch_defaults=slime.FACTS["batch_defaults"],
    keys=slime.KEYS,
    option=slime.option,
    complete=lambda settings, raw: slime.complete(settings, raw, "miles"),
)
