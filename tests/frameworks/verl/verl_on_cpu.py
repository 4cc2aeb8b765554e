"""verl 0.9.1's real MegatronEngine on CPU: what of it names a GPU or TransformerEngine, replaced from outside.

Import before verl is: the platform must be registered before verl first asks for one.
"""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
import types
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", TOKENIZERS_PARALLELISM="false")

import numpy as np
import torch
import verl  # noqa: F401 - registers what the platform below relies on
from tensordict import TensorDict
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import tensordict_utils

from moe_rl.megatron import Balancer, PassSource
from moe_rl.megatron.on_cpu import cpu_megatron

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron"))

NUM_LAYERS, NUM_EXPERTS, TOP_K, VOCABULARY = 3, 8, 2, 128
POPULARITY = np.array([0.4, 0.25, 0.15, 0.1, 0.04, 0.03, 0.02, 0.01])
"""Experts 0 .. 3 live on EP rank 0."""
FUSED = importlib.util.find_spec("transformer_engine") is not None
"""Whether the stand-in of TransformerEngine is there."""


class _Module(types.ModuleType):
    """torch.cpu with what verl asks of a device's module."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name == "get_device_name":
            return lambda *_: "CPU"
        if name == "mem_get_info":
            return lambda *_, **__: (0, 0)
        if "memory" in name:
            return lambda *_, **__: 0
        if name in ("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "synchronize", "set_device"):
            return lambda *_, **__: None
        raise AttributeError(name)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = _Module("verl_cpu")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None: ...

    def synchronize(self, device_index: Any = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


impl = importlib.import_module("verl.workers.engine.megatron.transformer_impl")  # asks for the platform
engine_utils = importlib.import_module("verl.workers.engine.megatron.utils")
MBRIDGES_OWN: Any = None
"""What loads Hugging Face's weights; `verl_on_cpu` leaves it out where a model is built."""


@contextlib.contextmanager
def verl_on_cpu() -> Iterator[None]:
    """Megatron on CPU, with attention that takes packed sequences; its own modules, or the stand-ins'."""
    global MBRIDGES_OWN
    with cpu_megatron():
        import mbridge.core.llm_bridge as bridge
        import verl.models.mcore.mbridge  # noqa: F401
        from mbridge.core.bridge import Bridge
        from megatron.core.models.gpt import gpt_layer_specs
        from packed_attention import PackedAttention
        from tiny_gpt import SequenceParallelNorm

        original = gpt_layer_specs.get_gpt_decoder_block_spec

        def spec(config: Any, use_transformer_engine: bool, **kwargs: Any) -> Any:
            block = original(config, use_transformer_engine=FUSED, **kwargs)
            for layer in block.layer_specs:
                attention = layer.submodules.self_attention.submodules
                attention.core_attention = PackedAttention
                if config.sequence_parallel and not FUSED:
                    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
                    attention.q_layernorm = attention.k_layernorm = block.layer_norm = SequenceParallelNorm
            return block

        bridge.get_gpt_decoder_block_spec = spec
        # verl after 0.9.1 seeds Megatron's generators of dropout for CUDA and NPU alone, not for this platform.
        if hasattr(engine_utils, "is_cuda_available"):
            engine_utils.is_cuda_available = True
        MBRIDGES_OWN = MBRIDGES_OWN or Bridge.load_weights
        # mbridge knows the weights of TEGroupedMLP only, by name; `fill` gives the model its weights instead.
        with patch.object(Bridge, "load_weights", lambda *_, **__: None):
            yield


TRANSFORMER = {
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "use_cpu_initialization": True,
    "perform_initialization": True,
}
"""`override_transformer_config` without what a GPU or TransformerEngine does."""


def tiny_model(*, num_layers: int = NUM_LAYERS, dense: bool = False, **sizes: int) -> str:
    """Folder with the configuration of a tiny Qwen3-MoE (or Qwen3); `sizes` by Transformers' names."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    path = tempfile.mkdtemp()
    words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(path)
    experts = {
        "moe_intermediate_size": 16,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "architectures": ["Qwen3ForCausalLM" if dense else "Qwen3MoeForCausalLM"],
        **({} if dense else experts),
        **sizes,
    }
    (Qwen3Config if dense else Qwen3MoeConfig)(**given).save_pretrained(path)
    return path


def engine(
    *,
    mode: str = "R3",
    num_layers: int = NUM_LAYERS,
    dense: bool = False,
    lr: float = 1e-3,
    common: float = 0.0,
    model: Mapping[str, int] | None = None,
    transformer: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    **engine_config: Any,
) -> Any:
    """A tiny Qwen3-MoE (or Qwen3) in verl's engine, initialized, with weights that depend on their names alone.

    `common` is what all embeddings have in common, and what routers like in some experts, so that these take most.
    `model`: other sizes, by Transformers' names; `transformer`: more of verl's `override_transformer_config`;
    `checkpoint`: of its `CheckpointConfig`.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine import EngineRegistry

    path = tiny_model(num_layers=num_layers, dense=dense, **(model or {}))
    model_config = HFModelConfig(path=path, load_tokenizer=False)
    model_config.tokenizer = SimpleNamespace(pad_token_id=0)
    torch.manual_seed(3)
    built = EngineRegistry.get_engine_cls("language_model", "megatron")(
        model_config,
        McoreEngineConfig(
            expert_model_parallel_size=engine_config.pop("ep_size", 2),
            expert_tensor_parallel_size=engine_config.pop("expert_tensor", 1),
            vanilla_mbridge=True,
            use_remove_padding=engine_config.pop("use_remove_padding", True),
            use_dynamic_bsz=False,
            router_replay=EngineRouterReplayConfig(mode=mode),
            override_transformer_config={**TRANSFORMER, **(transformer or {})},
            **engine_config,
        ),
        McoreOptimizerConfig(lr=lr, total_training_steps=10, lr_warmup_steps=0, clip_grad=1.0),
        CheckpointConfig(**(checkpoint or {})),
    )
    built.initialize()
    away = built.is_param_offload_enabled
    with built.train_mode() if away else contextlib.nullcontext():
        fill(built, common)
    return built


GROUPED = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


@contextlib.contextmanager
def named_as_fused(built: Any) -> Iterator[None]:
    """The weights under the names that TransformerEngine's modules give them, which mbridge knows."""
    model = built.module[0].module.module
    named, state = model.named_parameters, model.state_dict

    def fused(name: str) -> str:
        name = GROUPED.sub(r"experts.\2.weight\1", name)
        return name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")

    with (
        patch.object(model, "named_parameters", lambda: ((fused(name), each) for name, each in named())),
        patch.object(model, "state_dict", lambda **_: {fused(name): each for name, each in state().items()}),
    ):
        yield


@contextlib.contextmanager
def as_hugging_face_has_it(built: Any) -> Iterator[None]:
    """verl may save and load the weights in Hugging Face's format, by mbridge's own code."""
    from mbridge.core.bridge import Bridge

    assert MBRIDGES_OWN is not None
    built.bridge.safetensor_io = built.bridge._get_safetensor_io(built.model_config.local_path)
    without_tokenizer = patch.object(built.checkpoint_mananager, "processing_class", None)
    with named_as_fused(built), without_tokenizer, patch.object(Bridge, "load_weights", MBRIDGES_OWN):
        yield


@contextlib.contextmanager
def host_beside_device() -> Iterator[None]:
    """Lets verl put away what a device "cuda" would hold: it frees and fills storages for real."""
    empty = torch.empty

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    base = importlib.import_module("verl.workers.engine.base")
    with (
        patch.object(impl, "get_device_name", lambda: "cuda"),
        patch.object(base, "get_device_name", lambda: "cuda"),
        patch.object(torch, "empty", pageable),
    ):
        yield


def noting_prepared(prepared: list[bool]) -> Any:
    """Notes of every pass that is planned whether it had been prepared before it came."""
    begin = Balancer.begin_pass

    def begin_pass(self: Balancer, source: PassSource | None = None, *, forward_only: bool = False) -> Any:
        prepared.append(source is None)
        return begin(self, source, forward_only=forward_only)

    return patch.object(Balancer, "begin_pass", begin_pass)


def fill(built: Any, common: float = 0.0) -> None:
    from megatron.core import parallel_state

    rank = parallel_state.get_expert_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in built.module[0].named_parameters():
            seed = zlib.crc32(f"{name}{rank if 'experts' in name else ''}".encode())
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.05
            parameter.copy_(drawn if parameter.ndim > 1 else torch.ones_like(parameter))
            if "word_embeddings" in name:
                parameter += 0.1 * common
            if common and name.endswith("router.weight"):
                liking = torch.from_numpy(POPULARITY).log() / len(parameter[0])
                parameter += common * (liking - liking.mean())[:, None].to(parameter.dtype)
    built.optimizer.reload_model_params()


def batch(
    step: int,
    sizes: tuple[int, ...] = (9, 14, 7, 12),
    *,
    routes: bool = True,
    num_layers: int = NUM_LAYERS,
    **settings: Any,
) -> TensorDict:
    """Sequences of these lengths with skewed routes of all rows but the last one, which no engine returns."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    generator, draw = torch.Generator().manual_seed(1000 * step + rank), np.random.default_rng(7 + 31 * step + rank)

    def nested(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def chosen(rows: int) -> torch.Tensor:
        ids = [
            [draw.choice(NUM_EXPERTS, TOP_K, replace=False, p=POPULARITY) for _ in range(num_layers)]
            for _ in range(rows)
        ]
        return torch.from_numpy(np.array(ids)).to(torch.int16)

    responses = torch.zeros(len(sizes), max(sizes), dtype=torch.int64)
    for index, size in enumerate(sizes):
        responses[index, : size // 2] = 1
    content: dict[str, Any] = {
        "input_ids": nested([torch.randint(1, VOCABULARY, (size,), generator=generator) for size in sizes]),
        "loss_mask": nested([torch.ones(size) for size in sizes]),
        "response_mask": responses,
        "temperature": torch.ones(len(sizes)),
    }
    if routes:
        content["routed_experts"] = nested([chosen(size - 1) for size in sizes])
    data = TensorDict(content, batch_size=[len(sizes)])
    given = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "enable_routing_replay": True}
    tensordict_utils.assign_non_tensor(data, **{**given, "global_batch_size": 2 * len(sizes), **settings})
    return data


def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, float]]:
    """Summed over tokens, so that it does not depend on how they are cut into micro-batches."""
    value = -model_output["log_probs"].values().float().sum() / 100
    return value, {"loss": value.detach().item()}
