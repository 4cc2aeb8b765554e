"""What `attach` refuses by a model's options alone; `moe-rl doctor` reads the same tables. Loads no torch.

A kind of option that becomes supported leaves its table, and both say so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An option of Megatron's, what it may be, and why it may be nothing else."""

    option: str
    reason: str = ""
    allowed: tuple[object, ...] = ()
    """Values that are not refused, beside None; empty: everything that is switched on is refused."""
    never_run: str = ""
    """Why values that are not allowed are refused unless `experimental`: written, and never run with what it is for."""

    def sentence(self, value: object, *, experimental: bool = False) -> str:
        """Return why `value` is refused; empty where it is not."""
        if value is None or (value in self.allowed if self.allowed else not value) or (self.never_run and experimental):
            return ""
        name = f"{self.option} {value}" if self.allowed else self.option
        if self.never_run:
            return experimental_sentence(name, self.never_run)
        remedy = f"; set it to {' or '.join(str(each) for each in self.allowed)}" if self.allowed else ""
        return f"{name} is not supported: {self.reason}{remedy}."


def experimental_sentence(name: str, never_run: str) -> str:
    """Return why `name`, which was never run with what it is for, is refused unless it is asked for."""
    return f"{name} is experimental: {never_run}. BalancerConfig(experimental=True) allows it."


REFUSALS = (
    Refusal(
        option="moe_token_dispatcher_type",
        allowed=("alltoall", "allgather"),
        never_run="the dispatchers of DeepEP and HybridEP need their GPU packages: the map over slots has never "
        "reached them",
    ),
    Refusal(
        option="cuda_graph_impl",
        allowed=("none",),
        reason="a plan changes what the layer does from one micro-batch to the next",
    ),
    Refusal(
        option="gradient_accumulation_fusion",
        never_run="experts='grouped' adds weight gradients to main_grad by itself, but the rest of the model needs "
        "Apex's CUDA extension for it, with which nothing has been run",
    ),
    Refusal(
        option="expert_tensor_parallel_size",
        allowed=(1,),
        reason="a plan counts and sends whole experts, of which every rank would hold a part",
    ),
    Refusal(
        option="mtp_num_layers", reason="the MoE layers of multi-token prediction have no place in a routing trace"
    ),
    Refusal(
        option="moe_latent_size", reason="latent projections need TransformerEngine, with which nothing has been run"
    ),
    Refusal(option="overlap_moe_expert_parallel_comm", reason="it runs two micro-batches of a layer at a time"),
    Refusal(
        option="moe_pad_expert_input_to_capacity",
        reason="it gives every slot the same number of rows, and a plan does not",
    ),
    Refusal(
        option="moe_router_padding_for_quantization",
        reason="it adds rows to the routing map after the plan has split it",
    ),
    Refusal(option="fp8", reason="replicas would not be quantized; experts='grouped' has FP8 recipes of its own"),
    Refusal(option="fp4", reason="replicas would not be quantized"),
    Refusal(option="delay_wgrad_compute", reason="replica gradients must be complete when the experts' backward ends"),
)
"""Options of `TransformerConfig`."""

DDP_REFUSALS = (
    Refusal(option="use_megatron_fsdp", reason="it cuts the experts' parameters, and replicas need whole ones"),
)
"""Options of `DistributedDataParallelConfig`."""


def refused(
    value_of: Callable[[str], object], *, experimental: bool = False, table: tuple[Refusal, ...] = REFUSALS
) -> Iterator[tuple[str, str]]:
    """Yield (option, sentence) for every option whose value `attach` refuses; `value_of` gives None where not set."""
    for refusal in table:
        if sentence := refusal.sentence(value_of(refusal.option), experimental=experimental):
            yield refusal.option, sentence
