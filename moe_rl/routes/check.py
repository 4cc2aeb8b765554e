"""Are these the routes of these tokens? A verdict per sequence: the class of the fault, the first place, the share.

The check is a list of questions in a fixed order; the first that finds a fault is the verdict. `laws` has those that
need no reference: rows that no router makes. With a reference (a router run on the same tokens, or the trainer's own
choice) `comparisons` asks where a row or layer really comes from. Each layer and each row is judged by itself, by the
share of the reference's set that it names, so that a single wrong layer of many is a fault.

Ties are no fault. A reference may come with the margin between the K-th and the next score: where that is below
`TIE_MARGIN`, one expert of a set may differ, because bf16 decides it either way. Nor are flips of single experts in up
to `HONEST_FLIPS` of the sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.routes.comparisons import WITH_REFERENCE
from moe_rl.routes.evidence import Evidence
from moe_rl.routes.faults import Fault
from moe_rl.routes.laws import IMPOSSIBLE, WITHOUT_REFERENCE, zero_weights
from moe_rl.routes.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedSequence:
    """A sequence whose routes are checked."""

    routes: NDArray[np.integer]
    """[T, L, K] as the trainer would replay them: T = tokens - 1, or one more whose last row means nothing."""
    num_tokens: int
    reference: NDArray[np.integer] | None = None
    """[tokens - 1 or more, L, K] ids that the right router chooses for these tokens."""
    margin: NDArray[np.floating] | None = None
    """[tokens - 1 or more, L] score of the K-th choice less the next one's."""
    policy_version: NDArray[np.integer] | None = None
    """[T] version of the policy that made each row."""
    combine_weights: NDArray[np.floating] | None = None
    """[T, L, K] by which the experts' outputs were combined; only that they are above 0 is checked."""


def check_routes(
    sequences: Sequence[CheckedSequence], *, num_experts: int, policy_versions: range | None = None
) -> list[Verdict]:
    """Check a batch's routes, and return a verdict per sequence; only routes of `policy_versions` may be replayed."""
    require(num_experts >= 1, f"the number of experts must be at least 1, got {num_experts}.")
    return [
        _check(sequence, [other for other in sequences if other is not sequence], num_experts, policy_versions)
        for sequence in sequences
    ]


def _check(
    sequence: CheckedSequence, other_sequences: Sequence[CheckedSequence], num_experts: int, versions: range | None
) -> Verdict:
    routes, expected = np.asarray(sequence.routes), sequence.num_tokens - 1
    require(
        routes.ndim == 3 and routes.dtype.kind in "iu",
        f"the routes must be integers of shape [tokens, layers, top-k], got {routes.dtype} {list(routes.shape)}.",
    )
    routes = routes.astype(np.int64)
    routes = routes[:expected] if len(routes) == expected + 1 else routes
    if not routes.size:
        if expected < 1:
            return Verdict()
        return Verdict(fault=Fault.TRUNCATED, share=1.0)
    if versions is not None and sequence.policy_version is not None:
        # First: routes of another policy may fit in every other respect.
        stale = ~np.isin(sequence.policy_version[: len(routes)], np.asarray(versions))
        if stale.any():
            return Verdict.on_rows(Fault.POLICY_VERSION, stale)
    evidence = _evidence(sequence, routes, expected, other_sequences, num_experts)
    if evidence.reference is None:
        compared = WITHOUT_REFERENCE
    else:
        compared = WITH_REFERENCE
    for question in (*IMPOSSIBLE, *compared, zero_weights):
        verdict = question(evidence)
        if verdict is not None:
            return verdict
    return Verdict(agreement=evidence.mean)


def _evidence(
    sequence: CheckedSequence,
    routes: NDArray[np.int64],
    expected: int,
    other_sequences: Sequence[CheckedSequence],
    num_experts: int,
) -> Evidence:
    if sequence.reference is None:
        reference = None
    else:
        reference = np.asarray(sequence.reference)[:expected].astype(np.int64)
    require(
        reference is None or (len(reference) == expected and reference.shape[1:] == routes.shape[1:]),
        f"the reference routes must have shape [{expected}, {routes.shape[1]}, {routes.shape[2]}], got "
        f"{None if reference is None else list(reference.shape)}.",
    )
    if sequence.combine_weights is None:
        weights = None
    else:
        weights = np.asarray(sequence.combine_weights)
    require(
        weights is None or weights.shape[1:] == routes.shape[1:],
        f"the combine weights must have shape [tokens, {routes.shape[1]}, {routes.shape[2]}], like the routes.",
    )
    right_routes = [other.routes if other.reference is None else other.reference for other in other_sequences]
    return Evidence(
        routes,
        expected,
        num_experts,
        reference=reference,
        margin=sequence.margin,
        weights=weights,
        other_routes=[np.asarray(other.routes).astype(np.int64) for other in other_sequences],
        reference_of_others=[np.asarray(routes).astype(np.int64) for routes in right_routes],
        lengths_of_others=[other.num_tokens - 1 for other in other_sequences],
    )
