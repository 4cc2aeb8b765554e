"""Every trap is found in every framework that it concerns, by one change to a good run; good runs are silent."""

import re
from pathlib import Path

import pytest
from runs import FIXTURES, GOOD, changed, diagnose, own_key
from seeds import REPLAYING, SEEDS, Seed

from moe_rl.doctor import Diagnosis, Environment, examine
from moe_rl.doctor.checks.registry import TRAPS
from moe_rl.doctor.traps import ERROR, NOTE, SEVERITIES, WARNING
from moe_rl.launch.readers import READERS

REGISTRY = TRAPS
WHOLE = Environment(
    python="3.12.4",
    versions={"megatron-core": "0.19.2", "transformer-engine": "2.14.0", "torch": "2.11.0"},
    modules=frozenset(
        {
            *("megatron", "transformer_engine", "transformer_engine_torch", "triton", "psutil", "deep_ep"),
            "moe_rl._native",
        }
    ),
    transformer_engine_built=True,
)
"""A machine that trains, with everything a run could ask for."""


def found(diagnosis: Diagnosis) -> set[tuple[str, str]]:
    """Return the traps found, with their severities."""
    return {(each.trap.name, each.severity) for each in diagnosis.findings if each.trap.name != "attach-refuses"}


@pytest.mark.parametrize("run", GOOD)
def test_a_good_run_has_no_error_and_no_warning(run: str) -> None:
    diagnosis = diagnose(FIXTURES / GOOD[run].file, environment=WHOLE)
    assert [each for each in diagnosis.findings if each.severity in (ERROR, WARNING)] == []
    assert diagnosis.run is not None
    assert diagnosis.run.settings.framework == GOOD[run].framework
    assert diagnosis.run.num_ignored > 0


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_one_change_is_found_as_one_trap(seed: Seed, tmp_path: Path) -> None:
    before = diagnose(changed(tmp_path, seed.run, seed.before), environment=WHOLE)
    after = diagnose(changed(tmp_path, seed.run, (*seed.before, seed.change)), environment=WHOLE)
    assert found(after) - found(before) == {(seed.trap, seed.severity)}


@pytest.mark.parametrize("run", REPLAYING)
def test_what_attach_refuses_is_a_note_and_with_attach_an_error(run: str, tmp_path: Path) -> None:
    """Other traps may be about the same option, so this one is looked at by itself."""
    change = (own_key(run, "delay_wgrad_compute"), True)
    for attach in (False, True):
        before = refusals(diagnose(changed(tmp_path, run, ()), attach=attach))
        after = refusals(diagnose(changed(tmp_path, run, (change,)), attach=attach))
        (new,) = after.keys() - before.keys()
        assert new.startswith("delay_wgrad_compute is not supported with expert replicas")
        assert after[new] == (ERROR if attach else NOTE)


def refusals(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the refusals without line numbers, which a change moves."""
    lines = re.compile(r":\d+\)")
    found = [each for each in diagnosis.findings if each.trap.name == "attach-refuses"]
    return {lines.sub(")", each.sentence): each.severity for each in found}


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_every_trap_has_a_seed_in_every_framework_that_it_concerns(trap) -> None:  # type: ignore[no-untyped-def]
    if trap.name in DEFECTS or trap.name == "attach-refuses":
        return
    seeded = {GOOD[seed.run].framework for seed in SEEDS if seed.trap == trap.name}
    assert seeded == {reader.name for reader in READERS if trap.concerns(reader)}


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_trap_says_why_what_to_do_and_who_says_so(trap) -> None:  # type: ignore[no-untyped-def]
    assert trap.severity in SEVERITIES
    assert all(name in READERS for name in trap.only)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", trap.name)
    for text in (trap.why, trap.remedy, trap.source, trap.title):
        assert len(text) > 10
    assert trap.why.endswith(".")
    severities = [seed.severity for seed in SEEDS if seed.trap == trap.name]
    if severities:
        assert min(severities, key=SEVERITIES.index) == trap.severity


def without(module: str, **changes: object) -> Environment:
    values = {name: getattr(WHOLE, name) for name in WHOLE.__slots__} | {"modules": WHOLE.modules - {module}} | changes
    return Environment(**values)


DEFECTS = {
    "missing-psutil": without("psutil"),
    "missing-triton": without("triton"),
    "transformer-engine-half-installed": without(
        "transformer_engine_torch", transformer_engine_built=False, versions={**WHOLE.versions}
    ),
    "megatron-without-replay": without("", versions={**WHOLE.versions, "megatron-core": "0.15.3"}),
    "dispatcher-not-installed": without("deep_ep"),
    "deepep-times-out-between-nodes": without("", versions={**WHOLE.versions, "nvidia-nvshmem-cu13": "3.7.2"}),
    "packing-without-core": without("moe_rl._native"),
    "fp8-without-transformer-engine": without(
        "transformer_engine", versions={"megatron-core": "0.19.2", "torch": "2.11.0"}
    ),
}
"""One thing wrong with the machine."""
ASKED_BY = {
    "megatron-without-replay": {"megatron", "megatron-log"},
    "dispatcher-not-installed": {"megatron", "verl", "slime"},
    "deepep-times-out-between-nodes": set(),  # no good run sends tokens between nodes by DeepEP; see the test below
    "packing-without-core": set(),  # a trap of runs that are to be balanced; see the test below
    "fp8-without-transformer-engine": {"slime", "nemo_rl-fp8"},
}
"""Runs for which the defect matters; for all where nothing is said."""


@pytest.mark.parametrize("run", GOOD)
@pytest.mark.parametrize("trap", DEFECTS)
def test_a_defect_of_the_machine_is_found_where_it_matters(trap: str, run: str) -> None:
    path = FIXTURES / GOOD[run].file
    new = found(diagnose(path, environment=DEFECTS[trap])) - found(diagnose(path, environment=WHOLE))
    expected = {trap} if run in ASKED_BY.get(trap, GOOD) else set()
    assert {name for name, _ in new} == expected


@pytest.mark.parametrize(
    ("version", "ranks", "is_trap"), [("3.7.2", 16, True), ("3.6.4", 16, False), ("3.7.2", 8, False)]
)
def test_deepep_between_nodes_and_a_newer_nvshmem_are_a_trap(
    tmp_path: Path, version: str, ranks: int, is_trap: bool
) -> None:
    changes = [("--moe-token-dispatcher-type", "flex"), ("--moe-enable-deepep", True)]
    path = changed(tmp_path, "slime", [*changes, ("--expert-model-parallel-size", ranks)])
    here = without("", versions={**WHOLE.versions, "nvidia-nvshmem-cu13": version})
    assert (
        "deepep-times-out-between-nodes" in {name for name, _ in found(diagnose(path, environment=here))}
    ) is is_trap


@pytest.mark.parametrize("run", GOOD)
def test_without_the_core_runs_that_are_to_be_balanced_pack_nothing(run: str) -> None:
    path, here = FIXTURES / GOOD[run].file, DEFECTS["packing-without-core"]
    named = {name for name, _ in found(diagnose(path, environment=here, attach=True))}
    assert ("packing-without-core" in named) == (GOOD[run].framework in ("verl", "slime", "miles"))


@pytest.mark.parametrize("trap", ["missing-psutil", "missing-triton", "transformer-engine-half-installed"])
def test_the_installation_alone_is_looked_at_without_files(trap: str) -> None:
    assert examine(None, WHOLE).findings == ()
    (finding,) = examine(None, DEFECTS[trap]).findings
    assert (finding.trap.name, finding.severity) == (trap, ERROR)


def test_the_two_halves_of_transformer_engine_are_told_apart() -> None:
    core = without("transformer_engine_torch", transformer_engine_built=False)
    core = Environment(
        python="3.12.4",
        versions={**core.versions, "transformer-engine-cu13": "2.14.0"},
        modules=core.modules,
    )
    (finding,) = examine(None, core).findings
    assert "without its PyTorch binding" in finding.sentence
    whole = Environment(
        python="3.12.4",
        versions={**core.versions, "transformer-engine-torch": "2.14.0"},
        modules=core.modules,
    )
    assert examine(None, whole).findings == ()


def test_a_machine_without_megatron_does_not_train_and_nothing_is_said_of_it() -> None:
    laptop = Environment(python="3.11.7", versions={"transformer-engine": "2.14.0"}, modules=frozenset())
    assert examine(None, laptop).findings == ()
    assert diagnose(FIXTURES / GOOD["slime"].file, environment=laptop).healthy


def test_errors_come_first() -> None:
    diagnosis = diagnose(FIXTURES / GOOD["slime"].file, environment=DEFECTS["missing-psutil"], attach=True)
    order = [SEVERITIES.index(each.severity) for each in diagnosis.findings]
    assert order == sorted(order)
    assert order[0] == 0
