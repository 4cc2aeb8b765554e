"""Which micro-batch a layer is in, by the order of calls that a pipeline makes."""

import pytest

pytest.importorskip("torch")

import torch

from moe_rl.balancing.clock import OUTSIDE, MicroBatchClock

LAYERS = 3


class Chunk(torch.nn.Module):
    """A model chunk whose layers ask the clock which micro-batch they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: MicroBatchClock | None = None
        self.fails = False

    def forward(self) -> list[int]:
        assert self.clock is not None
        if self.fails:
            raise KeyboardInterrupt
        return [self.clock.micro_batch(layer) for layer in range(LAYERS)]


def chunk_with_clock(*, recomputes: bool = True) -> tuple[Chunk, MicroBatchClock]:
    chunk = Chunk()
    chunk.clock = MicroBatchClock(chunk, recomputes=recomputes)
    return chunk, chunk.clock


def recomputed(clock: MicroBatchClock, layers: int = LAYERS) -> list[int]:
    """Backward of one micro-batch: its layers run again, the last one first."""
    return [clock.micro_batch(layer) for layer in reversed(range(layers))]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_forwards_and_recomputations_are_numbered_each_in_their_order(num_micro_batches: int) -> None:
    """One forward and one backward, as a pipeline alternates them, two micro-batches behind each other."""
    chunk, clock = chunk_with_clock()
    for _ in range(2):  # passes
        clock.reset(training=True)
        assert clock.micro_batches == 0
        for step in range(num_micro_batches + 2):
            if step < num_micro_batches:
                assert chunk() == [step] * LAYERS
                assert clock.micro_batches == step + 1
            if step >= 2:
                assert clock.recomputing
                assert recomputed(clock) == [step - 2] * LAYERS
                assert clock.micro_batches == min(step + 1, num_micro_batches)
        clock.stop()


def test_a_layer_in_its_chunks_forward_does_not_recompute() -> None:
    chunk, clock = chunk_with_clock()
    seen = []
    chunk.forward = lambda: seen.append(clock.recomputing)  # type: ignore[method-assign]
    clock.reset(training=True)
    chunk()
    assert (seen, clock.recomputing) == ([False], True)


def test_where_layers_run_in_the_chunks_place_their_runs_are_the_micro_batches() -> None:
    """A schedule that overlaps calls the layers by themselves, forward of one and backward of another in turn."""
    chunk, clock = chunk_with_clock(recomputes=False)
    clock.reset(training=True)
    assert clock.micro_batches == 0
    assert chunk() == [0] * LAYERS, "the first one may still go through the chunk"
    assert clock.micro_batches == 1
    clock.reset(training=True)
    for micro_batch in range(4):
        assert clock.micro_batch(0) == micro_batch
        assert clock.micro_batches == micro_batch + 1
        assert not clock.recomputing
        assert clock.micro_batch(1) == micro_batch


def test_a_forward_without_gradients_in_a_training_pass_is_of_no_micro_batch() -> None:
    chunk, clock = chunk_with_clock()
    clock.reset(training=True)
    assert chunk() == [0] * LAYERS
    with torch.no_grad():
        assert chunk() == [OUTSIDE] * LAYERS
    assert clock.micro_batches == 1
    assert recomputed(clock) == [0] * LAYERS, "what is recomputed next is inside again"
    assert chunk() == [1] * LAYERS
    clock.reset(training=False)
    with torch.no_grad():
        assert chunk() == [0] * LAYERS, "a forward-only pass is made of such forwards"
    assert clock.micro_batches == 1


def test_a_layer_that_ran_with_gradients_may_have_left_some() -> None:
    chunk, clock = chunk_with_clock()
    clock.reset()
    with torch.no_grad():
        chunk()
    assert not clock.trained
    clock.reset(training=True)
    chunk()
    assert clock.trained
    with torch.no_grad():
        chunk()
    clock.stop()
    clock.reset()
    assert clock.trained, "until an optimizer step says otherwise"
    clock.trained = False
    assert not clock.trained


def test_between_passes_there_is_no_pass_and_every_pass_is_another() -> None:
    chunk, clock = chunk_with_clock()
    assert clock.current_pass is None
    assert chunk() == [0] * LAYERS, "a forward that nobody announced"
    passes = []
    for _ in range(2):
        clock.reset(training=True)
        passes.append(clock.current_pass)
        clock.stop()
        assert clock.current_pass is None
    assert None not in passes
    assert passes[0] is not passes[1]


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_forward_that_raises_is_left(with_gradients: bool) -> None:
    chunk, clock = chunk_with_clock()
    clock.reset(training=True)
    chunk()
    chunk.fails = True
    with torch.set_grad_enabled(with_gradients), pytest.raises(KeyboardInterrupt):
        chunk()
    clock.stop()
    assert clock.recomputing
    chunk.fails = False
    clock.reset(training=True)
    assert recomputed(clock, 1) == [0]
    assert chunk() == [0] * LAYERS


def test_a_stop_inside_a_forward_leaves_it() -> None:
    """Where an interrupt skips the hook behind the forward, stopping has to do what it would have done."""
    for with_gradients in (True, False):
        _, clock = chunk_with_clock()
        clock.reset(training=True)
        with torch.set_grad_enabled(with_gradients):
            clock._enter()
        clock.stop()
        assert clock.recomputing
        assert recomputed(clock, 1) == [0]
        clock.reset(training=True)
        with torch.set_grad_enabled(with_gradients):
            clock._enter()
        clock.reset(training=True)
        assert clock.recomputing
        assert recomputed(clock, 1) == [0]


def test_a_removed_clock_counts_no_more() -> None:
    chunk, clock = chunk_with_clock()
    clock.reset(training=True)
    chunk()
    clock.remove()
    chunk.forward = lambda: None  # type: ignore[method-assign]
    chunk()
    assert clock.micro_batches == 1
