"""How often experts meet in a token beyond what their loads explain, in a trace; and a generator that does the same.

Of all pairs of experts that meet in tokens of a layer, experts e and f (in this order) have a share P; were a token's
experts independent, it would be Q, proportional to the product of their loads. The mean-square contingency
sum (P - Q)^2 / Q is 0 for independent choices, and b - 1 where experts meet in b groups alone, however many experts
there are: traces of different models compare. P and Q are of halves of the sequences, the two differences multiplied,
so that chance adds nothing. T tokens, L MoE layers, K experts per token, E experts.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.trace import RoutingTrace
from moe_rl.simulators.synthetic import SequenceModel, synthetic_trace

# Of a trace so many tokens and layers are looked at, evenly spread.
MOST_TOKENS, MOST_LAYERS = 1 << 16, 8
# A generator without topics gets 8: with these a trace is as easy to split over nodes as real ones are.
TOPICS = 8
# A draw that is tried has so many layers and sequences.
SAMPLE = (4, 120)
# The spread of topics' tastes is looked for in this range, which is halved so often.
SIGMAS, HALVINGS = (0.0, 8.0), 8


def coactivation(trace: RoutingTrace) -> float:
    """Return the mean over layers of the contingency of the experts in a token; 0 with one expert per token."""
    tokens = np.flatnonzero(trace.valid)
    tokens = tokens[:: -(-len(tokens) // MOST_TOKENS) or 1]
    layers = np.unique(np.linspace(0, trace.num_layers - 1, MOST_LAYERS).round().astype(int))
    sequence = np.searchsorted(trace.cu_seqlens, tokens, side="right") - 1
    # By sequence: tokens of one sequence are alike, and halves that share them would agree by chance.
    half = np.random.default_rng(0).permutation(trace.num_sequences)[sequence] % 2
    return float(np.mean([_of_layer(trace.routed_experts[tokens, layer], half, trace.num_experts) for layer in layers]))


def like(model: SequenceModel, trace: RoutingTrace) -> SequenceModel:
    """Return the model with topics whose tastes differ so much that experts meet as in `trace`.

    Tried on a draw of a few layers, among which the contingency differs by some tenths of itself. Raises where experts
    meet so much in no trace of this model.
    """
    wanted_coactivation, low, high = coactivation(trace), *SIGMAS
    model = replace(model, num_topics=model.num_topics or TOPICS)
    sample = replace(model, num_layers=SAMPLE[0], num_sequences=SAMPLE[1], num_steps=1)

    def reached(sigma: float) -> float:
        return coactivation(synthetic_trace(replace(sample, topic_sigma=sigma)))

    require(
        wanted_coactivation <= reached(high),
        f"some experts of the trace are chosen together more often than {model.num_topics} topics can produce "
        f"(the trace has mean-square contingency {wanted_coactivation:.2f}). Set num_topics to a lower number.",
    )
    # Eight halvings of 0 .. 8 leave 0.03, finer than draws of one sigma are alike.
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < wanted_coactivation else (low, middle)
    return replace(model, topic_sigma=round((low + high) / 2, 2))


def _of_layer(experts: NDArray[np.unsignedinteger], half: NDArray[np.integer], num_experts: int) -> float:
    """Return the contingency of [T, K] experts, whose tokens are of two halves."""
    differences, expected_shares = [], np.zeros((num_experts, num_experts))
    for part in (experts[half == 0], experts[half == 1]):
        is_chosen = np.zeros((len(part), num_experts), np.float32)
        np.put_along_axis(is_chosen, part.astype(np.intp), 1.0, axis=1)
        joint_counts = (is_chosen.T @ is_chosen).astype(np.float64)
        np.fill_diagonal(joint_counts, 0.0)
        load = joint_counts.sum(axis=1)
        independent = np.outer(load, load)
        np.fill_diagonal(independent, 0.0)
        independent /= max(independent.sum(), 1.0)
        differences.append(joint_counts / max(joint_counts.sum(), 1.0) - independent)
        expected_shares += independent / 2
    product = differences[0] * differences[1]
    return float((product[expected_shares > 0] / expected_shares[expected_shares > 0]).sum())
