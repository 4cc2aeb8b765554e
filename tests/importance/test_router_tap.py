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
        with pytest.raises(InvalidInputError, match=r"set it before every forward of the pass"):
            model(HIDDEN_STATES[3:])


def test_a_reference_forward_inside_the_update_is_refused(model: nn.Sequential) -> None:
    tap = RouterTap(model)
    with tap.update_pass(old_store(model, tap)):
        tap.rows = torch.arange(TOKENS)
        model(HIDDEN_STATES)
        with torch.no_grad(), pytest.raises(InvalidInputError, match=r"such as a reference model's, outside of it"):
            model(HIDDEN_STATES)


def test_a_backbone_that_runs_twice_on_the_same_rows_is_refused(model: nn.Sequential) -> None:
    """Its caller goes around the model that was given, so the end of a forward is not seen."""
    tap = RouterTap(nn.ModuleDict({"backbone": model}))
    with tap.update_pass(old_store(model, tap)):
        tap.rows = torch.arange(TOKENS)
        model(HIDDEN_STATES)
        with pytest.raises(InvalidInputError, match=r"router 0 ran twice on the same tap.rows"):
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
    with pytest.raises(InvalidInputError, match=r"none of its routers was seen. A model that was compiled before"):
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
    with pytest.raises(InvalidInputError, match=r"tap.rows was set in this pass, and no router ran"):
        old_store(copy, RouterTap(model))


def test_a_pass_without_micro_batches_is_fine(model: nn.Sequential) -> None:
    tap = RouterTap(model)
    with tap.old_pass(0) as store:
        pass
    with tap.update_pass(store):
        pass
    assert store.num_bytes == 0
