"""What an adapter needs of its framework is checked by name, and another version is named once."""

import importlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_runner import moe_rl

from moe_rl.balancing import BalancerConfig
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks import FRAMEWORKS, contract
from moe_rl.frameworks.contract import Framework, Symbol, framework_of
from moe_rl.frameworks.ranks import require_distributed, unbalanced
from moe_rl.version import INSTALLED_FROM

KNOWN = Framework(
    name="numpy",
    summary="not one",
    distribution="numpy",
    tested=("1.0",),
    symbols=(Symbol(name="json:JSONEncoder.default", parameters=("self", "o")), Symbol(name="json")),
    lines=("one line",),
    facts=("Replay: none.",),
)


def test_another_version_gives_one_warning_with_both(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="moe_rl.frameworks"):
        version = KNOWN.check()
        KNOWN.check()
    assert [
        f"numpy {version} is installed, but this adapter was tested with 1.0" in each for each in caplog.messages
    ] == [True]


@pytest.mark.parametrize(
    ("symbol", "sentence"),
    [
        (Symbol(name="no_such_package.module:name"), "no_such_package.module:name cannot be imported"),
        (Symbol(name="json:JSONEncoder.gone"), "json:JSONEncoder.gone cannot be imported"),
        (
            Symbol(name="json:dumps", parameters=("object",)),
            r"takes the parameters \(obj, .*\), but the adapter expects \(object, ...\)",
        ),
    ],
)
def test_a_symbol_that_changed_stops_the_adapter(symbol: Symbol, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        replace(KNOWN, symbols=(symbol,)).check()


def test_an_absent_framework_is_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match=r"somebody \(package no-such-distribution\) is not installed"):
        replace(KNOWN, name="somebody", distribution="no-such-distribution").check()


def test_a_report_says_of_the_version_of_every_symbol_and_of_traps_whether_it_is_well() -> None:
    gone = Symbol(name="json:gone")
    version = KNOWN.version()
    known = replace(KNOWN, beside=(gone,), traps=f"{__name__}:a_trap")
    said = [
        (f"numpy {version}, tested with 1.0", False),
        ("json:JSONEncoder.default exists", True),
        ("json exists", True),
        (gone.problem(), False),
    ]
    assert known.report() == [*said, ("a trap", False)]
    assert replace(known, traps="").report() == said
    for tested, sentence in (((), f"numpy {version}"), ((version, "1"), f"numpy {version}, tested with {version}, 1")):
        assert replace(KNOWN, tested=tested).report()[0] == (sentence, True)
    absent = replace(KNOWN, distribution="no-such-distribution").report()
    assert absent == [("numpy (package no-such-distribution) is not installed.", False)]


def test_a_contract_file_names_symbols_with_their_parameters_or_none(tmp_path: Path) -> None:
    (tmp_path / "contract.yaml").write_text(
        "name: someone\nsummary: a framework\ndistribution: some-one\ntested: ['1.0']\n"
        "symbols: ['json:dumps(obj, skipkeys)', json]\nbeside: ['json:loads(s)']\n"
        "lines: ['pip install {installed_from}']\nfacts: ['Replay: none.']\n"
    )
    assert framework_of(str(tmp_path / "contract.py")) == Framework(
        name="someone",
        summary="a framework",
        distribution="some-one",
        tested=("1.0",),
        symbols=(Symbol(name="json:dumps", parameters=("obj", "skipkeys")), Symbol(name="json")),
        beside=(Symbol(name="json:loads", parameters=("s",)),),
        lines=(f"pip install {INSTALLED_FROM}",),
        facts=("Replay: none.",),
    )


def a_trap() -> list[tuple[str, bool]]:
    """What stands in the way of `KNOWN` on every machine."""
    return [("a trap", False)]


def test_a_run_without_process_group_is_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match="Start the run with torchrun"):
        require_distributed("verl")


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")  # of the frameworks' imports
def test_the_entries_say_so() -> None:
    from moe_rl.frameworks import Settings
    from moe_rl.frameworks.megatron_run import MegatronRun
    from moe_rl.frameworks.transformers import attach as transformers_ep

    model, config = torch.nn.Linear(1, 1), BalancerConfig()
    with pytest.raises(InvalidInputError, match="Start the run with torchrun"):
        transformers_ep.attach(model, config)
    for framework in FRAMEWORKS:
        with pytest.raises(InvalidInputError, match=f"{framework.name} needs .* Start the run with torchrun"):
            MegatronRun.attach(framework, model, None, Settings(balancer=config, strict=True))


def test_what_cannot_be_balanced_goes_on_or_stops(caplog: pytest.LogCaptureFixture) -> None:
    error = InvalidInputError("the model has no MoELayer.")
    with caplog.at_level(logging.WARNING, logger="moe_rl.frameworks"):
        unbalanced("verl", error, strict=False)
    assert caplog.messages == [
        "moe_rl: this verl run continues without balancing (set MOE_RL_STRICT=1 to stop instead): "
        "the model has no MoELayer."
    ]
    with pytest.raises(InvalidInputError, match="no MoELayer"):
        unbalanced("verl", error, strict=True)


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_the_doctor_says_that_a_framework_is_absent_and_what_to_write(name: str) -> None:
    """An exported variable does not reach all workers of a Ray job."""
    said = moe_rl("doctor", "--framework", name)
    assert said.code == 1
    assert f"NOT  {name} (package {name}) is not installed." in said.out
    assert '\\"MOE_RL\\": \\"observe\\",   (a new line in RUNTIME_ENV_JSON' in said.out
    assert "export" not in said.out
    assert "With `observe`, nothing moves." in said.out


def test_an_adapter_to_an_absent_framework_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, needs in (("trl", "trl"), ("transformers", "transformers.distributed.expert_parallel")):
        monkeypatch.setitem(sys.modules, needs, None)
        monkeypatch.delitem(sys.modules, f"moe_rl.frameworks.{name}.attach", raising=False)
        with pytest.raises(InvalidInputError, match="cannot be imported"):
            importlib.import_module(f"moe_rl.frameworks.{name}.attach")


@pytest.mark.lengthy
@pytest.mark.filterwarnings("ignore")  # of Megatron's imports
def test_the_doctor_reports_what_is_there_and_what_to_write() -> None:
    said = moe_rl("doctor", "--framework", "megatron", "--json", "-")
    report = json.loads(said.out)
    assert said.code == 0
    assert report["found"][0] == {"what": "megatron 0.16.1, tested with 0.16.1", "as_expected": True}
    assert len(report["found"]) == 1 + len(FRAMEWORKS["megatron"].symbols)
    assert (report["facts"], report["lines"]) == (
        list(FRAMEWORKS["megatron"].facts),
        list(FRAMEWORKS["megatron"].lines),
    )
