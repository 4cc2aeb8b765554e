"""Every importer gives back the routes that its producer wrote; one without a producer fails here."""

import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from replay_traces import assert_same
from rollouts import ONLY_ROUTES, SAVERS, Rollout, assert_routes, make_rollout, rollouts

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import PROVENANCES
from moe_rl.replay import IMPORTERS, Importer, ImportOptions, convert_trace, open_source

REGISTRY = IMPORTERS
every_saver = pytest.mark.parametrize("saver", SAVERS)


def format_of(saver: str) -> str:
    return saver.split()[0]


def assert_read(rollout: Rollout, saver: str, options: ImportOptions, path: Path) -> None:
    assert_routes(open_source(path, options=options).load(), rollout, last_token=format_of(saver) not in ONLY_ROUTES)


@pytest.mark.parametrize("importer", IMPORTERS, ids=lambda importer: importer.name)
def test_an_importer_declares_itself_and_has_a_producer(importer: Importer) -> None:
    assert importer.provenance in PROVENANCES
    assert set(importer.reads) <= {option.name for option in fields(ImportOptions)}
    assert importer.name in map(format_of, SAVERS), "write a producer in tests/replay and a saver in rollouts.py"


@pytest.mark.lengthy
@every_saver
@given(rollout=rollouts())
@settings(max_examples=25)
def test_routes_come_back_from_every_producer(saver: str, rollout: Rollout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, more = SAVERS[saver](rollout, Path(folder))
        source = open_source(path, options=rollout.options(**more))
        assert source.format == format_of(saver)
        trace = source.load()
        assert_routes(trace, rollout, last_token=format_of(saver) not in ONLY_ROUTES)
        assert source.num_tokens == trace.num_tokens
        assert source.num_sequences == trace.num_sequences
        assert source.inferred_fields == ()
        assert source.provenance == IMPORTERS[format_of(saver)].provenance
        with tempfile.TemporaryDirectory() as elsewhere:
            stored = convert_trace(source, Path(elsewhere) / "t.moetrace")
            stored.validate()
            assert_same(stored.load(), trace)


@pytest.mark.parametrize(
    "saver", [name for name in SAVERS if format_of(name) not in ("prime-rl", "megatron", "routes")]
)
def test_dense_layers_are_not_guessed(saver: str, tmp_path: Path) -> None:
    """prime-rl, Megatron and streams of routes hold no dense layers, or number those that they hold."""
    rollout = make_rollout(dense=1)
    path, more = SAVERS[saver](rollout, tmp_path)
    with pytest.raises(
        InvalidInputError, match=r"in MoE layer 0, every token is routed to expert 0 only.*--moe-layer-ids"
    ):
        open_source(path, options=ImportOptions(num_experts=32, **more))
    assert_read(rollout, saver, ImportOptions(num_experts=32, first_k_dense=1, **more), path)


@every_saver
def test_filler_is_never_told_by_its_value(saver: str, tmp_path: Path) -> None:
    """With top-1 routing, rows of zeros and of 0 .. K-1 are ordinary routes."""
    rollout = make_rollout(lengths=(6, 4), top_k=1)
    rollout.sequences[0][1:5] = 0
    rollout.sequences[1][0] = 0
    path, more = SAVERS[saver](rollout, tmp_path)
    assert_read(rollout, saver, rollout.options(**more), path)


@every_saver
def test_an_option_that_a_format_does_not_read_is_refused(saver: str, tmp_path: Path) -> None:
    path, more = SAVERS[saver](make_rollout(), tmp_path)
    given_values = {"prompt_lengths": (1, 1, 1), "layout_path": tmp_path, "pipeline_size": 2}
    for option, value in given_values.items():
        if option not in IMPORTERS[format_of(saver)].reads:
            with pytest.raises(InvalidInputError, match=f"{option} has no effect on .* read as {format_of(saver)}"):
                open_source(path, options=ImportOptions(**{**more, option: value}))
