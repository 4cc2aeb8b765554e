"""Which micro-batch a MoE layer is working on, told from Megatron's own order of calls.

A model chunk runs its micro-batches in ascending order in forward, and in the same order in backward; so does every
chunk of an interleaved pipeline, whatever the others do in between. So the n-th call of the chunk is micro-batch n, and
a layer that runs while its chunk does not is recomputing: its n-th recomputation of the pass belongs to micro-batch n.
Where a schedule calls the parts of the layers in the chunk's place (overlap_moe_expert_parallel_comm), which goes
without recomputation of MoE layers, a layer's n-th run is micro-batch n.

A training pass may have forwards of the model between its micro-batches, such as a metric of the current policy. They
run without gradients, and are not counted:

    forward               micro-batch 0
    forward, no_grad      OUTSIDE: on home slots alone
    backward              recomputes layers of micro-batch 0
    forward               micro-batch 1
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# In the place of a micro-batch's number: the run is of none.
OUTSIDE = -1


class MicroBatchClock:
    """Counts the forward calls of one model chunk and the recomputations of each of its layers."""

    def __init__(self, chunk: "torch.nn.Module", *, recomputes: bool = True) -> None:
        import torch  # here: who only plans has none

        self._has_gradients = torch.is_grad_enabled
        self._recomputes = recomputes
        self.trained = False
        """Whether a run with gradients was since an optimizer step last set this to False."""
        self._hooks = [
            chunk.register_forward_pre_hook(self._enter),
            chunk.register_forward_hook(self._leave, always_call=True),
        ]
        self.reset()
        self.stop()

    def reset(self, *, training: bool = False) -> None:
        """Start a pass: the next forward is micro-batch 0; in a `training` pass the next one with gradients."""
        self.current_pass: object | None = object()
        """Another object in every pass, None between passes: no weight changes while it stays."""
        self._training = training
        self._forwards = 0
        self._in_forward = self._outside = False
        self._recomputed: dict[int, int] = {}

    def stop(self) -> None:
        """End the pass: weights may change, and a layer that runs belongs to none."""
        self.current_pass = None
        self._in_forward = self._outside = False  # Ctrl-C in a forward passes by the hook that would say so

    def remove(self) -> None:
        """Take the hooks off the chunk."""
        for hook in self._hooks:
            hook.remove()

    @property
    def recomputing(self) -> bool:
        """Whether a layer that starts now is recomputed in backward."""
        return self._recomputes and not self._in_forward

    @property
    def micro_batches(self) -> int:
        """How many micro-batches of the pass have begun."""
        if self._recomputes:
            return self._forwards
        return max([self._forwards, *(micro_batch + 1 for micro_batch in self._recomputed.values())])

    def micro_batch(self, layer: int) -> int:
        """Return the micro-batch that layer `layer` is in now, or OUTSIDE; call once per run of the layer."""
        self.trained |= self._has_gradients()
        if self._outside:
            return OUTSIDE
        if self._in_forward:
            return self._forwards - 1
        self._recomputed[layer] = self._recomputed.get(layer, -1) + 1
        return self._recomputed[layer]

    def _enter(self, *_: Any) -> None:
        self._outside = self._training and not self._has_gradients()
        self._forwards += not self._outside
        self._in_forward = True

    def _leave(self, *_: Any) -> None:
        self._in_forward = self._outside = False
