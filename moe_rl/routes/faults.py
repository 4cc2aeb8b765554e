"""Names of the faults that replayed routes can have, each with the thread that describes it where there is one."""

from enum import StrEnum


class Fault(StrEnum):
    """A class of faults; `THREADS` says where each was met."""

    SHIFTED = "shifted_by_a_token"
    FIRST_ROW_LOST = "first_row_lost"
    LAST_ROW_LOST = "last_row_lost"
    ROWS_LOST = "rows_lost"
    ROWS_TWICE = "rows_twice"
    DRAFT_TOKENS = "rejected_draft_tokens"
    EMPTY_ROWS = "zero_or_placeholder_rows"
    STALE_PREFIX = "stale_prefix"
    STALE_ROWS = "stale_rows"
    CONSTANT_LAYER = "constant_layer"
    LAYER_ALIAS = "layer_alias"
    WRONG_GROUP = "wrong_cache_group"
    TURN_TWICE = "turn_twice"
    PADDING = "padding_as_experts"
    TRUNCATED = "truncated"
    POLICY_VERSION = "other_policy_version"
    PHYSICAL_IDS = "physical_ids"
    RANK_LOCAL_IDS = "rank_local_ids"
    OTHER_SEQUENCE = "rows_of_another_sequence"
    OVERFLOW = "id_overflow"
    EXPERT_TWICE = "expert_named_twice"
    MISSING_CHOICE = "missing_choice"
    ZERO_WEIGHTS = "zero_combine_weights"
    UNKNOWN = "disagrees"


THREADS = {
    Fault.SHIFTED: "NovaSky-AI/SkyRL#1908, PrimeIntellect-ai/prime-rl#1807",
    Fault.FIRST_ROW_LOST: "inclusionAI/AReno#524",
    Fault.LAST_ROW_LOST: "sgl-project/sglang#20964",
    Fault.EMPTY_ROWS: "NVIDIA-NeMo/RL#3144, vllm-project/vllm#35744",
    Fault.STALE_PREFIX: "vllm-project/vllm#39568",
    Fault.STALE_ROWS: "sgl-project/sglang#36404",
    Fault.LAYER_ALIAS: "NVIDIA-NeMo/RL#3903, verl-project/verl#7106",
    Fault.WRONG_GROUP: "vllm-project/vllm#35744, vllm-project/tpu-inference#3583",
    Fault.TURN_TWICE: "strands-sglang#72",
    Fault.PADDING: "THUDM/slime#941, THUDM/slime#1052",
    Fault.ZERO_WEIGHTS: "ISEEKYAN/Megatron-LM#79",
}
