"""The imbalance of a Megatron run as it is: no plan, no balancer, nothing of the layers changed.

L MoE layers of this stage, M micro-batches of a pass, E experts, P EP ranks.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_rl.balancing.clock import OUTSIDE, MicroBatchClock
from moe_rl.core.metrics import imbalance
from moe_rl.megatron.attach import moe_layers
from moe_rl.megatron.model_spec import unwrapped


class LoadWatch:
    """Counts which experts the routers of built model chunks choose, micro-batch by micro-batch."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._clocks: list[MicroBatchClock] = []
        self._counts: dict[tuple[int, int], torch.Tensor] = {}
        """[E] rows of this rank, by (micro-batch, layer)."""
        self._hooks: list[Any] = []
        self._num_layers = 0
        for chunk in chunks:
            layers = list(moe_layers(chunk))
            overlaps = bool(layers and layers[0].config.overlap_moe_expert_parallel_comm)
            clock = MicroBatchClock(unwrapped(chunk), recomputes=not overlaps)
            self._clocks.append(clock)
            for layer in layers:
                count = partial(self._count, clock, self._num_layers)
                self._hooks.append(layer.router.register_forward_hook(count))
                self._num_layers += 1

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        for clock in self._clocks:
            clock.remove()

    def begin_pass(self, *, forward_only: bool) -> None:
        """Count from here on; in an update the forwards with gradients alone."""
        self._counts = {}
        for clock in self._clocks:
            clock.reset(training=not forward_only)

    def give_up(self) -> None:
        """Forget a pass that broke off; no other rank is asked."""
        self._counts = {}
        for clock in self._clocks:
            clock.stop()

    def end_pass(self) -> dict[str, float]:
        """Return `moe_rl/imbalance` of the pass, one sum over the EP group; {} where no MoE layer ran."""
        counts, micro_batches = self._counts, max((clock.micro_batches for clock in self._clocks), default=0)
        self.give_up()
        if not counts:
            return {}
        no_rows = torch.zeros_like(next(iter(counts.values())))
        by_layer = [counts.get((m, layer), no_rows) for m in range(micro_batches) for layer in range(self._num_layers)]
        rows = torch.stack(by_layer)
        dist.all_reduce(rows, group=parallel_state.get_expert_model_parallel_group())
        ep_size = parallel_state.get_expert_model_parallel_world_size()
        # Megatron's own homes: rank r has experts r * E/P .. (r + 1) * E/P - 1.
        rows_MLP = rows.view(micro_batches, self._num_layers, ep_size, -1).sum(dim=3)
        return {"moe_rl/imbalance": imbalance(rows_MLP.cpu().numpy()[None])}

    def _count(self, clock: MicroBatchClock, layer: int, _: Any, args: Any, output: tuple[Any, torch.Tensor]) -> None:
        if clock.current_pass is None:
            return
        recomputing = clock.recomputing
        micro_batch = clock.micro_batch(layer)
        if not recomputing and micro_batch != OUTSIDE:
            self._counts[micro_batch, layer] = output[1].sum(dim=0)
