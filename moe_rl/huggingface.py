"""Read the MoE shape of a model from its Hugging Face `config.json`, without transformers.

Each family says in its own way which layers are MoE layers and what a key means, so the families are listed; a family
that is not listed is refused, not guessed. Source: huggingface/transformers:src/transformers/models/<family>.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.core.model import MoeModelSpec

Config = Mapping[str, Any]
MoeLayers = Callable[[Config, int], list[int]]

# The first key that is there counts.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_k"),
    "hidden_size": ("hidden_size",),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "num_attention_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
}

# These use `sliding_window`, where it is set, in every layer; the other families list such layers in `layer_types`.
ALWAYS_WINDOWED = ("mixtral", "phimoe")

# Linear attention is priced as a window of the 64 tokens in which Gated DeltaNet works.
LINEAR_WINDOW = 64
LINEAR_FAMILIES = ("qwen3_next", "qwen3_5_moe_text")
LINEAR_NOTE = (
    "sliding_window: assumed. Linear attention (Gated DeltaNet) works in chunks of 64 tokens, so its time is "
    "predicted as that of a 64-token window"
)
HYBRID = "nemotron_h"
HYBRID_NOTE = (
    "sliding_window: assumed. The time of a Mamba layer is predicted as that of attention with a 64-token window. "
    "A layer here is a mixer and the experts or MLP after it, which the model counts as two layers"
)
SPARSE_NOTE = (
    "sliding_window: assumed. The time of sparse attention to index_topk tokens is predicted as that of a window "
    "of as many tokens. The time of its indexer is left out"
)


def _every_layer(_: Config, num_layers: int) -> list[int]:
    return list(range(num_layers))


def _sparse_step(config: Config, num_layers: int) -> list[int]:
    step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
    return [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]


def _after_dense(config: Config, num_layers: int) -> list[int]:
    if config.get("mlp_layer_types"):
        return [layer for layer, kind in enumerate(config["mlp_layer_types"][:num_layers]) if kind == "sparse"]
    first_layer, every = int(config.get("first_k_dense_replace") or 0), int(config.get("moe_layer_freq") or 1)
    return [layer for layer in range(first_layer, num_layers) if layer % every == 0]


def _interval(config: Config, num_layers: int) -> list[int]:
    first_layer, every = int(config.get("moe_layer_start_index", 1)), int(config.get("moe_layer_interval", 1))
    last_layer = int(config.get("moe_layer_end_index", -1))
    if last_layer == -1:
        last_layer = num_layers - 1
    return [layer for layer in range(num_layers) if first_layer <= layer <= last_layer and (layer + 1) % every == 0]


def _mixers(config: Config, _: int) -> list[int]:
    """Return which mixers (Mamba M, attention *) have experts E behind them."""
    behind = re.findall(r"[M*]([E-]?)", str(config.get("hybrid_override_pattern", "")))
    return [layer for layer, block in enumerate(behind) if block == "E"]


# By the rule for their MoE layers. All but Nemotron-H's have gated experts (gate, up, down).
_FAMILIES_OF: Mapping[MoeLayers, tuple[str, ...]] = {
    _sparse_step: ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", *LINEAR_FAMILIES),
    _after_dense: (
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "dots1",
    ),
    _interval: ("ernie4_5_moe",),
    _every_layer: ("gpt_oss", "mixtral", "minimax_m2", "olmoe", "flex_olmo", "phimoe"),
    _mixers: (HYBRID,),
}  # fmt: skip
# The rule for the MoE layers of a `model_type`.
FAMILIES = {family: rule for rule, families in _FAMILIES_OF.items() for family in families}


def read_hugging_face_config(path: Path) -> tuple[MoeModelSpec, tuple[str, ...]]:
    """Return the model of a config.json and sentences about assumed values.

    Raises `InvalidInputError` for a missing file, a family that is not listed, and a missing key.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"there is no file {path}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read as a config.json: {error}.") from error
    require(isinstance(config, dict), f"{path} must contain a JSON object.")
    return model_of_config(config, where=path)


def model_of_config(config: Config, *, where: Path | str) -> tuple[MoeModelSpec, tuple[str, ...]]:
    """Return the same for a configuration that is loaded; `where` it is from stands in the messages."""
    config = config.get("text_config", config)
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise InvalidInputError(
            f"{where}: moe_rl does not know which layers are MoE layers in model_type "
            f"{family!r}.{nearest_name(family, FAMILIES)} Alternatively, use --model from-trace with "
            "--hidden-size and --moe-ffn-hidden-size."
        )
    path = Path(where)

    def size(*keys: str) -> int:
        """Return the first of these keys that is set, 0 where none is."""
        for key in keys:
            if config.get(key):
                return int(config[key])
        return 0

    values: dict[str, Any] = {field: _number(config, keys, path) for field, keys in ALIASES.items()}
    moe_layers = FAMILIES[family](config, values["num_layers"])
    heads, latent = values["num_attention_heads"], size("kv_lora_rank")
    # Latent attention caches a low-rank product of keys and values, and beside it one rotary key for all heads.
    rotary = 0
    if latent:
        rotary = size("qk_rope_head_dim")
    has_dense_layers = len(moe_layers) < values["num_layers"]
    if family in LINEAR_FAMILIES:
        linear = _linear_layers(config, values["num_layers"])
    else:
        linear = 0
    if family == HYBRID:
        pattern = str(config.get("hybrid_override_pattern", ""))
        has_experts = len(moe_layers) > 0
        require(has_experts, f"{path}: in hybrid_override_pattern {pattern!r}, no mixer is followed by experts.")
        # A block of the pattern is a mixer or an MLP: together they are what other families count as one layer.
        values["num_layers"], linear = pattern.count("M") + pattern.count("*"), pattern.count("M")
    sparse = 0
    if family == "deepseek_v32":
        sparse = size("index_topk")
    everywhere = 0
    if sparse:
        everywhere = values["num_layers"]
    windowed = linear or everywhere or _sliding_window_layers(config, family, values["num_layers"])
    if linear:
        window = LINEAR_WINDOW
    else:
        window = sparse or size("sliding_window")
    groups, expert_width = size("n_group") or 1, values["moe_ffn_hidden_size"]
    if latent:
        # Training expands latent attention's keys and values for every head.
        query_groups, query_width, value_width = heads, size("q_lora_rank"), size("v_head_dim")
    else:
        query_groups, query_width, value_width = size("num_key_value_heads") or heads, 0, size("head_dim")
    spec = MoeModelSpec(
        name=str(config.get("_name_or_path") or path.resolve().parent.name or family),
        moe_layer_ids=tuple(moe_layers),
        num_query_groups=query_groups,
        kv_channels=value_width or values["hidden_size"] // heads,
        latent_rotary_width=rotary,
        latent_query_width=query_width,
        latent_cache_width=latent + rotary,
        activation={"gpt_oss": "swiglu_oai", HYBRID: "relu2"}.get(family, "swiglu"),
        num_expert_groups=groups,
        expert_group_top_k=size("topk_group") if groups > 1 else 0,
        # Some files give the width of all shared experts, others how many there are, each as wide as a routed one.
        shared_expert_ffn_hidden_size=size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
        or size("n_shared_experts", "moe_num_shared_experts") * expert_width,
        dense_ffn_hidden_size=size("intermediate_size") if has_dense_layers else 0,
        sliding_window=window if windowed else 0,
        num_sliding_window_layers=windowed,
        attention_sinks=family == "gpt_oss",
        **values,
    )
    if family == HYBRID:
        linear_note = HYBRID_NOTE
    else:
        linear_note = LINEAR_NOTE
    return spec, (linear_note,) * bool(linear) + (SPARSE_NOTE,) * bool(sparse)


def _linear_layers(config: Config, num_layers: int) -> int:
    """Return how many layers have linear attention: those that are listed, else all but every n-th."""
    kinds = config.get("layer_types")
    if kinds:
        return list(kinds[:num_layers]).count("linear_attention")
    every = int(config.get("full_attention_interval") or 4)
    return num_layers - num_layers // every


def _sliding_window_layers(config: Config, family: str, num_layers: int) -> int:
    """Return how many layers attend to a window only."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    kinds = config.get("layer_types")
    if kinds is None:
        if family not in ALWAYS_WINDOWED:
            return 0
        return num_layers
    return list(kinds[:num_layers]).count("sliding_attention")


def _number(config: Config, keys: tuple[str, ...], path: Path) -> int:
    for key in keys:
        if config.get(key) is not None:
            value = config[key]
            require(isinstance(value, int), f"{path}: {key} must be a whole number, got {value!r}.")
            return int(value)
    raise InvalidInputError(f"{path} must have one of the keys {', '.join(keys)}.")
