"""Synthetic routing traces in which the sequence, not the token, is the sampling unit.

Real micro-batch loads fluctuate 3 to 7 times more than independent tokens would: tokens of a sequence share its topic,
samples of a prompt share its subject, and neighbors reuse experts. The logit of expert e for token t of sequence i is
`b_e + D_{domain(i), e} + S_{i, e} + gumbel_t`, with b the expert's popularity, D its taste for a domain, S for the
sequence (partly shared by the samples of a prompt), and Gumbel noise that follows an AR(1) process over t; the token
takes the K experts with the largest logits. Layers are independent draws over common domains and lengths.

Experts of one token also meet more often than their loads say, and that decides how much a placement on one node saves.
For that a token has a topic, which neighbors share for some tokens, and every topic its tastes, added to the logits;
and a router of groups (DeepSeek) leaves a token the experts of its best groups alone.

L MoE layers, E experts, K experts per token, S sequences per step, T tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_least, require_shares
from moe_rl.core.model import check_groups
from moe_rl.core.trace import SEQUENCE_FIELDS, RoutingTrace, fill_sequence_fields, route_dtype
from moe_rl.simulators.token_routes import draw_routes

MIN_LENGTH = 20
# Logits [sequences, L, E] that are held at a time: 16 MiB of float32.
BATCH_VALUES = 1 << 22
# 128 MiB of routes are drawn at a time, more where one sequence has more.
PIECE_BYTES = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceModel:
    """Parameters of a synthetic trace; equal values give equal traces."""

    num_layers: int = 1
    """L; layers are drawn independently over common domains and lengths."""
    num_experts: int
    top_k: int
    num_sequences: int
    """S, sequences of one step."""
    mean_length: float
    """exp of the mean log length; no sequence is shorter than 20 tokens."""
    length_sigma: float = 0.6
    """Standard deviation of the log length."""
    num_domains: int = 4
    """Prompts take turns over the domains."""
    expert_sigma: float
    """Spread of the popularity b over experts."""
    domain_sigma: float
    """Spread over experts of D, the taste for a domain."""
    sequence_sigma: float
    """Spread over experts of S, the taste of a sequence."""
    token_persistence: float
    """AR(1) coefficient of the token noise; 0 makes tokens of a sequence independent given its logits."""
    num_topics: int = 0
    """Topics of tokens; with 0 the experts of a token are independent but for its sequence."""
    topic_sigma: float = 1.0
    """Spread over experts of a topic's taste."""
    topic_tokens: float = 2.0
    """Mean number of neighbors on one topic."""
    num_expert_groups: int = 1
    expert_group_top_k: int = 0
    """Groups of consecutive experts that a token may choose from, those with its best experts; 0: all of them."""
    group_size: int = 1
    """Samples per prompt: they share a group id and a domain."""
    group_share: float = 0.0
    """Share of the variance of S that the samples of a prompt have in common."""
    num_steps: int = 1
    step_drift: float = 0.0
    """Total variation between the loads of one policy and the next, to first order: b and D follow an AR(1) process
    over steps. RL steps are thought to move .001 - .01 (the whole of OLMoE's fine-tuning moved .05 - .08)."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_least(
            self, num_layers=1, num_experts=1, top_k=1, num_sequences=1, num_domains=1, group_size=1, num_steps=1,
            topic_tokens=1, mean_length=1, length_sigma=0, expert_sigma=0, domain_sigma=0, sequence_sigma=0,
            topic_sigma=0, num_topics=0, step_drift=0,
        )  # fmt: skip
        require_shares(self, "group_share")
        check_groups("generator", self.num_experts, self.top_k, self.num_expert_groups, self.expert_group_top_k)
        require(self.top_k <= self.num_experts, f"top_k ({self.top_k}) exceeds num_experts ({self.num_experts}).")
        require(
            0 <= self.token_persistence < 1,
            f"token_persistence must be at least 0 and less than 1, got {self.token_persistence}.",
        )
        require(
            self.step_logit_change <= math.sqrt(2) * self.policy_sigma or self.step_drift == 0,
            f"step_drift ({self.step_drift}) is too large: one step would change the router more than "
            "switching to an unrelated policy would.",
        )

    @property
    def policy_sigma(self) -> float:
        """Spread of the logits b + D that the policy itself has."""
        return math.hypot(self.expert_sigma, self.domain_sigma)

    @property
    def step_logit_change(self) -> float:
        """Standard deviation of the change of b + D from step to step.

        A change of N(0, s) in each logit moves a share q_e by about q_e N(0, s), so the total variation, half the sum
        of the absolute moves, is s / sqrt(2 pi).
        """
        return self.step_drift * math.sqrt(2 * math.pi)


# Many fine experts, strong domains: fitted to real traces of short answers; micro-batches of 1024 tokens.
PRESET_A = SequenceModel(
    num_experts=64,
    top_k=6,
    num_sequences=200,
    mean_length=150,
    expert_sigma=0.4,
    domain_sigma=0.7,
    sequence_sigma=0.3,
    token_persistence=0.6,
)

# Few coarse experts, strong sequences, the shape of GPT-OSS-20B; micro-batches of 2048 tokens.
PRESET_B = SequenceModel(
    num_experts=32,
    top_k=4,
    num_sequences=300,
    mean_length=300,
    expert_sigma=0.6,
    domain_sigma=0.6,
    sequence_sigma=0.9,
    token_persistence=0.6,
)

# The same, and experts meet in tokens as often as in a real trace of GPT-OSS-20B: the mean of three seeds of
# `moe-rl trace synth preset_b TARGET --like TRACE`.
PRESET_C = replace(PRESET_B, num_topics=8, topic_sigma=2.86)


def synthetic_trace(model: SequenceModel) -> RoutingTrace:
    """Return all steps as one trace; `step` tells them apart."""
    return _joined(list(synthetic_pieces(model)))


def generated_step(
    routes: NDArray[np.unsignedinteger], lengths: NDArray[np.int64], *, num_experts: int, **columns: NDArray[np.integer]
) -> RoutingTrace:
    """Return a synthetic trace of `routes` [T, L, K] in sequences of `lengths` [S], every row routed.

    `columns` [S] are any of sample_id, group_id, step, micro_batch and dp_rank.
    """
    return RoutingTrace(
        routed_experts=routes,
        valid=np.ones(len(routes), np.bool_),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        num_experts=num_experts,
        moe_layer_ids=tuple(range(routes.shape[1])),
        provenance="synthetic",
        **fill_sequence_fields(len(lengths), dict(columns)),
    )


def synthetic_steps(model: SequenceModel) -> Iterator[RoutingTrace]:
    """Yield one trace per step, each with new prompts and the next policy; one step is in memory at a time."""
    for _, pieces in groupby(synthetic_pieces(model), key=lambda piece: int(piece.step[0])):
        yield _joined(list(pieces))


def synthetic_pieces(model: SequenceModel) -> Iterator[RoutingTrace]:
    """Yield the same sequences in the same order, some of one step at a time: memory does not grow with the trace."""
    policy_rng, step_rng, topic_rng = np.random.default_rng(model.seed).spawn(3)
    shape = (model.num_topics, model.num_layers, model.num_experts)
    topics = np.float32(model.topic_sigma) * topic_rng.standard_normal(shape, np.float32)
    for step, logits in enumerate(_policies(model, policy_rng)):
        yield from _one_step(model, logits, topics, step, step_rng.spawn(1)[0])


def _joined(pieces: list[RoutingTrace]) -> RoutingTrace:
    head = pieces[0]
    if len(pieces) == 1:
        return head

    def joined(name: str) -> Any:
        return np.concatenate([getattr(piece, name) for piece in pieces])

    columns = {name: joined(name) for name in SEQUENCE_FIELDS}
    return generated_step(joined("routed_experts"), joined("sequence_lengths"), num_experts=head.num_experts, **columns)


def _policies(model: SequenceModel, rng: np.random.Generator) -> Iterator[NDArray[np.float32]]:
    """Yield b + D of every step, [domains, L, E]; b and D drift alike, so that their spread stays the same."""
    shape = (model.num_domains, model.num_layers, model.num_experts)
    base = rng.normal(0, model.expert_sigma, shape[1:])
    domain = rng.normal(0, model.domain_sigma, shape)
    # Var(next - now) = 2 (1 - keep) sigma^2 for an AR(1) process of standing spread sigma.
    kept_share = 1.0
    if model.step_drift:
        kept_share = 1 - model.step_logit_change**2 / (2 * model.policy_sigma**2)
    fresh = math.sqrt(max(0.0, 1 - kept_share**2))
    for _ in range(model.num_steps):
        yield (base + domain).astype(np.float32)
        base = kept_share * base + fresh * rng.normal(0, model.expert_sigma, shape[1:])
        domain = kept_share * domain + fresh * rng.normal(0, model.domain_sigma, shape)


def _one_step(
    model: SequenceModel, logits: NDArray[np.float32], topics: NDArray[np.float32], step: int, rng: np.random.Generator
) -> Iterator[RoutingTrace]:
    num_sequences, group_size = model.num_sequences, model.group_size
    group = np.arange(num_sequences) // group_size
    lengths = rng.lognormal(math.log(model.mean_length), model.length_sigma, num_sequences)
    lengths = np.maximum(MIN_LENGTH, np.floor(lengths)).astype(np.int64)
    first_sample, first_group = step * num_sequences, step * (int(group[-1]) + 1)
    groups_at_once = max(1, BATCH_VALUES // (group_size * model.num_layers * model.num_experts))
    for start in range(0, num_sequences, groups_at_once * group_size):
        batch = np.arange(start, min(num_sequences, start + groups_at_once * group_size))
        sequence_logits = logits[group[batch] % model.num_domains]
        sequence_logits += _sequence_logits(model, group[batch], rng)
        keys = rng.integers(0, 1 << 64, sequence_logits.shape[:2], np.uint64)
        for run in _runs(lengths[batch], _most_rows(model)):
            rows = lengths[batch[run]]
            yield generated_step(
                _routes(model, sequence_logits[run], keys[run], rows, topics, rng),
                rows,
                num_experts=model.num_experts,
                sample_id=first_sample + batch[run],
                group_id=first_group + group[batch[run]],
                step=np.full(len(rows), step),
            )


def _most_rows(model: SequenceModel) -> int:
    """Return the tokens that are drawn at a time."""
    if model.expert_group_top_k:
        ids_per_row = model.num_experts
    else:
        ids_per_row = model.top_k
    most_rows = PIECE_BYTES // (model.num_layers * ids_per_row * np.dtype(route_dtype(model.num_experts)).itemsize)
    if not model.num_topics:
        return most_rows
    return min(most_rows, int(BATCH_VALUES * model.topic_tokens) // (model.num_layers * model.num_experts))


def _routes(
    model: SequenceModel,
    logits: NDArray[np.float32],
    keys: NDArray[np.uint64],
    rows: NDArray[np.int64],
    topics: NDArray[np.float32],
    rng: np.random.Generator,
) -> NDArray[np.unsignedinteger]:
    """Return the routes [T, L, K] of sequences with `logits` [n, L, E], `keys` [n, L] and `rows` [n] tokens."""
    ends = np.cumsum(rows)
    run_start = ends - rows
    if model.num_topics:
        # To the noise a stretch of tokens on one topic is a sequence of its own.
        begins = rng.random(int(ends[-1])) < 1 / model.topic_tokens
        begins[run_start] = True
        run_start = np.flatnonzero(begins)
        sequence = np.searchsorted(ends, run_start, side="right")
        rows = np.diff(run_start, append=ends[-1])
        logits = logits[sequence] + topics[rng.integers(0, model.num_topics, len(run_start))]
        keys = rng.integers(0, 1 << 64, logits.shape[:2], np.uint64)
    if model.expert_group_top_k:
        ranked = model.num_experts
    else:
        ranked = model.top_k
    routes = np.empty((int(ends[-1]), model.num_layers, ranked), route_dtype(model.num_experts))
    draw_routes(
        routes, logits=logits, keys=keys, first_row=run_start, lengths=rows, persistence=model.token_persistence
    )
    if model.expert_group_top_k:
        return _of_best_groups(model, routes)
    return routes


def _of_best_groups(model: SequenceModel, ranked: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return [T, L, K], the first experts of `ranked` [T, L, E] in the groups whose best expert stands highest."""
    group = ranked // np.asarray(model.num_experts // model.num_expert_groups, ranked.dtype)
    best_rank = np.stack([(group == index).argmax(axis=2) for index in range(model.num_expert_groups)], axis=2)
    threshold = np.sort(best_rank, axis=2)[:, :, model.expert_group_top_k - 1, None]
    eligible = np.take_along_axis(best_rank, group.astype(np.intp), axis=2) <= threshold
    is_chosen = eligible & (np.cumsum(eligible, axis=2) <= model.top_k)
    return ranked[is_chosen].reshape(*ranked.shape[:2], model.top_k)


def _runs(lengths: NDArray[np.int64], most_rows: int) -> Iterator[slice]:
    """Yield runs of sequences with at most `most_rows` rows together; a longer sequence is a run of its own."""
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        rows_before = int(ends[start] - lengths[start])
        stop = max(start + 1, int(np.searchsorted(ends, rows_before + most_rows, side="right")))
        yield slice(start, stop)
        start = stop


def _sequence_logits(model: SequenceModel, group: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float32]:
    """Return S, [sequences, L, E], of whole groups."""
    nth_group = group - group[0]
    shape = (model.num_layers, model.num_experts)
    group_noise = rng.standard_normal((int(nth_group[-1]) + 1, *shape), np.float32)[nth_group]
    noise = rng.standard_normal((len(group), *shape), np.float32)
    mixed_noise: NDArray[np.float32] = (
        math.sqrt(model.group_share) * group_noise + math.sqrt(1 - model.group_share) * noise
    )
    return np.float32(model.sequence_sigma) * mixed_noise
