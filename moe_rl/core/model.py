"""The shape of a model, as far as load balance and the price of a layer depend on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.core.errors import require, require_least, require_words

ACTIVATIONS = ("swiglu", "swiglu_oai", "gelu", "relu2")
POSITIVE_FIELDS = (
    "num_layers",
    "num_experts",
    "top_k",
    "hidden_size",
    "moe_ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "num_expert_groups",
)


def are_layer_numbers(ids: Sequence[int], num_layers: int) -> bool:
    """Return whether ids are ascending, distinct and in 0 .. num_layers - 1."""
    return list(ids) == sorted(set(ids)) and set(ids) <= set(range(num_layers))


def check_groups(whose: str, num_experts: int, top_k: int, num_expert_groups: int, expert_group_top_k: int) -> None:
    """Raise unless the groups divide the experts, and the groups of a token hold at least top-k experts."""
    require(
        num_expert_groups >= 1 and num_experts % num_expert_groups == 0,
        f"{whose}: num_expert_groups ({num_expert_groups}) does not divide num_experts ({num_experts}).",
    )
    # DeepSeek-V3: 256 experts in 8 groups, of which a token takes 4, leave 128 to choose 8 from.
    eligible = num_experts // num_expert_groups * expert_group_top_k
    is_limit = 0 <= expert_group_top_k <= num_expert_groups and eligible >= top_k
    require(
        expert_group_top_k == 0 or is_limit,
        f"{whose}: expert_group_top_k ({expert_group_top_k}) leaves each token {eligible} experts to choose "
        f"from. Set it to 0 (no limit), or to at most {num_expert_groups} so that it leaves at least {top_k} experts "
        "(top_k).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeModelSpec:
    """Shape of a Mixture-of-Experts transformer, in Megatron's words.

    `moe_layer_ids` lists the decoder layers that are MoE layers, ascending; a routing trace has one column per entry.
    """

    name: str
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    """E, routed experts per MoE layer."""
    top_k: int
    """K, experts per token."""
    hidden_size: int
    moe_ffn_hidden_size: int
    """Width of one routed expert."""
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """Head dimension."""
    vocab_size: int
    activation: str = "swiglu"
    num_expert_groups: int = 1
    """Groups of a group-limited router; 1 means no restriction."""
    expert_group_top_k: int = 0
    """Groups that a token's experts come from (Megatron's `moe_router_group_topk`); 0 means all."""
    shared_expert_ffn_hidden_size: int = 0
    """Total width of the shared experts; 0 means none."""
    dense_ffn_hidden_size: int = 0
    """Width of the MLP in layers that are not MoE layers."""
    latent_cache_width: int = 0
    """Elements of a token's latent cache in a layer (MLA: low-rank keys and values, and the rotary key); 0: keys and
    values of every query group are cached."""
    latent_rotary_width: int = 0
    """Channels of a head's queries and keys beside `kv_channels`, as latent attention has them."""
    latent_query_width: int = 0
    """Width of latent attention's low-rank queries; 0: they are projected at once."""
    sliding_window: int = 0
    """Tokens, its own included, that a token attends to in layers with a window; 0 means that no layer has one."""
    num_sliding_window_layers: int = 0
    """Layers with a sliding window, of the `num_layers`."""
    attention_sinks: bool = False
    """True: every head has a learned logit beside its scores (gpt-oss), which many attention kernels do not know."""
    assumed_fields: tuple[str, ...] = ()
    """Fields that hold a stated default because the user gave no value."""

    def __post_init__(self) -> None:
        require_least(self, whose=f"model {self.name!r}: ", **dict.fromkeys(POSITIVE_FIELDS, 1))
        require(
            self.top_k <= self.num_experts,
            f"model {self.name!r}: top_k ({self.top_k}) exceeds num_experts ({self.num_experts}).",
        )
        check_groups(
            f"model {self.name!r}", self.num_experts, self.top_k, self.num_expert_groups, self.expert_group_top_k
        )
        require(
            self.num_attention_heads % self.num_query_groups == 0,
            f"model {self.name!r}: num_query_groups ({self.num_query_groups}) does not divide "
            f"num_attention_heads ({self.num_attention_heads}).",
        )
        ids = self.moe_layer_ids
        require(
            len(ids) > 0 and are_layer_numbers(ids, self.num_layers),
            f"model {self.name!r}: moe_layer_ids must be ascending, distinct and less than num_layers "
            f"({self.num_layers}), got {list(ids)}.",
        )
        windowed = self.num_sliding_window_layers
        both_or_none = (windowed > 0) == (self.sliding_window > 0)
        require(
            self.sliding_window >= 0 and 0 <= windowed <= self.num_layers and both_or_none,
            f"model {self.name!r}: sliding_window is {self.sliding_window} and num_sliding_window_layers is "
            f"{windowed}. Set both to 0, or both to positive numbers. At most num_layers "
            f"({self.num_layers}) layers can have a sliding window.",
        )
        require_words(self, whose=f"model {self.name!r}: ", activation=ACTIVATIONS)

    @property
    def num_moe_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.moe_layer_ids)

    @property
    def num_expert_matrices(self) -> int:
        """Matrices of `hidden_size x moe_ffn_hidden_size` in one expert: gate, up and down, or up and down."""
        # A gated unit multiplies two projections of the input before the third maps back.
        return 3 if self.activation.startswith("swiglu") else 2

    @property
    def query_channels(self) -> int:
        """Elements of a token's queries in a layer."""
        return self.num_attention_heads * (self.kv_channels + self.latent_rotary_width)

    @property
    def key_value_channels(self) -> int:
        """Elements of a token's keys and values in a layer; training expands the latent of latent attention."""
        return self.num_query_groups * (2 * self.kv_channels + self.latent_rotary_width)

    @property
    def attention_products(self) -> tuple[tuple[int, int], ...]:
        """Columns and depth of the projections of a layer's attention, the output's last."""
        hidden, outputs, queries = self.hidden_size, self.num_attention_heads * self.kv_channels, self.query_channels
        # Latent attention projects to a narrow latent first and expands it per head: two thin products for a wide one.
        low, cached = self.latent_query_width, self.latent_cache_width
        if not cached:
            return (queries + self.key_value_channels, hidden), (hidden, outputs)
        projected = ((low, hidden), (queries, low)) if low else ((queries, hidden),)
        return *projected, (cached, hidden), (2 * outputs, cached - self.latent_rotary_width), (hidden, outputs)

    @property
    def attention_params(self) -> int:
        """Parameters of a layer's attention projections."""
        return sum(columns * depth for columns, depth in self.attention_products)

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert."""
        return self.num_expert_matrices * self.hidden_size * self.moe_ffn_hidden_size

    @property
    def expert_bytes(self) -> int:
        """W, bytes of one routed expert in bf16."""
        return 2 * self.expert_params

    @property
    def expert_state_bytes(self) -> int:
        """Bytes that move with an expert between steps: bf16 weight, fp32 master and two fp32 Adam moments."""
        # 2 + 4 + 4 + 4 bytes per parameter: 264 MB for an expert of Qwen3-235B, seven times its weights.
        return 14 * self.expert_params
