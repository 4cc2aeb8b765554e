"""Keywords, a YAML block and variables give one configuration; whatever is wrong is said when they are read."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from moe_rl.balancing import BalancerConfig
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks import Settings, balancer_config, settings_from_environment
from moe_rl.frameworks.ranks import largest_common_node
from moe_rl.frameworks.run_settings import Until, settings_from_mapping, variables

BLOCK: dict[str, Any] = {"policy": "moe-rl", "replica_slots": 2, "parameters": {"pack": False}, "strict": True}
EXPECTED = BalancerConfig(policy="moe-rl", replica_slots=2, parameters={"pack": False})


def test_all_three_ways_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "trainer: {}\nmoe_rl:\n  policy: moe-rl\n  replica_slots: 2\n  parameters: {pack: false}\n  strict: true\n"
    )
    by_variables = {
        "MOE_RL": "moe-rl",
        "MOE_RL_REPLICA_SLOTS": "2",
        "MOE_RL_PARAMETERS": "{pack: false}",
        "MOE_RL_STRICT": "1",
        "MOE_RL_NATIVE": "0",
        "OTHER": "x",
    }
    expected = Settings(balancer=EXPECTED, strict=True)
    assert balancer_config({name: value for name, value in BLOCK.items() if name != "strict"}) == EXPECTED
    assert settings_from_mapping(BLOCK) == expected
    assert settings_from_environment(by_variables) == expected
    assert settings_from_environment({"MOE_RL_CONFIG": str(path)}) == expected
    over = settings_from_environment({"MOE_RL_CONFIG": str(path), "MOE_RL": "ultraep", "MOE_RL_PARAMETERS": "{}"})
    assert over is not None
    assert over.balancer.policy == "ultraep"


def test_observe_is_the_policy_moe_rl_that_carries_nothing_out() -> None:
    observed = settings_from_environment({"MOE_RL": "observe", "MOE_RL_REPLICA_SLOTS": "2"})
    assert observed is not None
    assert (observed.balancer.policy, observed.balancer.observe, observed.balancer.slots.replica_slots) == (
        "moe-rl",
        True,
        2,
    )
    assert observed.balances


def test_a_run_ends_after_a_number_of_updates_or_with_a_file() -> None:
    by_number = settings_from_environment({"MOE_RL": "moe-rl", "MOE_RL_UNTIL": "40"})
    by_file = settings_from_environment({"MOE_RL": "moe-rl", "MOE_RL_UNTIL": "/shared/off"})
    assert by_number is not None
    assert by_file is not None
    assert (by_number.until, by_file.until) == (Until(updates=40), Until(file=Path("/shared/off")))
    assert by_number.in_common() != by_file.in_common()
    assert settings_from_mapping({"until": 40}).until == by_number.until
    assert settings_from_mapping({"until": 0}).until == Until(updates=0), "off from the start"
    for wrong in (-1, True, ""):
        with pytest.raises(InvalidInputError, match="`until` must be a number of updates"):
            settings_from_mapping({"until": wrong})


@pytest.mark.parametrize("name", ["static_rows", "placement_bitwise", "experts"])
def test_what_observing_leaves_without_effect_is_refused(name: str) -> None:
    values = {"experts": "grouped"} | ({name: True} if name != "experts" else {})
    with pytest.raises(InvalidInputError, match=r"has no effect with observe"):
        BalancerConfig(observe=True, **values)


def test_nodes_are_the_hosts_unless_somebody_says_otherwise() -> None:
    by_hosts = settings_from_environment({"MOE_RL": "static"})
    by_user = settings_from_environment({"MOE_RL": "static", "MOE_RL_RANKS_PER_NODE": "4"})
    assert by_hosts is not None
    assert by_user is not None
    assert "ranks_per_node" not in by_hosts.given
    assert "ranks_per_node" in by_user.given


@pytest.mark.parametrize(
    ("hosts", "size"), [("aaaa", 4), ("aabb", 2), ("abab", 1), ("aaaaaabb", 2), ("aaabbb", 3), ("a", 1)]
)
def test_a_node_holds_ranks_of_one_host_alone(hosts: str, size: int) -> None:
    assert largest_common_node(hosts) == size
    nodes = [hosts[start : start + size] for start in range(0, len(hosts), size)]
    assert all(len(set(node)) == 1 and len(node) == size for node in nodes)


def test_what_a_driver_hands_on_is_what_is_read() -> None:
    given = {"MOE_RL": "static", "MOE_RL_STRICT": "1", "MOE_RL_NATIVE": "0", "PATH": "/bin"}
    assert variables(given) == {"MOE_RL": "static", "MOE_RL_STRICT": "1"}
    assert settings_from_environment(variables(given)) == settings_from_environment(given)


def test_the_router_shift_alone_balances_nothing() -> None:
    alone = settings_from_environment({"MOE_RL_ROUTER_SHIFT": "0.8"})
    both = settings_from_environment({"MOE_RL_ROUTER_SHIFT": "0.8", "MOE_RL": "static"})
    assert alone is not None
    assert both is not None
    assert (alone.router_shift, alone.balances) == (0.8, False)
    assert (both.router_shift, both.balances) == (0.8, True)


def test_a_router_shift_that_would_weigh_nothing_is_refused_before_any_rollout() -> None:
    pytest.importorskip("torch")
    from moe_rl.frameworks.slime.attach import WORKER
    from moe_rl.frameworks.verl.losses import checked_settings

    config = SimpleNamespace(policy_loss=SimpleNamespace(loss_mode="vanilla"))
    checked_settings(config)
    with pytest.raises(InvalidInputError, match=r"loss_mode is vanilla. Set a loss mode that begins with moe_rl_"):
        checked_settings(config, router_shift=True)
    for args, sentence in (
        ({}, "needs a loss from moe_rl.frameworks.slime.losses"),
        (
            {"custom_loss_function_path": "moe_rl.frameworks.slime.losses.policy_loss_function"},
            "but --use-rollout-logprobs skips it",
        ),
    ):
        with patch.dict(os.environ, {"MOE_RL_ROUTER_SHIFT": "0.8"}), pytest.raises(InvalidInputError, match=sentence):
            replace(WORKER).init(SimpleNamespace(use_rollout_logprobs=True, **args))


def test_ranks_have_all_in_common_but_paths_and_ports() -> None:
    base = Settings(balancer=BalancerConfig())
    for change in (
        *({"strict": True}, {"check": True}, {"telemetry": True}, {"router_shift": 0.8}),
        *({"record": Path("a")}, {"plans": Path("a")}, {"until": Until(updates=3)}, {"given": frozenset({"pack"})}),
    ):
        assert replace(base, **change).in_common() != base.in_common(), change
    of_host: dict[str, Any] = {"record": Path("a"), "plans": Path("a"), "until": Until(file=Path("a"))}
    of_another = dict.fromkeys(("record", "plans"), Path("b")) | {"until": Until(file=Path("b")), "prometheus": 9400}
    assert replace(base, **of_host).in_common() == replace(base, **of_another).in_common()


def test_nothing_set_is_off() -> None:
    assert settings_from_environment({}) is None
    assert settings_from_environment({"MOE_RL": "", "MOE_RL_STRICT": "1"}) is None


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"MOE_RL": "ultrapp"}, "unknown policy 'ultrapp'. Did you mean 'ultraep'?"),
        ({"MOE_RL": "eplb"}, "moves experts to other home ranks in every plan"),
        ({"MOE_RL": "ultraep", "MOE_RL_REPLICA_SLOT": "1"}, "Did you mean 'MOE_RL_REPLICA_SLOTS'?"),
        ({"MOE_RL": "ultraep", "MOE_RL_REPLICA_SLOTS": "two"}, "replica_slots must be a whole number, got 'two'"),
        ({"MOE_RL": "ultraep", "MOE_RL_REPLICA_SLOTS": "-1"}, "replica_slots must be at least 0, got -1"),
        ({"MOE_RL": "ultraep", "MOE_RL_CLUSTER": "h10"}, "h10"),
        ({"MOE_RL": "ultraep", "MOE_RL_PARAMETERS": "3"}, "parameters must be a mapping"),
        ({"MOE_RL": "ultraep", "MOE_RL_PARAMETERS": "{"}, "MOE_RL_PARAMETERS"),
        ({"MOE_RL": "ultraep", "MOE_RL_STRICT": "yes please"}, "MOE_RL_STRICT: must be 0 or 1, got 'yes please'"),
        ({"MOE_RL": "ultraep", "MOE_RL_RECORD": "3"}, "record must be a word"),
        ({"MOE_RL": "ultraep", "MOE_RL_POLICY": "static"}, "MOE_RL and MOE_RL_POLICY both choose the policy"),
        ({"MOE_RL_ROUTER_SHIFT": "1.5"}, "must be 0 (off) or between 0 and 1 (exclusive), got 1.5"),
        ({"MOE_RL_CONFIG": "/nowhere.yaml"}, "MOE_RL_CONFIG: there is no file /nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_said_at_the_start(variables: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        settings_from_environment(variables)
    assert sentence in str(raised.value)


def test_a_block_names_its_own_mistakes() -> None:
    with pytest.raises(InvalidInputError, match="no setting 'replica_slot'"):
        balancer_config({"replica_slot": 1})
    with pytest.raises(InvalidInputError, match="strict must be true or false"):
        settings_from_mapping({"strict": 1})


def test_a_file_without_the_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("policy: ultraep\n")
    with pytest.raises(InvalidInputError, match="has no section `moe_rl:`"):
        settings_from_environment({"MOE_RL_CONFIG": str(path)})
