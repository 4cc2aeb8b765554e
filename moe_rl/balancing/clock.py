"""Which micro-batch a MoE layer is working on, told from Megatron's own order of calls.

A model chunk runs its micro-batches in ascending order in forward, and in the same order in backward; so does every
chunk of an interleaved pipeline, whatever the others do in between. So the n-th call of the chunk is micro-batch n, and
a layer that runs while its chunk does not is recomputing: its n-th recomputation of the pass belongs to micro-batch n.
Where a schedule calls the parts of the layers in the chunk's place (overlap_moe_expert_parallel_comm), which goes
without recomputation of MoE layers, a layer's n-th run is micro-batch n.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class MicroBatchClock:
    """Counts the forward calls of one model chunk and the recomputations of each of its layers."""

    def __init__(self, chunk: "torch.nn.Module", *, recomputes: bool = True) -> None:
        self._recomputes = recomputes
        self.trained = False
        """Whether a run with gradients was since an optimizer step last set this to False."""
        self._hooks = [
            chunk.register_forward_pre_hook(self._enter),
            chunk.register_forward_hook(self._leave, always_call=True),
        ]
        self.reset()
        self.stop()

    def reset(self) -> None:
        """Start a pass: the next forward is micro-batch 0."""
        self.current_pass: object | None = object()
        """Another object in every pass, None between passes: no weight changes while it stays."""
        self._forwards = 0
        self._in_forward = False
        self._recomputed: dict[int, int] = {}

    def stop(self) -> None:
        """End the pass: weights may change, and a layer that runs belongs to none."""
        self.current_pass = None
        self._in_forward = False  # Ctrl-C in a forward passes by the hook that would say so

    def remove(self) -> None:
        """Take the hooks off the chunk."""
        for hook in self._hooks:
            hook.remove()

    @property
    def recomputing(self) -> bool:
        """Whether a layer that starts now is recomputed in backward."""
        return self._recomputes and not self._in_forward

    def micro_batch(self, layer: int) -> int:
        """Return the micro-batch of the call that layer `layer` is in now; call once per run of the layer."""
        import torch  # the name of this class loads without it

        self.trained |= torch.is_grad_enabled()
        if self._in_forward:
            return self._forwards - 1
        self._recomputed[layer] = self._recomputed.get(layer, -1) + 1
        return self._recomputed[layer]

    def _enter(self, *_: Any) -> None:
        self._forwards += 1
        self._in_forward = True

    def _leave(self, *_: Any) -> None:
        self._in_forward = False
