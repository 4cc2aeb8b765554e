"""Make a real routing trace on a laptop: train a tiny Qwen3-MoE, sample groups of answers, record their routes.

`python -m moe_rl.recipes.tiny_moe_trace --out DIR.moetrace` writes one step per successive policy. It is not an RL run:
between two steps the policy is fine-tuned on those of its own samples that it finds most likely, without any reward and
without a balancing loss, so that it drifts and sharpens the way a policy does.
"""

import argparse
import hashlib
import logging
import platform
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import Qwen3MoeForCausalLM

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.recipes.byte_pairs import EOS_ID, PAD_ID, BytePairTokenizer
from moe_rl.recipes.routing_statistics import expert_counts, total_variation
from moe_rl.recipes.stdlib_text import KINDS, read_documents
from moe_rl.recipes.tiny_moe import (
    WINDOW_TOKENS,
    TrainingRun,
    build_model,
    mean_logprobs,
    sample,
    train,
    windows,
)
from moe_rl.replay import TraceWriter
from moe_rl.replay.hf_recorder import record_routing

MODEL_NAME = "tiny-qwen3-moe"
PROMPT_TOKENS = (16, 48)
"""Shortest and longest prompt."""
HELD_OUT_DOCUMENTS = 24
"""Documents of each kind that are not trained on: prompts, and the text that drift is measured on."""

PRETRAINING = TrainingRun(num_updates=1200, router_aux_loss_coef=0.01)
FINE_TUNING = TrainingRun(num_updates=6, learning_rate=1e-4)

log = logging.getLogger("tiny_moe_trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything the trace depends on besides the versions of Python, torch and transformers."""

    seed: int = 0
    chars_per_kind: int = 400_000
    vocab_size: int = 1024
    pretraining: TrainingRun = PRETRAINING
    num_steps: int = 5
    prompts_per_kind: int = 3
    group_size: int = 8
    answer_tokens: int = WINDOW_TOKENS - PROMPT_TOKENS[1]
    """Longest answer."""
    kept_per_group: int = 2
    """Samples of each group that the policy is fine-tuned on before the next step."""
    fine_tuning: TrainingRun = FINE_TUNING


QUICK = Recipe(
    chars_per_kind=40_000,
    vocab_size=512,
    pretraining=TrainingRun(num_updates=3, batch_windows=2, router_aux_loss_coef=0.01),
    num_steps=2,
    prompts_per_kind=1,
    group_size=2,
    answer_tokens=24,
    kept_per_group=1,
    fine_tuning=TrainingRun(num_updates=1, batch_windows=2, learning_rate=1e-4),
)
"""The same path in seconds, on a model that has learned next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The text, tokenized: what is trained on, and what prompts come from."""

    tokenizer: BytePairTokenizer
    streams: Mapping[str, NDArray[np.int64]]
    """One row of tokens per kind, documents separated by the end token."""
    held_out: Mapping[str, Sequence[Sequence[int]]]
    text_sha256: str

    @classmethod
    def read(cls, recipe: Recipe) -> "Corpus":
        """Read every kind of text and learn the tokenizer on it."""
        documents = {kind: read_documents(kind, recipe.chars_per_kind, recipe.seed) for kind in KINDS}
        texts = [text for kind in KINDS for text in documents[kind]]
        tokenizer = BytePairTokenizer.learn(texts, recipe.vocab_size)
        encoded = {kind: [tokenizer.encode(text) for text in documents[kind]] for kind in KINDS}
        return cls(
            tokenizer=tokenizer,
            streams={
                kind: np.array([token for ids in encoded[kind][HELD_OUT_DOCUMENTS:] for token in [*ids, EOS_ID]])
                for kind in KINDS
            },
            held_out={kind: encoded[kind][:HELD_OUT_DOCUMENTS] for kind in KINDS},
            text_sha256=hashlib.sha256("\0".join(texts).encode("utf-8", errors="replace")).hexdigest(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Groups of answers to the prompts of one step, in the order they are recorded."""

    kinds: list[str]
    """Kind of each prompt group."""
    prompts: list[list[int]]
    """Prompt of each sample; those of a group lie together."""
    answers: list[list[int]]
    trace: RoutingTrace


def prompts_of_step(corpus: Corpus, recipe: Recipe, step: int) -> list[tuple[str, list[int]]]:
    """Return (kind, first tokens of a held-out document): documents differ between steps, kinds are shuffled."""
    rng = random.Random(f"{recipe.seed} prompts {step}")
    chosen = []
    for kind, documents in corpus.held_out.items():
        long_enough = [ids for ids in documents if len(ids) > PROMPT_TOKENS[1]]
        for number in range(step * recipe.prompts_per_kind, (step + 1) * recipe.prompts_per_kind):
            ids = long_enough[number % len(long_enough)]
            chosen.append((kind, list(ids[: rng.randint(*PROMPT_TOKENS)])))
    rng.shuffle(chosen)
    return chosen


def roll_out(model: Qwen3MoeForCausalLM, corpus: Corpus, recipe: Recipe, step: int) -> Rollout:
    """Sample `group_size` answers to every prompt of the step and record their routes."""
    chosen = prompts_of_step(corpus, recipe, step)
    prompts = [prompt for _, prompt in chosen for _ in range(recipe.group_size)]
    with record_routing(model) as recorder:
        answers = sample(model, prompts, max_new_tokens=recipe.answer_tokens, seed=recipe.seed + 1 + step)
    samples = np.arange(len(prompts)) + step * len(prompts)
    trace = recorder.trace(
        model=MODEL_NAME,
        provenance="R3",
        sample_id=samples,
        group_id=samples // recipe.group_size,
        step=np.full(len(prompts), step),
    )
    return Rollout(kinds=[kind for kind, _ in chosen], prompts=prompts, answers=answers, trace=trace)


def likeliest_samples(model: Qwen3MoeForCausalLM, rollout: Rollout, recipe: Recipe) -> list[list[int]]:
    """Return the prompt + answer of the `kept_per_group` samples of each group that the policy finds most likely."""
    scores = mean_logprobs(model, rollout.prompts, rollout.answers).reshape(-1, recipe.group_size)
    best = np.argsort(-scores, axis=1, kind="stable")[:, : recipe.kept_per_group]
    kept = (best + np.arange(len(scores))[:, None] * recipe.group_size).ravel()
    return [rollout.prompts[index] + rollout.answers[index] for index in kept.tolist()]


def batches_of(sequences: Sequence[Sequence[int]], batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of the sequences, padded on the right, in a new random order every pass."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(sequences))
        for start in range(0, len(order), batch_size):
            batch = torch.full((min(batch_size, len(order) - start), WINDOW_TOKENS), PAD_ID)
            for row, index in enumerate(order[start : start + batch_size]):
                batch[row, : len(sequences[index])] = torch.tensor(sequences[index])
            yield batch


def load_on_held_out(model: Qwen3MoeForCausalLM, corpus: Corpus) -> NDArray[np.int64]:
    """Return `[L, E]` expert load on text that stays the same from step to step."""
    with torch.no_grad(), record_routing(model) as recorder:
        for documents in corpus.held_out.values():
            for ids in islice(documents, 8):
                model(input_ids=torch.tensor([ids[:WINDOW_TOKENS]]))
    load: NDArray[np.int64] = expert_counts(recorder.trace()).sum(axis=0)
    return load


def run(recipe: Recipe, out: Path, *, overwrite: bool = False) -> None:
    """Write the trace of the recipe to `out`; refuses an existing one unless `overwrite`."""
    torch.set_num_threads(1)
    started = time.monotonic()
    corpus = Corpus.read(recipe)
    log.info("text: %s tokens", {kind: len(stream) for kind, stream in corpus.streams.items()})
    model = build_model(corpus.tokenizer.vocab_size, recipe.seed)
    config = model.config
    kinds = {step: [kind for kind, _ in prompts_of_step(corpus, recipe, step)] for step in range(recipe.num_steps)}
    writer = TraceWriter(
        out,
        num_experts=config.num_experts,
        moe_layer_ids=range(config.num_hidden_layers),
        top_k=config.num_experts_per_tok,
        model=MODEL_NAME,
        provenance="R3",
        origin={
            "recipe": "moe_rl.recipes.tiny_moe_trace",
            "seed": recipe.seed,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "text_sha256": corpus.text_sha256,
            "prompt_kinds": ",".join(kind for step in kinds for kind in kinds[step]),
        },
        overwrite=overwrite,
    )
    pretrain(model, corpus, recipe, started)
    with writer:
        load = load_on_held_out(model, corpus)
        for step in range(recipe.num_steps):
            rollout = roll_out(model, corpus, recipe, step)
            writer.append(rollout.trace)
            log.info("step %d: %d tokens, %.0f s", step, rollout.trace.num_tokens, time.monotonic() - started)
            if step + 1 == recipe.num_steps:
                return
            kept = likeliest_samples(model, rollout, recipe)
            batches = batches_of(kept, recipe.fine_tuning.batch_windows, recipe.seed + step)
            losses = list(train(model, batches, recipe.fine_tuning))
            before, load = load, load_on_held_out(model, corpus)
            drift = total_variation(before, load)
            log.info("fine-tuned: loss %.3f -> %.3f, load on fixed text moved by TV %.4f", losses[0], losses[-1], drift)


def pretrain(model: Qwen3MoeForCausalLM, corpus: Corpus, recipe: Recipe, started: float) -> None:
    """Train on all kinds of text alike."""
    shares = dict.fromkeys(corpus.streams, 1.0)
    batches = windows(corpus.streams, shares, recipe.pretraining.batch_windows, recipe.seed)
    for update, loss in enumerate(train(model, batches, recipe.pretraining)):
        if update % 50 == 0 or update + 1 == recipe.pretraining.num_updates:
            log.info("update %d: loss %.3f, %.0f s", update, loss, time.monotonic() - started)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the recipe from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="trace directory to write, by custom *.moetrace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the trace means nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing trace")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    recipe = replace(QUICK if options.quick else Recipe(), seed=options.seed)
    try:
        run(recipe, options.out, overwrite=options.overwrite)
    except InvalidInputError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
