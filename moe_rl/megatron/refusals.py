"""What `attach` refuses by a model's options alone; `moe-rl doctor` reads the same table. Loads no torch.

A kind of option that becomes supported leaves this table, and both say so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An option of Megatron's `TransformerConfig`, what it may be, and why it may be nothing else."""

    option: str
    reason: str
    allowed: tuple[object, ...] = ()
    """Values that are not refused, beside None; empty: everything that is switched on is refused."""

    def sentence(self, value: object) -> str:
        """Return why `value` is refused; empty where it is not."""
        if not self.allowed:
            return f"{self.option} is not supported: {self.reason}." if value else ""
        if value is None or value in self.allowed:
            return ""
        allowed = " or ".join(str(each) for each in self.allowed)
        return f"{self.option} {value} is not supported: {self.reason}; set it to {allowed}."


REFUSALS = (
    Refusal(
        option="moe_token_dispatcher_type",
        allowed=("alltoall", "allgather"),
        reason="a plan has not been tested with it",
    ),
    Refusal(option="context_parallel_size", allowed=(1,), reason="context parallelism has not been tested with plans"),
    Refusal(
        option="cuda_graph_impl",
        allowed=("none",),
        reason="a plan changes what the layer does from one micro-batch to the next",
    ),
    Refusal(
        option="gradient_accumulation_fusion",
        reason="it writes weight gradients into main_grad, which replicas do not have",
    ),
    Refusal(
        option="virtual_pipeline_model_parallel_size",
        reason="its order of micro-batches has not been tested with plans",
    ),
    Refusal(option="mtp_num_layers", reason="layers for multi-token prediction have no place in a routing trace"),
    Refusal(option="moe_latent_size", reason="latent projections have not been tested with plans"),
    Refusal(option="moe_expert_capacity_factor", reason="dropped tokens have not been tested with plans"),
    Refusal(option="overlap_moe_expert_parallel_comm", reason="it runs two micro-batches of a layer at a time"),
    Refusal(
        option="moe_shared_expert_overlap", reason="it runs shared experts inside the dispatcher that a plan replaces"
    ),
    Refusal(
        option="moe_pad_expert_input_to_capacity",
        reason="a plan sends every expert's tokens to several slots of unequal size",
    ),
    Refusal(
        option="moe_router_padding_for_quantization",
        reason="it adds rows to the routing map after the plan has split it",
    ),
    Refusal(option="moe_permute_fusion", reason="its row order is TransformerEngine's own"),
    Refusal(option="fp8", reason="the replicas of SequentialMLP are not quantized"),
    Refusal(option="fp4", reason="the replicas of SequentialMLP are not quantized"),
    Refusal(option="delay_wgrad_compute", reason="replica gradients must be complete when the experts' backward ends"),
)


def refused(value_of: Callable[[str], object]) -> Iterator[tuple[str, str]]:
    """Yield (option, sentence) for every option whose value `attach` refuses; `value_of` gives None where not set."""
    for refusal in REFUSALS:
        if sentence := refusal.sentence(value_of(refusal.option)):
            yield refusal.option, sentence
