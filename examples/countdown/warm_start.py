"""A short supervised start, so that the first rollouts already solve a few problems and reward can move.

The model learns to write answers to training problems from demonstrations of mixed quality: some solve the problem,
the others are any expression of its numbers, or always their sum. It comes out knowing more than it shows, as models
trained on text of all kinds do, and reward moves within minutes because RL weeds out what is wrong before it finds
anything new. Random wrong answers hide what it knows from samples alone: no single one of them is likely. A habit of
more than half of the demonstrations hides it from greedy answers too.

The result depends on the arguments and the versions of torch and transformers alone, and is kept on disk under a key
made of both and of the code that made it.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.countdown import problems
from examples.countdown.problems import (
    EOS_ID,
    CountdownSpec,
    Problem,
    draw_problems,
    encode,
    random_answer,
    sum_of,
)
from moe_rl.core.errors import require

_IGNORED = -100
_RATE_WARMUP_UPDATES = 30
_UPDATES_PER_LINE = 100

WrongAnswers = Literal["random", "sum"]
Announce = Callable[[str], None]

log = logging.getLogger("countdown_grpo.warm_start")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Next-token training with AdamW, linear warm-up, cosine decay to a tenth of the rate."""

    num_updates: int = 800
    batch_problems: int = 64
    learning_rate: float = 3e-3
    router_aux_loss_coef: float = 0.01
    """Weight of the load-balancing loss that Qwen3-MoE ships; the RL run itself has none."""
    wrong_demonstrations: float = 0.6
    """Share of demonstrations that do not solve the problem, or only by chance."""
    wrong_answers: WrongAnswers = "random"
    """What those are: a random expression of the problem's numbers, or a habit, the sum of all of them."""

    def __post_init__(self) -> None:
        require(self.num_updates >= 0, f"num_updates must not be negative, got {self.num_updates}.")
        require(self.batch_problems >= 1, f"batch_problems must be at least 1, got {self.batch_problems}.")
        require(self.learning_rate > 0, f"learning_rate must be above 0, got {self.learning_rate}.")
        require(
            self.router_aux_loss_coef >= 0, f"router_aux_loss_coef must not be negative: {self.router_aux_loss_coef}."
        )
        require(
            0 <= self.wrong_demonstrations <= 1,
            f"wrong_demonstrations must be between 0 and 1, got {self.wrong_demonstrations}.",
        )

    def rate(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0."""
        ramp = min(1.0, (update + 1) / _RATE_WARMUP_UPDATES)
        return self.learning_rate * ramp * (0.55 + 0.45 * math.cos(math.pi * update / self.num_updates))


def warm_start(
    model_config: Qwen3MoeConfig,
    spec: CountdownSpec,
    settings: WarmStart,
    seed: int,
    cache: Path | None,
    announce: Announce = log.info,
) -> dict[str, Tensor]:
    """Return fp32 weights, Hugging Face names, of the started model, read from or kept in the folder `cache`.

    `announce` is called with a line when training starts, and along it.
    """
    if cache is None:
        return train(model_config, spec, settings, seed, announce)
    path = cache / f"countdown-warm-start-{_key(model_config, spec, settings, seed)}.safetensors"
    if not path.exists():
        announce(f"supervised start: {settings.num_updates} updates on demonstrations, then kept in {path}")
        _write(train(model_config, spec, settings, seed, announce), path)
    return load_file(path)


def train(
    model_config: Qwen3MoeConfig, spec: CountdownSpec, settings: WarmStart, seed: int, announce: Announce = log.info
) -> dict[str, Tensor]:
    """Train a new model on one thread, whose summation order is fixed, without touching the global random state."""
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(model_config).float().train()
        model.router_aux_loss_coef = settings.router_aux_loss_coef
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        for update in range(settings.num_updates):
            first = update * settings.batch_problems
            batch = draw_problems(spec, "train", seed, range(first, first + settings.batch_problems))
            tokens, labels = _demonstrations(batch, spec, settings, seed)
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(update)
            # Padding stands on the right and is no label: causal attention keeps it from the rest.
            output = model(tokens, labels=labels, output_router_logits=settings.router_aux_loss_coef > 0)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (update + 1) % _UPDATES_PER_LINE == 0:
                loss = output.loss.item()
                announce(f"supervised start: update {update + 1} of {settings.num_updates}, loss {loss:.3f}")
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def default_cache() -> Path:
    """Return the user's cache folder for weights: `$XDG_CACHE_HOME/moe_rl`, or `~/.cache/moe_rl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_rl"


def _demonstrations(batch: list[Problem], spec: CountdownSpec, settings: WarmStart, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels `[problems, longest]`: prompt, answer, end; only the last two are labels."""
    rows = []
    for problem in batch:
        rng = random.Random(f"{seed} demonstration {problem.problem_id}")
        answer = problem.solution
        if rng.random() < settings.wrong_demonstrations:
            answer = random_answer(problem, spec, rng) if settings.wrong_answers == "random" else sum_of(problem, spec)
        rows.append([*encode(problem.prompt), *encode(answer), EOS_ID])
    tokens = torch.full((len(rows), max(map(len, rows))), EOS_ID)
    labels = torch.full_like(tokens, _IGNORED)
    for index, (row, problem) in enumerate(zip(rows, batch, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        answered = slice(len(problem.prompt), len(row))
        labels[index, answered] = tokens[index, answered]
    return tokens, labels


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _key(model_config: Qwen3MoeConfig, spec: CountdownSpec, settings: WarmStart, seed: int) -> str:
    """Return a name that changes with whatever the weights depend on."""
    parts = {
        "model": model_config.to_diff_dict(),
        "spec": dataclasses.asdict(spec),
        "settings": dataclasses.asdict(settings),
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "code": [Path(file).read_text("utf-8") for file in (problems.__file__, __file__)],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _write(weights: dict[str, Tensor], path: Path) -> None:
    """Write the file under another name and rename it: ranks that write at once leave one whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as part:
        temporary = Path(part.name)
    try:
        save_file(weights, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
