"""Counts of a pass, and their way to the host."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from moe_rl.balancing.route_counter import HostCopies, RouteCounter
from moe_rl.balancing.sequence_rows import SequenceRows


def test_copies_are_read_behind_the_event_of_their_stream() -> None:
    copies = HostCopies([torch.zeros(3)])
    on_the_way = copies._on_host[0]
    copies._arrived = SimpleNamespace(synchronize=lambda: on_the_way.add_(7))  # type: ignore[assignment]
    np.testing.assert_array_equal(copies.arrays()[0], [7, 7, 7])


def test_what_lies_on_the_host_waits_for_nothing() -> None:
    given = [torch.arange(2), np.arange(3)]
    copies = HostCopies(given)
    assert copies._arrived is None
    for array, source in zip(copies.arrays(), given, strict=True):
        np.testing.assert_array_equal(array, source)


def test_a_layer_whose_router_did_not_run_counts_nothing() -> None:
    """Of 3 layers the middle one ran: 2 tokens of one sequence, 4 experts, top-2."""
    counter = RouteCounter([SequenceRows.of_tokens([[7, 8]])], (3, 4, 2), torch.device("cpu"))
    counter.count_ids(0, 1, torch.tensor([[0, 3], [0, 2]]))
    (routes,) = counter.start_fetch(lambda _: None).micro_batches()
    nothing = [0, 0, 0, 0]
    assert routes.counts_SLE.tolist() == [[nothing, [2, 0, 1, 1], nothing], [nothing] * 3]
    assert routes.sampled_ids_ULK.tolist() == [[[0, 0], [0, 3], [0, 0]], [[0, 0], [0, 2], [0, 0]]]
