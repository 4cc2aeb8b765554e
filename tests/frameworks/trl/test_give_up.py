"""Training with TRL that breaks off and begins anew: it saves, and goes on as TRL does that replays in another way.

Six combinations are drawn a day (`drawn.py`): which exception, where and in which micro-batch, in what kind of run. One
of them is part of `make test-integrations`, the others are slow.
"""

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import drawn
import pytest
import torch
from curves import FP32_LIMIT, relative_difference
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, TrainerCallback

pytestmark = [
    pytest.mark.framework,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_grpo.py"


class OfTheUserError(Exception):
    """What a user's loss raises."""


ERRORS: dict[str, type[BaseException]] = {
    "loss": OfTheUserError,
    "memory": torch.OutOfMemoryError,
    "Ctrl-C": KeyboardInterrupt,
}
UPDATES, MICRO_BATCHES = 4, 2
AXES: dict[str, Any] = {
    "error": tuple(ERRORS),
    "place": ("loss", "backward", "reward", "between micro-batches", "between updates"),
    "micro_batch": (0, 1),
    "iterations": (1, 2),
    "recomputed": (False, True),
}
DRAWN = drawn.combinations(AXES, 6, of="TRL")


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Breaks:
    """Raises once in a run's second update, or in the generation before the second one that generates."""

    def __init__(self, combination: Mapping[str, Any]) -> None:
        self._place, self._micro_batch = combination["place"], combination["micro_batch"]
        self._error = ERRORS[combination["error"]]
        self._calls = dict.fromkeys(AXES["place"], 0)

    def come_by(self, place: str) -> None:
        """Raise if this is where the run breaks off."""
        number = self._calls[place]
        self._calls[place] += 1
        at = MICRO_BATCHES + self._micro_batch if place in ("loss", "backward") else 1
        if place == self._place and number == at:
            raise self._error(place)


class BreaksBetween(TrainerCallback):
    """Comes by after micro-batches and after updates; notes gradient norms."""

    def __init__(self, breaks: Breaks, curve: dict[str, list[float]]) -> None:
        self._breaks, self._curve = breaks, curve

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._breaks.come_by("between micro-batches")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._breaks.come_by("between updates")

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        self._curve["grad_norm"].append(float(torch.stack(norms).norm()))


def replaying_in_the_loss(module: ModuleType) -> type:
    """TRL whose routers take, in training, the ids that lie beside the tokens: no pass, no count of micro-batches."""

    class Reference(module.WatchedLive):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
            for index, (_, _, router) in enumerate(module.find_routers(model)):
                ids = inputs[module.ROUTES].flatten(0, 1)[:, index].long()
                router.forward = functools.partial(taking, router, ids)
            return super().compute_loss(model, inputs, **named)

        def training_step(self, *given: Any, **named: Any) -> Any:
            try:
                return super().training_step(*given, **named)
            finally:  # after backward, in which layers may run again
                for _, _, router in module.find_routers(self.model):
                    vars(router).pop("forward", None)

    return Reference


def taking(router: Any, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Qwen3-MoE's router with given ids [T, K], -1 where it chooses."""
    logits = linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    scores = logits.softmax(dim=1, dtype=torch.float)
    ids = torch.where((ids >= 0).all(dim=1, keepdim=True), ids, scores.topk(router.top_k).indices)
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(dim=1, keepdim=True) if router.norm_topk_prob else weights
    return logits, weights.to(logits.dtype), ids


def trained(kind: type, module: ModuleType, combination: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Train, break off, save, and train anew."""
    breaks, curve = Breaks(combination), {"loss": [], "grad_norm": []}

    class Breaking(kind):  # type: ignore[misc, valid-type]
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            breaks.come_by("loss")
            loss.register_hook(lambda _: breaks.come_by("backward"))
            curve["loss"].append(float(loss))
            return loss

    def reward(completions: list[str], **how: Any) -> list[float]:
        breaks.come_by("reward")
        rewards: list[float] = module.reward(completions, **how)
        return rewards

    torch.manual_seed(11)
    trainer = Breaking(
        model=module.model(),
        processing_class=module.tokenizer(),
        reward_funcs=reward,
        train_dataset=module.Dataset.from_dict({"prompt": ["abc", "defg", "hi", "jklm"] * 4}),
        args=module.GRPOConfig(
            output_dir=str(folder), max_steps=UPDATES, num_iterations=combination["iterations"], num_generations=4,
            per_device_train_batch_size=4, gradient_accumulation_steps=MICRO_BATCHES, max_completion_length=8,
            activation_checkpointing=combination["recomputed"], learning_rate=1e-3, use_cpu=True, bf16=False,
            report_to=[], save_strategy="no", disable_tqdm=True,
        ),
        callbacks=[BreaksBetween(breaks, curve)],
    )  # fmt: skip
    raised = ""
    try:
        trainer.train()
    except ERRORS[combination["error"]] as error:
        raised = str(error)
    with torch.no_grad():  # a forward of the user's own, of any length
        trainer.model(input_ids=torch.ones(1, 3, dtype=torch.int64))
    trainer.save_model(str(folder / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    same = all(torch.equal(value, saved[name]) for name, value in trainer.model.state_dict().items())
    for values in curve.values():
        values[:] = []
    trainer.train()
    return {"raised": raised, "same": same, "curve": curve, "replayed": (trainer.same, trainer.total)}


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(one, id=f"drawn_{index}", marks=[pytest.mark.slow] if index else [])
        for index, one in enumerate(DRAWN)
    ],
)
def test_a_run_goes_on_as_trl_does(combination: Mapping[str, Any], tmp_path: Path) -> None:
    """TRL pads a rollout before it cuts it into micro-batches, so other micro-batches differ by rounding as well: the
    limit is the runtime's own."""
    module = example()
    plain = trained(replaying_in_the_loss(module), module, combination, tmp_path / "plain")
    ours = trained(module.Watched, module, combination, tmp_path / "ours")
    assert ours["raised"] == plain["raised"] == combination["place"]
    assert ours["same"], "what Transformers loads is what was trained"
    assert len(ours["curve"]["grad_norm"]) == UPDATES >= 3
    assert relative_difference(plain["curve"], ours["curve"]) <= FP32_LIMIT
    assert ours["replayed"][0] == ours["replayed"][1] > 0
