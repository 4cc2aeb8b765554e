"""Every reader of a framework's settings is given good runs of it; one without a fixture fails here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from runs import FIXTURES, GOOD

from moe_rl.launch import interpret, read_run
from moe_rl.launch.keys import Reader
from moe_rl.launch.readers import READERS
from moe_rl.launch.settings import KINDS
from moe_rl.launch.sources import RawRun

REGISTRY = READERS


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_reader_reads_runs_of_its_framework(reader: Reader) -> None:
    own = [good for good in GOOD.values() if good.framework == reader.name]
    assert own, "write a good run in tests/doctor/fixtures and name it in runs.GOOD"
    for good in own:
        raw = read_run([FIXTURES / good.file])
        assert interpret(raw) == interpret(raw, reader.name)
        run = interpret(raw)
        assert run.settings.framework == reader.name
        read = [name for name in KINDS if getattr(run.settings, name) is not None]
        assert len(read) >= (3 if reader.verdict_only else 10)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_keys_set_fields_that_there_are(reader: Reader) -> None:
    assert {rule.field for rule in reader.keys.values()} <= set(KINDS)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: {"words": [*raw.words, "miles.train"]},
        lambda raw: {"files": [*raw.files, "/data/Miles/run.sh"]},
        lambda raw: {"entries": [*raw.entries, replace(raw.entries[0], key="custom_path", value=("miles.utils.x",))]},
        lambda raw: {"entries": [*raw.entries, replace(raw.entries[0], key="miles_router_port", value=(9,))]},
    ],
)
def test_miles_is_told_from_slime_by_its_name_wherever_it_stands(change: Callable[[RawRun], dict[str, Any]]) -> None:
    (miles,) = [reader for reader in READERS if reader.name == "miles"]
    raw = read_run([FIXTURES / GOOD["slime"].file])
    assert not miles.recognizes(raw)
    assert miles.recognizes(replace(raw, **change(raw)))
