"""The router shift inside a Megatron training loop: `MOE_RL_ROUTER_SHIFT=0.8`, where 0.8 is the floor of gamma.

The forward-only pass that gives the old log-probabilities fills a store, and every update reads it, in forwards that
run anyway. Sequences are known by their token ids, so that updates may shuffle and pack them otherwise; equal ones
share their place. verl, slime and miles do all of it by themselves. Any other loop:

    shift = RouterShiftRun(model_chunks, floor=0.8)                       # on all ranks
    schedule = shift.reading(get_forward_backward_func(), keys_of)        # in the place of Megatron's schedule
    ratio = shift.of(torch.cat(shift.coming())).ratio                     # in the loss function, once per micro-batch

`keys_of(micro_batches, forward_only)` returns for each micro-batch `shift.keys` of its sequences, and these keys [N] in
the order of the rows that this rank holds, -1 on padding (`held_positions` of moe_rl.megatron.routed_rows).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.frameworks.megatron.attach import looked_ahead
from moe_rl.importance import RouterShift, RouterStore, RouterTap, UpdatePass, all_reduce_sum, as_floats, group_like

# What the old pass stores; torch.int32 for a gamma that is exact to 1e-6, at twice the memory.
WORD = torch.int16

# Keys of the tokens of each sequence, and [N] of the rows that this rank holds.
MicroBatchKeys = tuple[Sequence[Tensor], Tensor]


class RouterShiftRun:
    """gamma of one model in training; every method is called on all of its ranks alike."""

    def __init__(self, chunks: Sequence[torch.nn.Module], *, floor: float) -> None:
        """Find the routers of this stage's chunks; `floor` is the least gamma. A collective of all ranks.

        Raises `InvalidInputError` for a router that is not known, or one that scores by an unknown function.
        """
        from megatron.core import parallel_state

        self._split = parallel_state.get_tensor_and_context_parallel_group()
        stages = parallel_state.get_pipeline_model_parallel_group()
        pipeline = group_like(stages) if stages.size() > 1 else None
        self.tap = RouterTap(chunks, word=WORD, pipeline=pipeline, split=self._split)
        self._chunks, self._floor = chunks, floor
        self._first: dict[int, int] = {}
        """Of every sequence, by its key, the key of its first token."""
        self._num_tokens = 0
        self._store: RouterStore | None = None
        self._update: UpdatePass | None = None
        self._coming: Iterator[MicroBatchKeys] = iter(())
        self._asked: list[Tensor] = []
        # Nothing is stored yet: the first forward-only pass begins a rollout.
        self._updated = True

    @property
    def num_bytes(self) -> int:
        """Bytes that the store of this rollout holds."""
        if self._store is None:
            return 0
        return self._store.num_bytes

    def keys(self, sequences: Sequence[Any], *, forward_only: bool) -> list[Tensor]:
        """Return the keys of the tokens of these sequences, given by their token ids; a forward-only pass makes them.

        The first forward-only pass after an update begins another rollout. A sequence is of the pass that has it first:
        in later ones, such as a reference model's, it reads -1 and its place stays as it is. Raises
        `InvalidInputError` where an update brings a sequence that no forward-only pass had.
        """
        if forward_only and self._updated:
            self._first, self._num_tokens, self._updated = {}, 0, False
            self._store = self._update = None
        keys = []
        for key, tokens in zip(SequenceRows.of_tokens(sequences).keys.tolist(), sequences, strict=False):
            start = self._first.get(key)
            if forward_only:
                # A second pass over the sequence, such as the reference model's, must not overwrite the first.
                start = self._num_tokens if start is None else None
                if start is not None:
                    self._first[key] = start
                    self._num_tokens += len(tokens)
            elif start is None:
                raise InvalidInputError(
                    "the router shift compares an update with the pass that computed old log-probabilities, but "
                    "one sequence was not in that pass. Turn bypass mode off, and compute old log-probabilities with "
                    "the trained model on the training ranks."
                )
            keys.append(torch.full((len(tokens),), -1) if start is None else start + torch.arange(len(tokens)))
        return keys

    def coming(self) -> Sequence[Tensor]:
        """Return the keys of the sequences whose loss is computed now; call it once per micro-batch.

        The row of a token is that of the one before, which predicts it: of R response tokens, `keys[-1 - R : -1]`.
        """
        return next(self._coming)[0]

    def of(self, keys: Tensor) -> RouterShift:
        """Return the router shift at these tokens, whose forward has run on the last stage; a collective."""
        require(self._update is not None, "the router-shift gamma can be read only in the loss function of an update.")
        assert self._update is not None
        self._asked.append(keys.reshape(-1))
        return self._update.finish(keys, floor=self._floor, sum_over_ranks=all_reduce_sum(self._split))

    def around(self, call: Callable[[], Any], micro_batches: Sequence[MicroBatchKeys], *, forward_only: bool) -> Any:
        """Return what `call` returned, a schedule over micro-batches whose keys are these.

        Where a forward-only `call` raises, its sequences count as unknown, so that it may be run again.
        """
        try:
            return self._around(call, micro_batches, forward_only=forward_only)
        except BaseException:
            if forward_only:
                self._forget(micro_batches)
            raise

    def _forget(self, micro_batches: Sequence[MicroBatchKeys]) -> None:
        """Forget the sequences that these micro-batches were the first to have; their places stay empty."""
        begun = {
            int(keys_of_sequence[0])
            for keys, _ in micro_batches
            for keys_of_sequence in keys
            if len(keys_of_sequence) and keys_of_sequence[0] >= 0
        }
        self._first = {key: start for key, start in self._first.items() if start not in begun}

    def _around(self, call: Callable[[], Any], micro_batches: Sequence[MicroBatchKeys], *, forward_only: bool) -> Any:
        device = next(self._chunks[0].parameters()).device
        rows = [keys_of_batch.reshape(-1).to(device) for _, keys_of_batch in micro_batches]
        if forward_only:
            # All sequences are known: a reference model's pass over the rollout, whose routers nobody reads.
            if all(bool((keys_of_sequence < 0).all()) for keys, _ in micro_batches for keys_of_sequence in keys):
                return call()
            with self.tap.old_pass(self._num_tokens, self._store) as self._store, self.tap.told(rows):
                return call()
        require(
            self._store is not None,
            "the router shift needs a pass for old log-probabilities before the update, but none has run.",
        )
        assert self._store is not None
        self._updated, self._asked, self._coming = True, [], iter(micro_batches)
        token = READING.set(self)
        try:
            with self.tap.update_pass(self._store) as self._update, self.tap.told(rows):
                return call()
        finally:
            READING.reset(token)

    def metrics(self) -> dict[str, float]:
        """Return `router_corr/*` of the tokens of the last update at which gamma was read; a collective there.

        With the bytes of the store of this rank. Raises `InvalidInputError` where more than 1 % of the tokens have no
        route in the old pass or this one.
        """
        readings, self._asked = self._asked, []
        if not readings:
            return {}
        return as_floats(self.of(torch.cat(readings)).metrics) | {"router_corr/store_bytes": float(self.num_bytes)}

    def reading(
        self, function: Callable[..., Any], keys_of: Callable[[list[Any], bool], Sequence[MicroBatchKeys]]
    ) -> Callable[..., Any]:
        """Return `function`, one of Megatron's schedules, with every call read."""

        @functools.wraps(function)
        def read(**kwargs: Any) -> Any:
            micro_batches, kwargs["data_iterator"] = looked_ahead(kwargs["data_iterator"], kwargs["num_microbatches"])
            forward_only = bool(kwargs.get("forward_only", False))
            keys = keys_of(micro_batches, forward_only)
            return self.around(lambda: function(**kwargs), keys, forward_only=forward_only)

        return read


# Whose update runs now; what a framework calls with log-probabilities alone reads gamma from here.
READING: ContextVar[RouterShiftRun | None] = ContextVar("READING", default=None)
