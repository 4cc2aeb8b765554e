"""Random traces for the replay tests, and what it means that two of them are equal."""

from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from moe_rl.core.trace import RoutingTrace, SequenceCounts


def distinct_ids(rng: np.random.Generator, rows: int, layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """[rows, layers, top_k] int64 ids, distinct within a row."""
    if rows == 0:
        return np.zeros((0, layers, top_k), np.int64)
    return np.argsort(rng.random((rows, layers, num_experts)), axis=2)[:, :, :top_k]


def random_trace(
    seed: int,
    lengths: list[int],
    *,
    layers: int = 3,
    top_k: int = 2,
    num_experts: int = 8,
    steps: list[int] | None = None,
    optional: bool = False,
    filler: bool = True,
) -> RoutingTrace:
    """A trace with every column set; the last row of a sequence is filler when `filler` and it has two rows."""
    rng = np.random.default_rng(seed)
    count, total = len(lengths), sum(lengths)
    ends = np.cumsum(lengths).astype(np.int64)
    valid = np.ones(total, np.bool_)
    if filler:
        valid[[end - 1 for end, length in zip(ends, lengths, strict=True) if length > 1]] = False
    routes = distinct_ids(rng, total, layers, top_k, num_experts).astype(np.uint8 if num_experts <= 256 else np.uint16)
    routes[~valid] = 0
    return RoutingTrace(
        routed_experts=routes,
        valid=valid,
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int64),
        num_experts=num_experts,
        moe_layer_ids=tuple(range(1, layers + 1)),
        sample_id=rng.integers(0, 1 << 40, count),
        group_id=rng.integers(0, 50, count),
        step=np.array(steps or [0] * count, np.int32),
        micro_batch=rng.integers(-1, 4, count).astype(np.int32),
        dp_rank=rng.integers(-1, 4, count).astype(np.int32),
        provenance="R3",
        model="tiny-moe",
        policy_version=rng.integers(0, 9, total).astype(np.int32) if optional else None,
        router_logprobs=rng.standard_normal(routes.shape).astype(np.float16) if optional else None,
    )


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    """Any trace: sequences of no token, one token and more; one step or several, in any order."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    top_k = draw(st.integers(1, 4))
    return random_trace(
        draw(st.integers(0, 2**32 - 1)),
        lengths,
        layers=draw(st.integers(1, 4)),
        top_k=top_k,
        num_experts=draw(st.sampled_from([top_k, top_k + 1, 32, 256, 257])),
        steps=[draw(st.integers(-1, 3)) for _ in lengths],
        optional=draw(st.booleans()),
        filler=draw(st.booleans()),
    )


def assert_same(got: RoutingTrace | SequenceCounts, want: RoutingTrace | SequenceCounts) -> None:
    """Equal in every field; arrays also in dtype."""
    assert type(got) is type(want)
    for field in fields(want):
        have, expected = getattr(got, field.name), getattr(want, field.name)
        if isinstance(expected, np.ndarray):
            assert have.dtype == expected.dtype, field.name
            np.testing.assert_array_equal(have, expected, err_msg=field.name)
        else:
            assert have == expected, field.name
