"""A Qwen3-MoE small enough to train on a CPU in minutes, and sampling from it.

S sequences, E experts per layer.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.core.errors import require
from moe_rl.recipes.byte_pairs import EOS_ID, PAD_ID

WINDOW_TOKENS = 256
"""Tokens of a training window; a longer sequence would run past what the model has learned positions for."""


def build_model(vocab_size: int, seed: int) -> Qwen3MoeForCausalLM:
    """Return a randomly started model: 6 layers, all MoE, 64 experts, top-4, 10 million parameters.

    The router is Qwen3-MoE's own (softmax, weights of the routed experts normalized).
    """
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2 * WINDOW_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )
    return Qwen3MoeForCausalLM(config).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Next-token training with AdamW, linear warm-up and cosine decay to a tenth."""

    num_updates: int
    batch_windows: int = 12
    learning_rate: float = 2e-3
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss that Qwen3-MoE ships."""

    def rate(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0."""
        warmup = max(1, self.num_updates // 20)
        if update < warmup:
            return self.learning_rate * (update + 1) / warmup
        done = (update - warmup) / max(1, self.num_updates - warmup)
        return self.learning_rate * (0.55 + 0.45 * float(np.cos(np.pi * done)))


def train(model: Qwen3MoeForCausalLM, batches: Iterator[torch.Tensor], run: TrainingRun) -> Iterator[float]:
    """Update the model on `num_updates` batches `[B, tokens]` and yield the loss of each; pads are not learned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    model.router_aux_loss_coef = run.router_aux_loss_coef
    model.train()
    for update, tokens in enumerate(itertools.islice(batches, run.num_updates)):
        for group in optimizer.param_groups:
            group["lr"] = run.rate(update)
        mask = tokens != PAD_ID
        output = model(
            input_ids=tokens,
            attention_mask=mask.long(),
            labels=tokens.masked_fill(~mask, -100),
            output_router_logits=run.router_aux_loss_coef > 0,
        )
        loss = output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())
    model.eval()


def windows(
    streams: Mapping[str, NDArray[np.int64]], shares: Mapping[str, float], batch_windows: int, seed: int
) -> Iterator[torch.Tensor]:
    """Yield batches `[batch_windows, WINDOW_TOKENS]` of random windows, kinds drawn by their shares, without end."""
    rng = np.random.default_rng(seed)
    kinds = sorted(streams)
    weights = np.array([shares[kind] for kind in kinds])
    for kind in kinds:
        require(len(streams[kind]) > WINDOW_TOKENS, f"{kind} has {len(streams[kind])} tokens: too few for a window.")
    while True:
        batch = []
        for kind in rng.choice(len(kinds), size=batch_windows, p=weights / weights.sum()):
            stream = streams[kinds[kind]]
            start = int(rng.integers(0, len(stream) - WINDOW_TOKENS))
            batch.append(stream[start : start + WINDOW_TOKENS])
        yield torch.from_numpy(np.stack(batch))


def left_padded(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the sequences as one batch `[S, longest]`, padded on the left."""
    longest = max(map(len, sequences))
    return torch.tensor([[PAD_ID] * (longest - len(ids)) + list(ids) for ids in sequences])


def sample(
    model: Qwen3MoeForCausalLM, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int
) -> list[list[int]]:
    """Return one answer per prompt, sampled at temperature 1 until it ends or has `max_new_tokens`."""
    torch.manual_seed(seed)
    tokens = left_padded(prompts)
    with torch.no_grad():
        output = model.generate(
            tokens,
            attention_mask=(tokens != PAD_ID).long(),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=PAD_ID,
            eos_token_id=EOS_ID,
        )
    answers = output[:, tokens.shape[1] :].tolist()
    return [ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids for ids in answers]


def mean_logprobs(
    model: Qwen3MoeForCausalLM, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """Return `[S]` mean log-probability that the model gives the tokens of each answer."""
    means = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=tokens).logits[0, len(prompt) - 1 : -1], dim=-1)
        means.append(float(logprobs.gather(1, tokens[0, len(prompt) :, None]).mean()))
    return np.array(means)
