"""Options in groups: what a user writes is flat, and a word has one place."""

import json
import pickle

import pytest
from pydantic import ValidationError

from moe_rl.balancing.config import BalancerConfig
from moe_rl.core.errors import InvalidInputError
from moe_rl.option_groups import OptionGroup, group_of, words_of
from moe_rl.study.options import SimulationOptions, merge_options
from moe_rl.study.rl_options import KnownStepOptions, RlStepOptions, TuneOptions

SCHEMAS = (SimulationOptions, RlStepOptions, KnownStepOptions, TuneOptions, BalancerConfig)
MOST_WORDS = 16
"""Of a group: a reader takes in one at a glance."""


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_words_of_a_schema_make_an_equal_one_again(schema: type[OptionGroup]) -> None:
    default = schema()
    words = {name: value for name, value in default.words().items() if name != "recompute_modules"}
    assert set(default.words()) == set(words_of(schema))
    assert schema(**words) == default
    assert schema(**json.loads(json.dumps(words))) == default
    assert pickle.loads(pickle.dumps(default)) == default
    assert default.stated_words() == {}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_no_group_is_too_large_and_no_group_holds_groups(schema: type[OptionGroup]) -> None:
    groups = [group for field in schema.model_fields.values() if (group := group_of(field)) is not None]
    assert max(len(group.model_fields) for group in (*groups, schema)) <= MOST_WORDS
    assert all(group_of(field) is None for group in groups for field in group.model_fields.values())


def test_words_that_both_state_are_fields_of_one_class() -> None:
    for word in ("replica_slots", "cross_node_slots", "domain_balance", "cluster", "objective", "history_steps"):
        classes = [
            {base for base in type(holder).__mro__ if word in getattr(base, "__annotations__", {})}
            for options in (SimulationOptions(), BalancerConfig())
            for holder in [getattr(options, words_of(type(options))[word].group or "")]
        ]
        assert set.intersection(*classes), word


def test_a_stated_word_is_known_as_stated_also_where_it_states_the_default() -> None:
    options = SimulationOptions(replica_slots=1, seed=3)
    assert options.stated_words() == {"replica_slots": 1, "seed": 3}
    assert options.states("replica_slots")
    assert not options.states("resident_slots")
    assert options.with_words(resident_slots=2).stated_words() == {"replica_slots": 1, "seed": 3, "resident_slots": 2}
    assert options.slots.resident_slots == 0


def test_a_group_and_a_word_of_it_are_not_stated_together() -> None:
    slots = SimulationOptions(replica_slots=2).slots
    assert SimulationOptions(slots=slots).slots.replica_slots == 2
    for words in ({"slots": slots, "replica_slots": 2}, {"replica_slots": 2, "slots": slots}):
        with pytest.raises(ValidationError, match="set only one of the two"):
            SimulationOptions(**words)


def test_errors_name_the_word_as_the_user_wrote_it() -> None:
    with pytest.raises(InvalidInputError, match=r"^unknown key 'replica_slot'\. Did you mean 'replica_slots'\?$"):
        merge_options(SimulationOptions, {"replica_slot": 2})
    with pytest.raises(InvalidInputError, match=r"^--replica-slots must be a whole number, got 'many'\.$"):
        merge_options(SimulationOptions, {"replica_slots": "many"})
    with pytest.raises(InvalidInputError, match=r"^unknown key 'replica_slot'\. Did you mean 'replica_slots'\?$"):
        BalancerConfig(replica_slot=2)
    with pytest.raises(InvalidInputError, match=r"^replica_slots must be at least 0, got -1\.$"):
        BalancerConfig(replica_slots=-1)


def test_a_changed_configuration_is_checked_as_a_new_one() -> None:
    with pytest.raises(InvalidInputError, match="static_rows needs experts='grouped'"):
        BalancerConfig(experts="grouped").with_words(experts="megatron", static_rows=True)
