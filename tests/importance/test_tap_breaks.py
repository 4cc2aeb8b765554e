"""Twenty ways to break the tap: sixteen that can be known are never silent, four that cannot are named in the docs."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import PolicyLossInputs, RouterShift, RouterStore, RouterTap, as_floats, policy_loss
from tests.importance.test_router_tap import HIDDEN, INPUT_IDS, KEYS, TOKENS, Embedded, Layer, PlainTopKRouter

PAGE = Path(__file__).parents[2] / "docs" / "importance-reference.md"


class Run:
    """A model of two layers with its tap, as a loop uses them; each way changes one thing."""

    def __init__(self, layers: int = 2) -> None:
        torch.manual_seed(0)
        self.model = Embedded(nn.Sequential(*(Layer() for _ in range(layers))))
        self.tap = RouterTap(self.model)

    def forward(self, keys: Tensor | None, input_ids: Tensor = INPUT_IDS) -> None:
        if keys is not None:
            self.tap.rows = keys
        self.model(input_ids)

    def old(self, keys: Tensor = KEYS, input_ids: Tensor = INPUT_IDS, num_tokens: int = TOKENS) -> RouterStore:
        with torch.no_grad(), self.tap.old_pass(num_tokens) as store:
            self.forward(keys, input_ids)
        return store

    def update(
        self,
        keys: Tensor | None = KEYS,
        input_ids: Tensor = INPUT_IDS,
        store: RouterStore | None = None,
        asked: Tensor = KEYS,
    ) -> RouterShift:
        with torch.no_grad(), self.tap.update_pass(store or self.old()) as update:
            self.forward(keys, input_ids)
            shift = update.finish(asked)
        as_floats(shift.metrics)
        return shift


def no_rows(run: Run) -> None:
    run.update(None)


def fewer_keys_than_rows(run: Run) -> None:
    run.update(KEYS[:1])


def num_tokens_too_small(run: Run) -> None:
    run.old(num_tokens=TOKENS - 2)


def a_key_below_minus_one(run: Run) -> None:
    run.old(KEYS - 2)


def keys_that_are_no_integers(run: Run) -> None:
    run.update(KEYS.float())


def keys_in_another_order(run: Run) -> None:
    run.update(KEYS.flip(0))


def two_tokens_with_one_key(run: Run) -> None:
    run.old(KEYS.clamp(min=1))


def the_store_of_the_step_before(run: Run) -> None:
    run.update(input_ids=INPUT_IDS + 1)


def the_store_of_another_model(run: Run) -> None:
    run.update(store=Run(layers=3).old())


def a_second_micro_batch_without_rows(run: Run) -> None:
    with run.tap.update_pass(run.old()):
        run.forward(KEYS)
        run.forward(None)


def a_reference_model_inside_the_pass(run: Run) -> None:
    """As LoRA's `disable_adapter`: the same modules run."""
    with run.tap.update_pass(run.old()):
        run.forward(KEYS)
        with torch.no_grad():
            run.model(INPUT_IDS)


def a_model_that_was_compiled_before(run: Run) -> None:
    """What `torch.compile` does to a module that has run: its compiled call goes around hooks."""
    for layer in run.model.layers:
        layer.router._compiled_call_impl = layer.router.forward
    run.old()


def one_layer_that_was_compiled_before(run: Run) -> None:
    store = run.old()
    run.model.layers[1].router._compiled_call_impl = run.model.layers[1].router.forward
    run.update(store=store)


def a_copy_of_the_model_runs(run: Run) -> None:
    copy = Run()
    with run.tap.old_pass(TOKENS):
        run.tap.rows = KEYS
        copy.model(INPUT_IDS)


def tokens_that_the_old_pass_has_not_seen(run: Run) -> None:
    seen = KEYS.clone()
    seen[1] = -1
    run.update(store=run.old(seen))


def a_mask_that_leaves_no_token(run: Run) -> None:
    """gamma is right and the loss is 0: nobody logs."""
    gamma = run.update().ratio
    values = torch.full((2, 3), -0.5)
    policy_loss(
        PolicyLossInputs(
            log_prob=values, old_log_prob=values, advantages=values, router_shift_ratio=gamma,
            response_mask=torch.full((2, 3), 0.5),
        )
    )  # fmt: skip


KNOWN: dict[Callable[[Run], None], str] = {
    no_rows: "tap.rows does not say which tokens the router read",
    fewer_keys_than_rows: "a router ran on 6 rows, but tap.rows has 3 keys",
    num_tokens_too_small: r"tap.rows contains key 5, but old_pass was opened for 4 tokens: use keys 0 \.\. 3",
    a_key_below_minus_one: r"tap.rows contains key -2, but old_pass was opened for 6 tokens",
    keys_that_are_no_integers: r"tap.rows must be an int64 tensor of keys, not torch.float32",
    keys_in_another_order: "has key 3 at a token with input id 4, but earlier this key belonged to input id 16",
    two_tokens_with_one_key: "has key 1 at a token",
    the_store_of_the_step_before: "the keys belong to other tokens or to another step, or a key occurs twice",
    the_store_of_another_model: "the store is for a model with 3 routers, but this model has 2",
    a_second_micro_batch_without_rows: "Set tap.rows before every forward pass",
    a_reference_model_inside_the_pass: "such as those of a reference model, outside",
    a_model_that_was_compiled_before: "the tap saw none of its routers. A model that was compiled before the pass",
    one_layer_that_was_compiled_before: "did not see them run in this forward pass: layers.1.router",
    a_copy_of_the_model_runs: "tap.rows was set in this pass, but no router ran",
    tokens_that_the_old_pass_has_not_seen: "has no route at more than 1% of the valid tokens: their gamma is 1",
    a_mask_that_leaves_no_token: "response_mask holds values other than 0 and 1 at more than 1%",
}


@contextmanager
def said(sentence: str) -> Iterator[None]:
    """An error or a warning, as pytest makes every warning one."""
    with pytest.raises((InvalidInputError, UserWarning), match=sentence):
        yield


@pytest.mark.parametrize("way", KNOWN, ids=lambda way: way.__name__)
def test_what_can_be_known_is_said(way: Callable[[Run], None]) -> None:
    run = Run()
    assert run.update().ratio.tolist() == [[1.0] * 3] * 2, "the loop is right without the change"
    run = Run()
    with said(KNOWN[way]):
        way(run)


def keys_wrong_in_both_passes(run: Run) -> RouterShift:
    swapped = KEYS.flip(0)
    return run.update(swapped, store=run.old(swapped))


def two_equal_tokens_with_one_key(run: Run) -> RouterShift:
    ids, keys = INPUT_IDS.clone(), KEYS.clone()
    ids[1, 0], keys[1, 0] = ids[0, 0], 0
    return run.update(keys, ids, store=run.old(keys, ids), asked=keys)


def an_old_pass_by_other_weights(run: Run) -> RouterShift:
    with torch.no_grad():  # not those that sampled
        run.model.layers[0].router.weight += 0.1
    return run.update()


def finish_for_other_tokens_than_the_loss(run: Run) -> RouterShift:
    return run.update(asked=KEYS.flip(0))


UNKNOWABLE: dict[Callable[[Run], RouterShift], str] = {
    keys_wrong_in_both_passes: "keys that are wrong in the same way in both passes",
    two_equal_tokens_with_one_key: "two tokens with the same key and input id",
    an_old_pass_by_other_weights: "an old pass with weights other than the rollout's",
    finish_for_other_tokens_than_the_loss: "a call to `finish` with keys of tokens outside the loss",
}


@pytest.mark.parametrize("way", UNKNOWABLE, ids=lambda way: way.__name__)
def test_what_no_tap_can_know_is_named_in_the_docs(way: Callable[[Run], RouterShift]) -> None:
    """If one of these is ever found out, its sentence has to go."""
    way(Run())
    assert UNKNOWABLE[way] in re.sub(r"\s+", " ", PAGE.read_text())


def test_there_are_twenty() -> None:
    assert (len(KNOWN), len(UNKNOWABLE)) == (16, 4)


@pytest.mark.parametrize("asked", [KEYS + 3, KEYS - 3])
def test_finish_says_which_key_no_token_has(asked: Tensor) -> None:
    with pytest.raises(InvalidInputError, match="finish got key"):
        Run().update(asked=asked)


def test_an_epoch_twice_in_one_pass_is_harmless() -> None:
    run = Run()
    with torch.no_grad(), run.tap.update_pass(run.old()) as update:
        run.forward(KEYS)
        run.forward(KEYS)
        assert update.finish(KEYS).ratio.tolist() == [[1.0] * 3] * 2


def test_the_result_says_how_many_entries_lie_below_the_stores_grid() -> None:
    """log p of an expert that the update has all but closed is below -16, the last value of the store's grid."""
    routers = nn.ModuleList([PlainTopKRouter() for _ in range(2)])
    tap, hidden, keys = RouterTap(routers, word=torch.int32), torch.ones(4, HIDDEN), torch.arange(4)
    with torch.no_grad(), tap.old_pass(4) as store:
        tap.rows = keys
        for router in routers:
            router(hidden)
    used = store.expert_ids(0)[0]
    shifts = []
    for logit in (-14.0, -40.0):
        with torch.no_grad():  # one of the two experts of one of the two routers, at every token
            routers[0].weight.zero_()
            routers[0].weight[used[0]] = logit / HIDDEN
        with torch.no_grad(), tap.update_pass(store) as update:
            tap.rows = keys
            for router in routers:
                router(hidden)
            shift = update.finish(keys, floor=0.0)
        metrics = as_floats(shift.metrics)
        shifts.append(metrics["router_corr/shift_abs_mean"])
        # log p is the logit - log(E - 1) up to e^-14: above the grid's end, and far below it.
        assert metrics["router_corr/log_prob_floor_frac"] == (0.25 if logit < -16 else 0.0)
    assert shifts[1] > shifts[0]
