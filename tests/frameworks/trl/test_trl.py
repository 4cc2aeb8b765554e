"""TRL's GRPOTrainer takes the routes of generation in every update."""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

pytestmark = pytest.mark.framework
EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_grpo.py"


def test_the_example_replays_every_route() -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    shares = {
        name: (int(same), int(total))
        for name, same, total in re.findall(r"^(\w+): (\d+) of (\d+) routes", ran.stdout, flags=re.MULTILINE)
    }
    same, total = shares["replay"]
    assert same == total > 0
    same, total = shares["live"]
    assert 0 < same < total, "updates change the routers: without replay some routes differ"


@pytest.mark.slow  # one break, drawn every day, is part of the integrations: test_give_up.py
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_after_an_exception_routers_choose_by_themselves_and_training_may_go_on() -> None:
    """Once in a loss, and once in a callback between two micro-batches of an optimizer step."""
    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    class Raising(example.Watched):
        calls = 0

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            type(self).calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().compute_loss(*given, **named)

    class Interrupting(TrainerCallback):
        substeps = 0

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            type(self).substeps += 1
            if self.substeps == 2:
                raise KeyboardInterrupt

    trainer = Raising(
        model=example.model(),
        processing_class=example.tokenizer(),
        reward_funcs=example.reward,
        train_dataset=example.Dataset.from_dict({"prompt": ["abc", "defg", "hi", "jklm"] * 4}),
        args=example.GRPOConfig(
            output_dir=tempfile.mkdtemp(), max_steps=4, num_iterations=2, num_generations=4,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, max_completion_length=8, use_cpu=True,
            bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        ),
        callbacks=[Interrupting()],
    )  # fmt: skip
    broken = 0
    while trainer.state.global_step < 4 and broken < 4:
        try:
            trainer.train()
        except KeyboardInterrupt:
            broken += 1
            with torch.no_grad():  # a forward of the user's own, of any length
                trainer.model(input_ids=torch.ones(1, 3, dtype=torch.int64))
            trainer.save_model()
    assert broken == 2
    assert trainer.same == trainer.total > 0
