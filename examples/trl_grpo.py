"""GRPO with TRL on a tiny Qwen3-MoE, on a CPU, with and without routing replay: do updates take the routes of rollouts?

    python examples/trl_grpo.py

Every batch of completions is trained on twice with a large learning rate, so that the second update meets routers that
have changed. Needs the packages of `pip install '.[trl]'`.
"""

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from moe_rl.frameworks.trl.attach import ROUTES, ReplayGRPOTrainer
from moe_rl.replay.hf_recorder import find_routers

LETTERS = "abcdefghijklmnop"


def tokenizer() -> PreTrainedTokenizerFast:
    """A token per letter."""
    words = {word: index for index, word in enumerate(["<pad>", "<end>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<end>", padding_side="left")


def model() -> Qwen3MoeForCausalLM:
    """Three MoE layers of 8 experts, top-2."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2 + len(LETTERS),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    return Qwen3MoeForCausalLM(config)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Of the letter a, as much as possible."""
    return [text.count("a") / (1 + len(text)) for text in completions]


class Compared:
    """Counts, in the trainer that it is mixed into, how many known routes of generation the updates take."""

    same = total = 0

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        """Watch the routers of one micro-batch."""
        if ROUTES not in inputs:
            return super().compute_loss(model, inputs, **kwargs)  # type: ignore[misc]  # mixed into a trainer
        handles = []
        for index, (_, _, router) in enumerate(find_routers(model)):
            expected = inputs[ROUTES].flatten(0, 1)[:, index]

            def compare(_: Any, __: Any, output: Any, expected: torch.Tensor = expected) -> None:
                known = (expected >= 0).all(dim=1)
                equal = (output[2].sort(dim=1).values == expected.sort(dim=1).values).all(dim=1)
                self.same += int((equal & known).sum())
                self.total += int(known.sum())

            handles.append(router.register_forward_hook(compare))
        loss = super().compute_loss(model, inputs, **kwargs)  # type: ignore[misc]  # mixed into a trainer
        for handle in handles:
            handle.remove()
        return loss


class Watched(Compared, ReplayGRPOTrainer):
    """With replay."""


class WatchedLive(Compared, ReplayGRPOTrainer):
    """The same batches, whose routes nobody replays."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return GRPOTrainer._prepare_inputs(self, generation_batch)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL."""
        return GRPOTrainer.training_step(self, *args, **kwargs)


def main() -> None:
    """Train twice and print the shares."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=4)
    steps = arguments.parse_args().steps
    for name, kind in (("live", WatchedLive), ("replay", Watched)):
        trainer = kind(
            model=model(),
            processing_class=tokenizer(),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": ["abc", "defg", "hi", "jklm"] * 4}),
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(),
                max_steps=steps,
                num_iterations=2,
                num_generations=4,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                max_completion_length=8,
                learning_rate=3e-2,
                use_cpu=True,
                bf16=False,
                report_to=[],
                logging_steps=steps,
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
        print(f"{name}: {trainer.same} of {trainer.total} routes of the updates are those of generation")


if __name__ == "__main__":
    main()
