"""MOE_RL_ROUTER_SHIFT with TRL's own trainer: gamma is that of a brute force over all logits."""

import importlib.util
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moe_rl.frameworks.trl.losses import policy_loss_trainer
from moe_rl.importance import RouterShift, UpdatePass

pytestmark = pytest.mark.framework
EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_grpo.py"


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")  # TRL asks Transformers so
def test_two_shuffled_updates_of_every_batch_read_the_gamma_of_a_brute_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With activations recomputed in backward; the second pass over a batch meets routers that have moved."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setenv("MOE_RL_ROUTER_SHIFT", "0.001")
    monkeypatch.setattr("moe_rl.frameworks.trl.losses.WORD", torch.int32)
    before: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    differences: list[float] = []
    least: list[float] = []
    finish = UpdatePass.finish
    base: Any = policy_loss_trainer("grpo")

    class Compared(base):  # type: ignore[misc]  # TRL has no types here
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            before.clear()
            for sequence in sequences(output):
                before[tuple(sequence.tolist())] = every_logit(self.model, sequence)
            return output

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            expected = []
            for row, sequence in zip(inputs["completion_mask"], sequences(inputs), strict=True):
                (old, used), (new, _) = before[tuple(sequence.tolist())], every_logit(self.model, sequence)
                delta = ((new - old).abs() * used).sum(dim=(0, 2)) / used.sum(dim=(0, 2))
                gamma = torch.ones(len(row), dtype=torch.float64)
                count = int(row.sum())
                gamma[:count] = torch.exp(-delta)[-1 - count : -1]
                expected.append(gamma)

            def noted(update: UpdatePass, keys: Tensor, **how: Any) -> RouterShift:
                shift = finish(update, keys, **how)
                gap = (shift.ratio - torch.stack(expected)).abs() * inputs["completion_mask"]
                differences.append(float(gap.max()))
                least.append(float(shift.ratio.min()))
                return shift

            with patch.object(UpdatePass, "finish", noted):
                loss: Tensor = super()._compute_loss(model, inputs)
            return loss

    trainer = Compared(
        model=example.model(),
        processing_class=example.tokenizer(),
        reward_funcs=example.reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["abc", "defg", "hi", "jklm"] * 4}),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=4,
            num_iterations=2,
            steps_per_generation=2,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=8,
            learning_rate=1e-2,
            activation_checkpointing=True,
            router_aux_loss_coef=0.0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    assert len(differences) == 4
    assert max(differences) <= 1e-6
    assert least[0] >= 1.0 - 1e-6, "the weights are those of the log-prob pass"
    assert max(least[1:]) < 0.999, "the routers have not moved"
    assert trainer.state.log_history[-2]["router_corr/gamma_mean"] < 1.0


def sequences(batch: Any) -> list[Tensor]:
    """The tokens of every prompt and completion, without padding."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()
    return [row[kept] for row, kept in zip(ids, mask, strict=True)]


def every_logit(model: Any, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """[L, S, E]: float64 log-probabilities of all experts, and 1 for those that were used."""
    found: list[tuple[Tensor, Tensor]] = []

    def keep(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logs = output[0].detach().double().log_softmax(dim=1)
        found.append((logs, torch.zeros_like(logs).scatter_(1, output[2], 1.0)))

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    handles = [router.register_forward_hook(keep) for router in routers]
    with torch.no_grad():
        model(sequence[None])
    for handle in handles:
        handle.remove()
    logs, used = zip(*found, strict=True)
    return torch.stack(logs), torch.stack(used)
