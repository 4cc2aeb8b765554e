"""What adapters train that need no Megatron: tiny models, tokens, skewed routes; and how far two runs are apart.

Every rank has the same model, and other tokens and routes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from moe_rl.core.errors import InvalidInputError

NUM_LAYERS, NUM_EXPERTS, TOP_K, VOCABULARY, BATCH, LENGTH, MICRO_BATCHES = 3, 8, 2, 128, 2, 16, 2
POPULARITY = np.array([0.4, 0.25, 0.15, 0.1, 0.04, 0.03, 0.02, 0.01])
"""Experts 0 .. 3 live on EP rank 0."""
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "intermediate_size": 64, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 8, "intermediate_size": 16},
    "Mixtral": {"num_local_experts": 8, "intermediate_size": 16},
    "GptOss": {"num_local_experts": 8, "intermediate_size": 16, "layer_types": ["full_attention"] * NUM_LAYERS},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_hidden_layers": NUM_LAYERS + 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


# Transformers imports a family when a class of it is first asked for, which takes 3 s of CPU: here, so that the process
# that ranks are forks of does it once, and not every rank of every case.
CLASSES = {
    family: (getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM"))
    for family in FAMILIES
}


def model_of(family: str = "Qwen3Moe", **changes: Any) -> Any:
    torch.manual_seed(0)
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**{**SHAPE, **FAMILIES[family], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    return model


def tokens(step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_seed(step, micro_batch))
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def routes(
    step: int, micro_batch: int, *, layers: int = NUM_LAYERS, unknown: bool = True, even: bool = False
) -> np.ndarray[Any, Any]:
    """[B, S, L, K], the last token of every sequence unknown; of `even` ones every expert gets as many rows."""
    if even:
        ids = np.arange(BATCH * LENGTH * layers * TOP_K).reshape(BATCH, LENGTH, layers, TOP_K) % NUM_EXPERTS
    else:
        draw = np.random.default_rng(_seed(step, micro_batch))
        noise = np.log(POPULARITY) + draw.gumbel(size=(BATCH, LENGTH, layers, NUM_EXPERTS))
        ids = np.argsort(-noise, axis=-1)[..., :TOP_K]
    if unknown:
        ids[:, -1] = -1
    return ids


def micro_batches(step: int = 0, **how: Any) -> list[Any]:
    return [routes(step, m, **how) for m in range(MICRO_BATCHES)]


def difference(plain: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest difference of a tensor, over the largest entry of it."""
    assert [a.shape for a in plain] == [b.shape for b in other] != []
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in zip(plain, other, strict=True))


def said_by(call: Callable[[], Any]) -> str:
    """What a call is refused with; empty where it is not."""
    try:
        call()
    except InvalidInputError as error:
        return str(error)
    return ""


def _seed(step: int, micro_batch: int) -> int:
    return (10 * step + micro_batch) * 100 + dist.get_rank()
