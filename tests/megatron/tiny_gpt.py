"""A tiny GPT-MoE with Megatron DDP and distributed optimizer, its data, and a training loop; run on every rank.

Weights are drawn from a generator seeded by the parameter's global name, so that experts differ from each other and
every EP size starts from the same model.
"""

import contextlib
import functools
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from moe_rl.megatron.on_cpu import cpu_megatron

# On CPU the weights' generator is the CPU's own, and Megatron says so once per layer.
logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)

DEVICE = torch.device(os.environ.get("MOE_RL_TEST_DEVICE", "cpu"))
"""Of model and data. Numbers are drawn on the host, so that they are the same on every device."""
VOCABULARY = 64
SEQUENCE = 16
BATCH = 2
NUM_LAYERS = 2
NUM_EXPERTS = 8


@contextlib.contextmanager
def _gpu_megatron() -> Iterator[None]:
    """Megatron on a GPU without TransformerEngine: megatron-core 0.16.1's router asks for a name that is then missing.

    None makes it take its branch of plain torch, as `cpu_megatron` does.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]  # that it is missing is the fault
    yield


@contextlib.contextmanager
def parallel(
    ep_size: int,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int | None = None,
    context: int = 1,
    expert_tensor: int = 1,
) -> Iterator[None]:
    """Model-parallel groups with these sizes over all ranks, torn down at the end."""
    with cpu_megatron() if DEVICE.type == "cpu" else _gpu_megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual,
            context_parallel_size=context,
            expert_model_parallel_size=ep_size,
            expert_tensor_parallel_size=expert_tensor,
        )
        try:
            yield
        finally:
            RouterReplay.clear_global_router_replay_instances()
            parallel_state.destroy_model_parallel()


def config(**changes: Any) -> TransformerConfig:
    values = {
        "num_layers": NUM_LAYERS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 48,
        "num_moe_experts": NUM_EXPERTS,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_enable_routing_replay": True,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "sequence_parallel": parallel_state.get_tensor_model_parallel_world_size() > 1,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "pipeline_dtype": torch.float32,
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        **changes,
    }
    return TransformerConfig(**values)


@dataclass
class Run:
    """One model in training."""

    config: TransformerConfig
    models: list[DistributedDataParallel]
    """One per virtual pipeline stage of this rank."""
    optimizer: Any

    @property
    def model(self) -> DistributedDataParallel:
        """The only chunk, or the first."""
        return self.models[0]

    @property
    def gpt(self) -> GPTModel:
        return gpt_of(self.model)


def gpt_of(module: Any) -> GPTModel:
    """The model inside its wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def build(
    spec_of: Callable[[Any], Any] = lambda spec: spec,
    *,
    overlap_grad_reduce: bool = False,
    bucket_size: int | None = None,
    overlap_param_gather: bool = False,
    grad_reduce_in_fp32: bool = True,
    position_embedding_type: str = "rope",
    adam: dict[str, Any] | None = None,
    adapt: Callable[[GPTModel], None] = lambda gpt: None,
    **changes: Any,
) -> Run:
    """Build model, DDP and optimizer; two calls in one process give equal models.

    `bucket_size` is the least number of parameters that DDP reduces at a time; None: all at once. `adam` are more
    options of the optimizer. `adapt` changes a model before its weights are drawn.
    """
    RouterReplay.clear_global_router_replay_instances()
    cfg = config(**changes)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(123)
    spec = get_gpt_layer_local_spec(num_experts=cfg.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm")
    models = []
    for stage in range(cfg.virtual_pipeline_model_parallel_size or 1):
        virtual = {} if cfg.virtual_pipeline_model_parallel_size is None else {"vp_stage": stage}
        gpt = GPTModel(
            config=cfg,
            transformer_layer_spec=with_parallel_norms(spec_of(spec), cfg) if cfg.sequence_parallel else spec_of(spec),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            position_embedding_type=position_embedding_type,
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp_spec(cfg, spec_of(spec), **virtual),
            **virtual,
        )
        adapt(gpt)
        gpt.to(DEVICE)  # torch's own norms are made on the host
        draw_weights(gpt)
        module = Float16Module(cfg, gpt) if cfg.bf16 else gpt
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap_grad_reduce,
            bucket_size=bucket_size,
            overlap_param_gather=overlap_param_gather,
            grad_reduce_in_fp32=grad_reduce_in_fp32,
            delay_wgrad_compute=cfg.delay_wgrad_compute,
        )
        model = DistributedDataParallel(cfg, ddp, module, disable_bucketing=stage > 0)
        model.broadcast_params()
        models.append(model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            clip_grad=1.0,
            weight_decay=0.01,
            use_distributed_optimizer=True,
            bf16=cfg.bf16,
            **(adam or {}),
        ),
        models,
    )
    cfg.finalize_model_grads_func = finalize_model_grads
    cfg.grad_scale_func = optimizer.scale_loss
    return Run(cfg, models, optimizer)


def te_spec(_: Any) -> ModuleSpec:
    """Megatron's layer of TransformerEngine's modules, in a launch with the stand-ins; with TEGroupedMLP as experts."""
    return get_gpt_layer_with_transformer_engine_spec(num_experts=NUM_EXPERTS, moe_grouped_gemm=True)


def mtp_spec(cfg: TransformerConfig, layer: ModuleSpec, **virtual: Any) -> Any:
    """Layers of multi-token prediction like the model's own; None without and in stages before the last."""
    if not (cfg.mtp_num_layers and parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual)):
        return None
    return get_gpt_mtp_block_spec(cfg, layer, use_transformer_engine=cfg.moe_grouped_gemm, **virtual)


class SequenceParallelNorm(torch.nn.Module):
    """RMSNorm whose weight gradient Megatron sums over the tensor-parallel ranks; torch's own norm is refused there."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def with_parallel_norms(spec: Any, config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layer spec as a block whose norms accept sequence parallelism."""
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SequenceParallelNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=SequenceParallelNorm)


def draw_weights(gpt: GPTModel) -> None:
    """Overwrite every matrix with numbers that depend on its global name alone."""
    for name, parameter in gpt.named_parameters():
        if parameter.dim() < 2:
            continue
        parts = name.split(".")
        layer = gpt.decoder.layers[int(parts[2])] if parts[:2] == ["decoder", "layers"] else None
        if layer is not None:
            parts[2] = str(layer.layer_number - 1)
        if layer is not None and "experts" in parts and parts[-1].startswith("weight") and parts[-1] != "weight":
            # TEGroupedMLP's experts.linear_fc1.weight3 is SequentialMLP's experts.local_experts.3.linear_fc1.weight.
            parts[-2:] = ["local_experts", parts[-1].removeprefix("weight"), parts[-2], "weight"]
        if layer is not None and "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(layer.mlp.local_expert_indices[int(parts[at])])
            if parallel_state.get_expert_tensor_parallel_world_size() > 1:  # or every part would hold the same numbers
                parts.append(str(parallel_state.get_expert_tensor_parallel_rank()))
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)


def tokens_of(step: int, micro_batch: int, length: int = SEQUENCE) -> torch.Tensor:
    """[B, length + 1] token ids of this data-parallel rank."""
    seed = (step * 100 + micro_batch) * 100 + parallel_state.get_data_parallel_rank()
    return torch.randint(0, VOCABULARY, (BATCH, length + 1), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def skewed_routes(
    step: int, micro_batch: int, *, top_k: int = 2, num_experts: int = NUM_EXPERTS, num_layers: int = NUM_LAYERS
) -> torch.Tensor:
    """[S*B, L, K] routes of this rank in Megatron's row order; a few experts take most, others per micro-batch."""
    seed = (step * 100 + micro_batch) * 100 + parallel_state.get_data_parallel_rank() + 7
    generator = torch.Generator().manual_seed(seed)
    shared = torch.Generator().manual_seed(step * 10 + micro_batch)
    weights = torch.rand((num_layers, num_experts), generator=shared) ** 4
    rows = (weights + 1e-3)[None].expand(SEQUENCE * BATCH, -1, -1).reshape(-1, num_experts)
    chosen = torch.multinomial(rows, top_k, generator=generator)
    return chosen.view(SEQUENCE * BATCH, num_layers, top_k).to(DEVICE)


def history() -> dict[str, list[float]]:
    """Losses and gradient norms, one per step."""
    return {"loss": [], "grad_norm": []}


def held_rows(routes: torch.Tensor) -> torch.Tensor:
    """The rows [N / (TP * CP), L, K] that this rank holds: its chunk of the sequence."""
    routes = routes.chunk(parallel_state.get_context_parallel_world_size())[parallel_state.get_context_parallel_rank()]
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return routes.chunk(size)[rank]


def replay(gpt: GPTModel, routes: torch.Tensor) -> None:
    """Make the next forward take these routes [N, L, K]."""
    routes = held_rows(routes)
    for layer in gpt.decoder.layers:
        replayed = layer.mlp.router.router_replay
        replayed.set_target_indices(routes[:, layer.layer_number - 1].contiguous())
        replayed.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def forward_step(
    run: Run, routes: list[torch.Tensor], data: Iterator[tuple[int, torch.Tensor]], model: Any, **how: bool
) -> Any:
    """With `return_schedule_plan` what Megatron's combined 1F1B runs in the model's place."""
    micro_batch, tokens = next(data)
    gpt = gpt_of(model)
    replay(gpt, routes[micro_batch])
    context, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    inputs, labels = (t.chunk(context, dim=1)[rank].contiguous() for t in (tokens[:, :-1], tokens[:, 1:]))
    size = inputs.shape[1]
    mask = torch.triu(torch.ones(size, size, dtype=torch.bool, device=DEVICE), 1)[None, None]
    positions = torch.arange(size, device=DEVICE).expand(tokens.shape[0], size)
    planned = how.get("return_schedule_plan", False)
    out = (gpt.build_schedule_plan if planned else model)(inputs, positions, mask, labels=labels)

    def recompute_replays(gradient: torch.Tensor) -> None:
        for layer in gpt.decoder.layers:
            layer.mlp.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    if not planned and out.requires_grad and run.config.recompute_granularity:
        out.register_hook(recompute_replays)

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return out, mean


def forward_backward(run: Run, step: int, routes: list[torch.Tensor], *, forward_only: bool = False) -> float:
    """One pass over the micro-batches through Megatron's schedule; returns the mean loss over all ranks."""
    RouterReplay.clear_global_indices()
    data = [iter([(m, tokens_of(step, m, len(r) // BATCH)) for m, r in enumerate(routes)]) for _ in run.models]
    reduced = get_forward_backward_func()(
        forward_step_func=functools.partial(forward_step, run, routes),
        data_iterator=data if len(data) > 1 else data[0],
        model=run.models,
        num_microbatches=len(routes),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    loss = torch.stack([item["loss"] for item in reduced]).mean() if reduced else torch.zeros((), device=DEVICE)
    dist.all_reduce(loss)
    return float(loss) * parallel_state.get_pipeline_model_parallel_world_size() / dist.get_world_size()


def update(run: Run, step: int, routes: list[torch.Tensor], curve: dict[str, list[float]]) -> None:
    """One optimizer step."""
    for model in run.models:
        model.zero_grad_buffer()
    run.optimizer.zero_grad()
    curve["loss"].append(forward_backward(run, step, routes))
    ok, grad_norm, _ = run.optimizer.step()
    if not ok:
        raise RuntimeError("the optimizer skipped a step")
    curve["grad_norm"].append(float(grad_norm))


def train(run: Run, *, steps: int, micro_batches: int, **shape: int) -> dict[str, list[float]]:
    """Train without moe_rl."""
    curve = history()
    for step in range(steps):
        update(run, step, [skewed_routes(step, m, **shape) for m in range(micro_batches)], curve)
    return curve
