"""Cases of test_lora.py on stand-ins: Apex, which Megatron needs for fused gradients, and TransformerEngine."""

import standins  # noqa: F401, I001 - before Megatron

from typing import Any

import tiny_gpt
import torch
from attach_cases import refusal
from lora_cases import RANK, compared

from moe_rl.megatron import BalancerConfig, attach

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class SharedLowRank(torch.nn.Module):
    """A frozen grouped linear and one adapter for all of its experts, as Megatron-Bridge puts it around."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.to_wrap = linear
        self.linear_in = torch.nn.Parameter(torch.empty(RANK, linear.in_features))
        self.linear_out = torch.nn.Parameter(torch.empty(linear.out_features, RANK))

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        output, bias = self.to_wrap(x, *more)
        return output + x @ self.linear_in.T @ self.linear_out.T, bias


def adapted(gpt: Any, linears: tuple[str, ...]) -> None:
    gpt.requires_grad_(False)
    gpt.embedding.requires_grad_(True)
    for layer in gpt.decoder.layers:
        for name in linears:
            setattr(layer.mlp.experts, name, SharedLowRank(getattr(layer.mlp.experts, name)))


BOTH = ("linear_fc1", "linear_fc2")
GROUPED: dict[str, Any] = {"adapt": adapted, "spec": tiny_gpt.te_spec, "moe_grouped_gemm": True}


def fused_gradients() -> Any:
    """Adapters of plain matrices do not fuse; Megatron's own linears under them are frozen."""
    return compared(("linear_fc2",), gradient_accumulation_fusion=True)


def one_adapter_of_grouped_linears() -> Any:
    return compared(BOTH, **GROUPED)


def one_adapter_reordered_with_overlap() -> Any:
    return compared(BOTH, reorder=True, overlap_grad_reduce=True, bucket_size=2000, **GROUPED)


def one_adapter_recomputed_with_residents() -> Any:
    config = BalancerConfig(policy="moe-rl", objective="imbalance", resident_slots=1)
    return compared(("linear_fc1",), config=config, **RECOMPUTED, **GROUPED)


def refused() -> dict[str, str]:
    """What attach says of adapters that differ between the ranks of an EP group, and of one for every expert."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build(tiny_gpt.te_spec, moe_grouped_gemm=True, adapt=lambda gpt: adapted(gpt, BOTH))
        adapter = run.gpt.decoder.layers[0].mlp.experts.linear_fc1.linear_in
        adapter.data.add_(torch.distributed.get_rank())
        said = {"of ranks": refusal(lambda: attach(run.models, run.optimizer, BalancerConfig()))}
        run = tiny_gpt.build(tiny_gpt.te_spec, moe_grouped_gemm=True, adapt=lambda gpt: adapted(gpt, BOTH))
        for layer in run.gpt.decoder.layers:
            linear = layer.mlp.experts.linear_fc2
            linear.linear_in = torch.nn.Parameter(linear.linear_in.data[None].repeat(tiny_gpt.NUM_EXPERTS // 2, 1, 1))
        return said | {"of experts": refusal(lambda: attach(run.models, run.optimizer, BalancerConfig()))}
