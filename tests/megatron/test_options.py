"""Options of Megatron's MoE layers: those of the installed version are known, and an unknown one is named."""

from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from moe_rl.megatron.options import KNOWN, is_unknown, unknown_sentence


def test_every_option_stands_at_the_version_that_brought_it() -> None:
    assert all(not older & newer for older, newer in pairwise(KNOWN.values()))
    assert sorted(KNOWN) == list(KNOWN)


@pytest.mark.filterwarnings("ignore")  # Megatron warns when it is imported
def test_every_moe_option_of_the_installed_megatron_is_known_and_none_is_made_up() -> None:
    import megatron.core
    from megatron.core.transformer import TransformerConfig

    version = ".".join(megatron.core.__version__.split(".")[:2])
    options = {field.name for field in fields(TransformerConfig)}
    assert [option for option in options if is_unknown(option)] == []
    assert KNOWN[version] <= options, "brought by this version"


def test_an_unknown_option_is_told_by_its_name() -> None:
    assert is_unknown("moe_new_dispatch")
    assert not is_unknown("hidden_size")
    assert not is_unknown("use_transformer_engine_op_fuser")
    assert unknown_sentence("moe_new_dispatch", True).startswith(
        "moe_rl does not know the option moe_new_dispatch=True"
    )


@pytest.mark.multi_rank(world_size=2, case="attach_cases.unknown_option")
def test_attach_warns_of_an_unknown_option_that_is_switched_on(outcome: list[Any]) -> None:
    assert [len(said) for said in outcome] == [1, 0], "rank 0 says it once"
    assert "moe_rl does not know the option moe_new_dispatch=True" in outcome[0][0]
