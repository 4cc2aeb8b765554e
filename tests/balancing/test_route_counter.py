"""Counts on their way to the host are read when they have arrived."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from moe_rl.balancing.route_counter import HostCopies


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
