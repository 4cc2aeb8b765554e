"""Schedules as slime's driver makes them, from a generator of our own: none was recorded inside slime.

It keeps what slime documents of `build_dp_schedule` (THUDM/slime:slime/utils/dp_schedule.py at 04e6743): steps hold
whole rollouts, and what does not fill a step is left out; samples of a step fill micro-batches up to a budget; their
number is a multiple of ranks (times the group of virtual stages); every rank gets as many; and a
rank's micro-batches name samples by their place in its partition. Which sample goes where is not slime's choice.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Made:
    """What `build_dp_schedule` returns, and what it was made of."""

    lengths: list[int]
    rollout_of: list[int]
    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]
    budget: int


def made_schedule(
    rng: np.random.Generator, *, ranks: int, steps: int, rollouts: int, align: int = 1, budget: int = 64
) -> Made:
    """A schedule of `steps` optimizer steps of `rollouts` rollouts each, and some rollouts more than fill them."""
    rollout_of = np.repeat(np.arange(steps * rollouts + 1), rng.integers(1, 4, steps * rollouts + 1)).tolist()
    lengths = rng.integers(2, budget // 2, len(rollout_of)).tolist()
    partitions: list[list[int]] = [[] for _ in range(ranks)]
    indices: list[list[list[int]]] = [[] for _ in range(ranks)]
    counts = []
    for step in range(steps):
        samples = [s for s, of in enumerate(rollout_of) if step * rollouts <= of < (step + 1) * rollouts]
        batches = _filled([samples[i] for i in rng.permutation(len(samples))], lengths, budget)
        while len(batches) % (ranks * align):
            longest = max(range(len(batches)), key=lambda i: (len(batches[i]), i))
            batch = batches.pop(longest)
            batches += [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        counts.append(len(batches) // ranks)
        for number, batch in enumerate(batches):
            rank = number % ranks
            indices[rank].append(list(range(len(partitions[rank]), len(partitions[rank]) + len(batch))))
            partitions[rank] += batch
    return Made(lengths, rollout_of, partitions, indices, counts, [rollouts] * steps, budget)


def _filled(samples: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for sample in samples:
        if batches[-1] and sum(lengths[s] for s in batches[-1]) + lengths[sample] > budget:
            batches.append([])
        batches[-1].append(sample)
    return batches
