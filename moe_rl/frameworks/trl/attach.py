"""TRL's GRPO with routing replay, which TRL has not: what a completion was generated with is what it is trained on.

from moe_rl.frameworks.trl.attach import ReplayGRPOTrainer

trainer = ReplayGRPOTrainer(model=model, reward_funcs=..., args=GRPOConfig(...), train_dataset=...)
trainer.train()

Routes are recorded while the model generates (Transformers' `generate`, no vLLM) and replayed in every update of these
completions, however often the weights have changed by then. A model that is spread over ranks by expert parallelism is
balanced too: give `balancer=transformers_ep.attach(model, config)`.
"""

from typing import Any

import numpy as np
import torch

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.frameworks.transformers.attach import RoutingReplay
from moe_rl.frameworks.trl.contract import FRAMEWORK
from moe_rl.replay.hf_recorder import RoutedSequence, record_routing

try:
    from trl import GRPOTrainer
except ImportError as error:
    raise InvalidInputError(f"trl cannot be imported: {error}.") from error

# Beside `prompt_ids` and `completion_ids` in TRL's batches: [B, prompt + completion, L, K] int16, -1 unknown.
ROUTES = "routed_experts"


class ReplayGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` whose updates replay the routing of generation."""

    def __init__(self, *args: Any, balancer: Any = None, **kwargs: Any) -> None:
        FRAMEWORK.check()
        super().__init__(*args, **kwargs)
        require(
            not self.use_vllm,
            "routing can be recorded only in the generate method of Transformers: set use_vllm=False.",
        )
        self._generated: list[RoutedSequence] = []
        self.routing = balancer or RoutingReplay(self.accelerator.unwrap_model(self.model))
        """What `begin_pass` and `end_pass` are called on: an `EpBalancer`, or replay alone."""
        self._pass_ends = 0
        """TRL's `_step` after the last micro-batch of the pass; a pass is under way while `_step` is below."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; whatever raises, in a loss or in a callback, routers choose by themselves afterwards."""
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            self._give_up()
            raise

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._give_up()  # after out of memory `auto_find_batch_size` begins anew, inside of `train`
        return super()._inner_training_loop(*args, **kwargs)

    def _give_up(self) -> None:
        self.routing.give_up()
        self._pass_ends = 0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with record_routing(self.accelerator.unwrap_model(self.model), eos_token_id=self.eos_token_ids) as recorder:
            generated = super()._generate_single_turn(*args, **kwargs)
        self._generated = recorder.sequences()
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        prompt_mask, completion_ids = output["prompt_mask"], output["completion_ids"]
        require(
            len(self._generated) == len(prompt_mask),
            f"{len(self._generated)} sequences were generated, but the batch has {len(prompt_mask)}.",
        )
        length = prompt_mask.shape[1] + completion_ids.shape[1]
        shape = self._generated[0].routed_experts.shape[1:]
        routes = np.full((len(prompt_mask), length, *shape), -1, np.int16)
        for index, sequence in enumerate(self._generated):
            # Prompts are padded on the left, completions on the right; the last token was never fed.
            prompt = prompt_mask[index].nonzero()[:, 0].cpu().numpy()
            generated = prompt_mask.shape[1] + np.arange(len(sequence.routed_experts) - len(prompt))
            routes[index, np.concatenate([prompt, generated])] = sequence.routed_experts
        output[ROUTES] = torch.from_numpy(routes)
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        # TRL prepares one micro-batch at a time; those of the optimizer step lie in its buffer already. A run that has
        # broken off between two of them begins with the second one: its `_step` counts on.
        if self.model.training and self._step >= self._pass_ends:
            count = self.current_gradient_accumulation_steps
            self._pass_ends = self._step - self._step % count + count
            routes = []
            for step in range(self._step, self._pass_ends):
                index = step % self.args.steps_per_generation
                routes.append(self._buffered_inputs[index][ROUTES])
            self.routing.begin_pass(PassSource.replayed(routes))
        return inputs

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch as TRL does; the pass ends with the last one of an optimizer step."""
        loss = super().training_step(*args, **kwargs)
        if self._step == self._pass_ends:
            metrics = self.routing.end_pass()
            for name, value in (metrics.as_dict() if metrics is not None else {}).items():
                self._log_metric(name, value)
        return loss
