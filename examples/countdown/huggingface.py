"""The Qwen3-MoE as Hugging Face's config: the rollout engine's model, and the shape that the trainer follows."""

from transformers import Qwen3MoeConfig

from examples.countdown.config import ModelSection
from examples.countdown.problems import EOS_ID

ROPE_THETA = 10_000.0
RMS_NORM_EPS = 1e-6


def hugging_face_config(model: ModelSection, vocabulary_size: int) -> Qwen3MoeConfig:
    """Return the shape as Hugging Face's config; every layer is a MoE layer, top-k weights are normalized."""
    return Qwen3MoeConfig(
        vocab_size=vocabulary_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.moe_ffn_hidden_size,
        moe_intermediate_size=model.moe_ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        num_experts=model.num_experts,
        num_experts_per_tok=model.top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=RMS_NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )
