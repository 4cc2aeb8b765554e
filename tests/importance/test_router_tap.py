"""What the tap refuses: forwards that nobody announced, models whose routers it cannot see."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import RouterStore, RouterTap

TOKENS, HIDDEN, EXPERTS, TOP_K = 6, 16, 8, 2


class PlainTopKRouter(nn.Module):
    """(logits, weights, ids), as the routers of Transformers return them."""

    hidden_dim = HIDDEN

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        weights, ids = logits.softmax(dim=-1).topk(TOP_K)
        return logits, weights, ids


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.mlp = PlainTopKRouter(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.router(hidden)[1]
        return hidden + self.mlp(hidden) * weights.sum(dim=-1, keepdim=True)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


@pytest.fixture
def compiled_layers(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Sequential]:
    """The model, whose layers torch compiles when they first run."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # tests/conftest.py switches compilation off
    torch.compiler.reset()
    for layer in model:
        layer.compile(backend="eager")
    yield model
    torch.compiler.reset()


HIDDEN_STATES = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def old_store(model: nn.Module, tap: RouterTap) -> RouterStore:
    with torch.no_grad(), tap.old_pass(TOKENS) as store:
        tap.rows = torch.arange(TOKENS)
        model(HIDDEN_STATES)
    return store


def test_a_second_micro_batch_without_rows_of_its_own_is_refused(model: nn.Sequential) -> None:
    tap = RouterTap(model)
    with tap.update_pass(old_store(model, tap)):
        tap.rows = torch.arange(3)
        model(HIDDEN_STATES[:3])
        assert tap.rows is None
        with pytest.raises(InvalidInputError, match=r"Set tap.rows before every forward pass"):
            model(HIDDEN_STATES[3:])


def test_a_reference_forward_inside_the_update_is_refused(model: nn.Sequential) -> None:
    tap = RouterTap(model)
    with tap.update_pass(old_store(model, tap)):
        tap.rows = torch.arange(TOKENS)
        model(HIDDEN_STATES)
        with torch.no_grad(), pytest.raises(InvalidInputError, match=r"such as those of a reference model, outside"):
            model(HIDDEN_STATES)


def test_a_backbone_that_runs_twice_on_the_same_rows_is_refused(model: nn.Sequential) -> None:
    """Its caller goes around the model that was given, so the end of a forward is not seen."""
    tap = RouterTap(nn.ModuleDict({"backbone": model}))
    with tap.update_pass(old_store(model, tap)):
        tap.rows = torch.arange(TOKENS)
        model(HIDDEN_STATES)
        with pytest.raises(InvalidInputError, match=r"router backbone.0.router ran twice with the same tap.rows"):
            model(HIDDEN_STATES)


def test_checkpointed_layers_may_run_again_in_the_backward_pass(model: nn.Sequential) -> None:
    tap = RouterTap(model)
    store = old_store(model, tap)
    hidden = HIDDEN_STATES.clone().requires_grad_()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, hidden: Tensor) -> Tensor:
            for layer in self.layers:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            return hidden

    whole = Checkpointed()
    tap = RouterTap(whole)
    with tap.update_pass(store) as update:
        for _ in range(2):
            tap.rows = torch.arange(TOKENS)
            whole(hidden).sum().backward()
    assert update.sums[1, 1:].tolist() == [2.0 * 2 * TOP_K] * TOKENS


@pytest.mark.lengthy
def test_a_model_whose_layers_were_compiled_before_the_tap_is_refused_at_its_first_forward(
    compiled_layers: nn.Sequential,
) -> None:
    with torch.no_grad():
        compiled_layers(HIDDEN_STATES)  # compiled here, without the tap's hooks
    with pytest.raises(InvalidInputError, match=r"the tap saw none of its routers. A model that was compiled before"):
        old_store(compiled_layers, RouterTap(compiled_layers))


@pytest.mark.lengthy
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own tracing behind a graph break
def test_a_model_that_is_compiled_inside_the_old_pass_is_read(compiled_layers: nn.Sequential) -> None:
    tap = RouterTap(compiled_layers)
    store = old_store(compiled_layers, tap)
    logits = HIDDEN_STATES @ compiled_layers[0].router.weight.detach().T
    assert torch.equal(store.expert_ids(0), logits.topk(TOP_K).indices)
    with tap.update_pass(store) as update:
        tap.rows = torch.arange(TOKENS)
        compiled_layers(HIDDEN_STATES)
    assert update.finish(torch.arange(TOKENS)).ratio.tolist() == [1.0] * TOKENS
    assert update.sums[1, 1:].tolist() == [2.0 * TOP_K] * TOKENS


def test_rows_that_no_router_reads_are_refused_at_the_end_of_the_pass(model: nn.Sequential) -> None:
    """Where not even the end of a forward is seen, as of a copy of the model."""
    copy = nn.Sequential(Layer(), Layer())
    with pytest.raises(InvalidInputError, match=r"tap.rows was set in this pass, but no router ran"):
        old_store(copy, RouterTap(model))


def test_a_pass_without_micro_batches_is_fine(model: nn.Sequential) -> None:
    tap = RouterTap(model)
    with tap.old_pass(0) as store:
        pass
    with tap.update_pass(store):
        pass
    assert store.num_bytes == 0


class Embedded(nn.Module):
    """A model that is called with input ids [B, S], as those of Transformers are."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(20, HIDDEN), layers

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layers(self.embedding(input_ids.reshape(-1)))


INPUT_IDS = torch.tensor([[4, 8, 15], [16, 2, 11]])
KEYS = torch.arange(TOKENS).view(2, 3)


def read_once(tap: RouterTap, model: nn.Module, keys: Tensor, input_ids: Tensor = INPUT_IDS) -> RouterStore:
    with torch.no_grad(), tap.old_pass(TOKENS) as store:
        tap.rows = keys
        model(input_ids)
    return store


def test_a_key_above_the_tokens_of_the_pass_is_one_sentence(model: nn.Sequential) -> None:
    tap = RouterTap(model)

    def short_pass() -> None:
        with torch.no_grad(), tap.old_pass(TOKENS - 1):
            tap.rows = torch.arange(TOKENS)
            model(HIDDEN_STATES)

    with pytest.raises(
        InvalidInputError, match=rf"contains key {TOKENS - 1}, but old_pass was opened for {TOKENS - 1}"
    ):
        short_pass()


def test_keys_in_another_order_than_the_batch_are_refused(model: nn.Sequential) -> None:
    whole = Embedded(model)
    tap = RouterTap(whole)
    with tap.update_pass(read_once(tap, whole, KEYS)) as update:
        tap.rows = KEYS.flip(0)
        whole(INPUT_IDS.flip(0))
        assert update.finish(KEYS).ratio.tolist() == [[1.0] * 3] * 2
        tap.rows = KEYS
        with pytest.raises(InvalidInputError, match=r"has key 0 at a token with input id 16, but earlier this key"):
            whole(INPUT_IDS.flip(0))


def test_a_store_of_the_last_step_is_refused(model: nn.Sequential) -> None:
    whole = Embedded(model)
    tap = RouterTap(whole)
    store = read_once(tap, whole, KEYS)
    with (
        tap.update_pass(store),
        pytest.raises(InvalidInputError, match="the keys belong to other tokens or to another step"),
    ):
        _run(tap, whole, KEYS, INPUT_IDS + 1)


def _run(tap: RouterTap, model: nn.Module, keys: Tensor, input_ids: Tensor) -> None:
    tap.rows = keys
    model(input_ids)


def test_a_key_that_two_tokens_have_is_refused_and_padding_may_hold_anything(model: nn.Sequential) -> None:
    whole = Embedded(model)
    tap = RouterTap(whole)
    doubled = KEYS.clone()
    doubled[1, 1] = 0
    with pytest.raises(InvalidInputError, match="has key 0 at a token"):
        read_once(tap, whole, doubled)
    padded = KEYS.clone()
    padded[:, 2] = -1
    with tap.update_pass(read_once(tap, whole, padded)):
        other = INPUT_IDS.clone()
        other[:, 2] = 0
        _run(tap, whole, padded, other)


def test_a_call_without_input_ids_is_not_compared(model: nn.Sequential) -> None:
    tap = RouterTap(model)
    with tap.update_pass(old_store(model, tap)) as update:
        _run(tap, model, torch.arange(TOKENS), HIDDEN_STATES)
    assert update.store.mistaken is None


class TrainedCopies(nn.Module):
    """PEFT's wrapper of `modules_to_save`: the module beside its copy, of which one runs."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.original_module = router
        self.modules_to_save = nn.ModuleDict({"default": PlainTopKRouter()})
        self.modules_to_save["default"].load_state_dict(router.state_dict())

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self.modules_to_save["default"](hidden)
        return found


def test_a_router_and_its_trained_copy_are_one_router(model: nn.Sequential) -> None:
    for layer in model:
        layer.router = TrainedCopies(layer.router)
    tap = RouterTap(model, agreement=True)
    assert len(tap) == 2
    store = old_store(model, tap)
    with tap.update_pass(store) as update:
        _run(tap, model, torch.arange(TOKENS), HIDDEN_STATES)
        shift = update.finish(torch.arange(TOKENS))
    assert shift.ratio.tolist() == [1.0] * TOKENS
    for agreement in (store.agreement, update.agreement):
        torch.testing.assert_close(agreement, torch.ones(TOKENS))


def test_a_router_that_runs_unseen_beside_others_is_said(model: nn.Sequential) -> None:
    """What a layer that was compiled before the pass does: it runs without its hooks."""
    tap = RouterTap(model)
    store = old_store(model, tap)
    model[1].router._compiled_call_impl = model[1].router.forward
    with pytest.warns(
        UserWarning, match=r"did not see these routers in a forward pass: 1.router. gamma covers only the other routers"
    ):
        old_store(model, tap)
    with tap.update_pass(store), pytest.raises(InvalidInputError, match=r"see them run in this forward pass: 1.router"):
        _run(tap, model, torch.arange(TOKENS), HIDDEN_STATES)
