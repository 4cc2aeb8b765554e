"""Which update verl runs next, told before it comes, so that its plan is made beside what runs before it.

verl's worker cuts a rollout into mini-batches (`make_iterator`), its engine cuts each into micro-batches
(`prepare_micro_batches`). Both functions are called here once more: in an update for the mini-batch after it, and in a
log-prob pass, which has the rows of the rollout in the same order, for the first one, if verl cuts as it did before.
An update that differs on any rank from the one that was foretold is planned when it comes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from verl.utils.tensordict_utils import assign_non_tensor, get_non_tensor_data
from verl.workers.engine.megatron import transformer_impl

from moe_rl.balancing.exchange import attempted, gathered
from moe_rl.core.mappings import not_none
from moe_rl.frameworks.verl.driver import COLUMN

# What a mini-batch says of how it is cut.
SETTINGS = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "force_group_size")


class MiniBatches(Iterator[Any]):
    """verl's iterator, with the next mini-batch at hand while one is trained."""

    latest: "MiniBatches | None" = None
    """The one that yielded last in this process."""

    def __init__(self, cut: Callable[[Any], Iterator[Any]], rollout: Any) -> None:
        self.cut, self._rest = cut, cut(rollout)
        self.now, self.next = None, next(self._rest, None)

    def __next__(self) -> Any:
        if self.next is None:
            raise StopIteration
        self.now, self.next = self.next, next(self._rest, None)
        MiniBatches.latest = self
        return self.now


def iterated(make_iterator: Callable[..., Iterator[Any]], rollout: Any, *how: Any, **named: Any) -> Iterator[Any]:
    """Return what verl's `make_iterator` returns, which remembers how it was asked."""
    if named.get("seed") is None:  # it draws from torch's global generator, at a time that nobody may change
        return make_iterator(rollout, *how, **named)
    return MiniBatches(lambda data: make_iterator(data, *how, **named), rollout)


@dataclass(slots=True)
class LookAhead:
    """The update that one engine runs next."""

    prepared_batch: Any = None
    """The mini-batch for which a pass is prepared; None where none is."""
    indices: list[list[int]] | None = None
    """Its sequences by micro-batch, where these are dynamic."""
    _cut: Callable[[Any], Iterator[Any]] | None = None
    """Cuts a rollout as the last one was; None before the first."""
    _settings: dict[str, Any] = field(default_factory=dict)
    """Of the last update."""

    def comes(self, data: Any, *, forward_only: bool) -> bool:
        """Return whether `data` is the prepared batch on all ranks, and forget that batch if not; a collective."""
        prepared_batch, self.prepared_batch = self.prepared_batch, None
        if forward_only or _settings_of(data) != self._settings:  # on all ranks alike
            return False
        if prepared_batch is not data:  # else it is the next of the rollout, of which all ranks have their own
            foretold, now = prepared_batch["input_ids"], data["input_ids"]
            same = torch.equal(foretold.offsets(), now.offsets()) and torch.equal(foretold.values(), now.values())
            if not all(gathered(same)):
                return False
        self.prepared_batch = data
        return True

    def after(self, data: Any, engine: Any, *, forward_only: bool) -> list[Any] | None:
        """Return the micro-batches of the update after the pass with `data`, then `prepared_batch`; a collective.

        None where there is no update after it, or nobody knows yet how verl cuts a rollout.
        """
        source, coming = MiniBatches.latest, None
        if not forward_only and source is not None and source.now is data:
            self._cut, self._settings, coming = source.cut, _settings_of(data), source.next
        elif forward_only and self._cut is not None:
            coming = self._first_of(data, self._cut, engine)
        if coming is None:
            return None
        self.prepared_batch = coming
        return self._micro_batches(coming, engine)

    def _first_of(self, rollout: Any, cut: Callable[[Any], Iterator[Any]], engine: Any) -> Any:
        """Return its first mini-batch; None where some rank's cannot be cut so: the driver may still drop sequences."""
        mini_batch, error = attempted(lambda: next(cut(rollout)))
        limit, longest = self._settings["max_token_len_per_gpu"], int(rollout["input_ids"].offsets().diff().max())
        fits = limit is None or longest <= limit * engine.engine_config.context_parallel_size
        if not all(gathered(error is None and fits)):
            return None
        return mini_batch

    def _micro_batches(self, mini_batch: Any, engine: Any) -> list[Any]:
        """Return what verl's engine will cut a mini-batch to."""
        columns = mini_batch.select("input_ids", "routed_experts", "response_mask", COLUMN, strict=False)
        settings = not_none(self._settings)
        assign_non_tensor(columns, **settings, sp_size=engine.engine_config.context_parallel_size)
        stages = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        together = None
        if stages > 1:
            together = engine.tf_config.microbatch_group_size_per_vp_stage
        micro_batches: list[Any]
        micro_batches, self.indices = transformer_impl.prepare_micro_batches(
            columns, dp_group=engine.get_data_parallel_group(), num_batches_divided_by=together
        )
        return micro_batches


def _settings_of(mini_batch: Any) -> dict[str, Any]:
    return {name: get_non_tensor_data(mini_batch, name, None) for name in SETTINGS}
