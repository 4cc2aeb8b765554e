"""What `attach` refuses by a model's options alone; `moe-rl doctor` reads the same tables. Loads no torch.

A kind of option that becomes supported leaves its table, and both say so.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An option of Megatron's, what it may be, and why it may be nothing else."""

    option: str
    reason: str = ""
    allowed: tuple[object, ...] = ()
    """Values that are not refused, beside None; empty: everything that is switched on is refused."""
    when: Mapping[str, object] = field(default_factory=dict)
    """Values of other options with which alone it is refused; True and False: switched on and off."""
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
        allowed=("alltoall", "allgather", "flex"),
        reason="slots have not reached it",
    ),
    Refusal(
        option="cuda_graph_impl",
        allowed=("none", "transformer_engine"),
        reason="a plan changes what the layer does from one micro-batch to the next",
    ),
    Refusal(
        option="cuda_graph_impl",
        allowed=("none", "local"),
        never_run="graphs without MoE layers (cuda_graph_scope attn, mlp or mamba, nothing else) need a GPU",
    ),
    Refusal(
        option="expert_tensor_parallel_size",
        allowed=(1,),
        reason="a plan counts and sends whole experts, of which every rank would hold a part",
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
    Refusal(
        option="fp8_recipe",
        when={"fp8": True},
        allowed=("blockwise", "tensorwise", "mxfp8"),
        reason="its scales are reduced over the modules that ran, and ranks without replicas run fewer",
    ),
    Refusal(
        option="fp8_recipe",
        when={"fp8": True},
        allowed=("blockwise", "delayed"),
        never_run="of TransformerEngine's recipes blockwise alone was run, on a CPU stand-in",
    ),
    Refusal(
        option="fp8_param",
        reason="a replica is a copy of a parameter in a flat buffer, which a quantized parameter does not go into",
    ),
    Refusal(option="fp4", reason="replicas would not be quantized"),
    Refusal(option="fp8", when={"moe_grouped_gemm": False}, reason="replicas of SequentialMLP would not be quantized"),
    Refusal(
        option="moe_apply_probs_on_input",
        when={"moe_grouped_gemm": False},
        reason="replicas of SequentialMLP weigh their output",
    ),
    Refusal(
        option="overlap_p2p_comm",
        allowed=(True,),
        when={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": True},
        reason="virtual stages over two pipeline ranks send activations and gradients to one peer, and in batches "
        "Megatron mixes them up",
    ),
    Refusal(option="delay_wgrad_compute", reason="replica gradients must be complete when the experts' backward ends"),
    # Of megatron-core 0.17 and later; `options.py` says which version brought which.
    Refusal(
        option="overlap_dispatch_backward_with_experts_wgrad",
        reason="replica gradients must be complete when the experts' backward ends",
    ),
    Refusal(
        option="use_transformer_engine_op_fuser",
        reason="its fused operators hold the experts' weights, and what stands in a replica slot does not reach them",
    ),
    Refusal(option="moe_single_grouped_weight", reason="one parameter holds all experts of a rank"),
    Refusal(option="moe_single_grouped_bias", reason="one parameter holds all experts of a rank"),
    Refusal(
        option="moe_expert_rank_capacity_factor",
        reason="it drops tokens by the load of a rank, which a plan changes",
    ),
    Refusal(
        option="moe_flex_dispatcher_backend",
        allowed=("deepep", "hybridep"),
        never_run="slots have not reached any other backend",
    ),
    Refusal(
        option="moe_permute_fusion_into_hybridep",
        never_run="the rows of slots were permuted outside HybridEP alone, on a CPU stand-in",
    ),
    Refusal(
        option="expert_gtp_weight_remat_size",
        allowed=(1,),
        reason="it cuts the experts' parameters, and replicas need whole ones",
    ),
    Refusal(
        option="expert_tensor_parallel_num_weight_shards",
        reason="it cuts the experts' parameters, and replicas need whole ones",
    ),
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
        sentence = refusal.sentence(value_of(refusal.option), experimental=experimental)
        if sentence and all(holds(value_of(option), wanted) for option, wanted in refusal.when.items()):
            yield refusal.option, sentence


def holds(value: object, wanted: object) -> bool:
    """Return whether a value is the wanted one; True and False want it switched on and off, and None is neither."""
    return value is not None and (bool(value) if isinstance(wanted, bool) else value) == wanted
