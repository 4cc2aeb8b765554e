"""When TRL's trainer reads the routers: its own passes in their order, on a stand-in of `GRPOTrainer`.

The stand-in asks for log-probabilities as TRL does; the tap notes what it is told. `test_router_shift.py` runs TRL.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_rl.frameworks.trl import losses
from moe_rl.frameworks.trl.losses import KEYS, policy_loss_trainer

PADDING_LEFT = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])


class GRPOTrainer:
    """What of TRL's trainer calls what is overridden."""

    importance_sampling_level, epsilon_low, epsilon_high = "token", 0.2, 0.2

    def __init__(self, model: Any, *, makes_pass: bool = True) -> None:
        self.model, self.args = model, SimpleNamespace(delta=None)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: ("unwrapped", model))
        self._metrics: Any = {"train": defaultdict(list)}
        self.makes_pass, self.passes = makes_pass, 0

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.makes_pass:
            with torch.no_grad():
                self._get_per_token_logps_and_entropies(self.model, inputs, PADDING_LEFT, 2, batch_size=1)
                self._get_per_token_logps_and_entropies("reference", inputs, PADDING_LEFT, 2)
        return {"prompt_ids": inputs}

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        assert attention_mask is PADDING_LEFT
        assert args in ((2,), ())
        self.passes += 1
        return "log-probabilities", input_ids


class Tap:
    """A tap that notes when it was open."""

    made: list["Tap"]

    def __init__(self, model: Any, *, word: Any) -> None:
        self.model, self.calls = model, list[Any]()
        Tap.made.append(self)

    @contextmanager
    def old_pass(self, num_tokens: int) -> Iterator[str]:
        self.calls.append(("old", num_tokens))
        yield f"store {len(self.calls)}"

    @contextmanager
    def told(self, batches: Any) -> Iterator[None]:
        self.calls.append(("told", [batch.tolist() for batch in batches]))
        yield

    @contextmanager
    def update_pass(self, store: Any) -> Iterator[Any]:
        self.calls.append(("update of", store))
        yield SimpleNamespace(finish=self.finish)

    def finish(self, keys: Any, *, floor: float) -> Any:
        self.calls.append(("finish", keys.tolist(), floor))
        return SimpleNamespace(metrics={"gamma": torch.tensor(0.75)}, ratio="gamma of each token")


@pytest.fixture
def losses_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the losses were computed with; TRL is the stand-in."""
    module: Any = ModuleType("trl")
    module.GRPOTrainer = GRPOTrainer
    monkeypatch.setitem(sys.modules, "trl", module)
    monkeypatch.setattr(losses, "RouterTap", Tap)
    Tap.made, computed = [], list[Any]()

    def loss(trainer: Any, model: Any, inputs: Any, rule: Any, gamma: Any, router_shift: Any) -> str:
        computed.append(gamma and gamma(torch.zeros(2, 2)))
        return "the loss"

    monkeypatch.setattr(losses, "_loss", loss)
    monkeypatch.setenv("MOE_RL", "moe-rl")
    return computed


def trainer_of(floor: str | None, monkeypatch: pytest.MonkeyPatch, **words: Any) -> tuple[Any, Any]:
    if floor is None:
        monkeypatch.delenv("MOE_RL_ROUTER_SHIFT", raising=False)
    else:
        monkeypatch.setenv("MOE_RL_ROUTER_SHIFT", floor)
    model = SimpleNamespace(training=True)
    return policy_loss_trainer("grpo")(model, **words), model


def test_gamma_is_of_the_first_pass_without_gradient_of_each_generation(
    losses_of: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, model = trainer_of("0.8", monkeypatch)
    (tap,) = Tap.made
    assert tap.model == ("unwrapped", model)
    output = trainer._generate_and_score_completions("prompts")
    keys = [[-1, 0, 1, 2], [3, 4, 5, -1]]
    assert output["prompt_ids"] == "prompts"
    assert output[KEYS].tolist() == keys
    assert tap.calls == [("old", 6), ("told", [[keys[0]], [keys[1]]])], "the reference's pass is not read"
    assert trainer.passes == 2
    tap.calls.clear()
    inputs = output | {"completion_ids": torch.zeros(2, 2)}
    trainer._get_per_token_logps_and_entropies(model, "ids", PADDING_LEFT)
    assert tap.calls == [], "with gradient"
    model.training = False
    assert KEYS not in trainer._generate_and_score_completions("an evaluation between two updates")
    assert tap.calls == []
    model.training = True
    for _ in range(2):
        tap.calls.clear()
        assert trainer._compute_loss(model, inputs) == "the loss"
        predicting = [[0, 1], [4, 5]]
        assert tap.calls == [("update of", "store 1"), ("told", [keys]), ("finish", predicting, 0.8)]
    assert losses_of == ["gamma of each token"] * 2
    assert trainer._metrics["train"] == {"gamma": [0.75, 0.75]}
    tap.calls.clear()
    trainer._generate_and_score_completions("the next prompts")
    assert tap.calls[0] == ("old", 6), "read anew"
    trainer.makes_pass = False
    output = trainer._generate_and_score_completions("prompts whose weights are the old ones")
    assert KEYS not in output
    assert trainer._compute_loss(model, output) == "the loss"
    assert losses_of[-1] is None


def test_without_the_setting_nothing_is_read(losses_of: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, model = trainer_of(None, monkeypatch)
    output = trainer._generate_and_score_completions("prompts")
    assert output == {"prompt_ids": "prompts"}
    assert trainer._compute_loss(model, output | {KEYS: "of another trainer"}) == "the loss"
    assert (Tap.made, losses_of) == ([], [None])
