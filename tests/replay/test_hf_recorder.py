"""The recorder sees what the routers decide: against `output_router_logits`, and generation against a full forward."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_rl.core.errors import InvalidInputError
from moe_rl.replay.hf_recorder import record_routing

PAD, EOS, VOCAB = 0, 1, 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "initializer_range": 0.5,
}


def qwen3_moe(**changes: Any) -> PreTrainedModel:
    sizes = {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON | sizes | changes))


def olmoe() -> PreTrainedModel:
    return OlmoeForCausalLM(OlmoeConfig(**COMMON | {"intermediate_size": 16, "num_experts": 8}))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**COMMON | {"intermediate_size": 16, "num_local_experts": 8}))


def gpt_oss() -> PreTrainedModel:
    sizes = {"intermediate_size": 16, "num_local_experts": 8, "head_dim": 8}
    return GptOssForCausalLM(GptOssConfig(**COMMON | sizes))


MODELS = [qwen3_moe, olmoe, mixtral, gpt_oss]


def build(factory: Any, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = factory(**changes).float().eval()
    return model


def tokens_of(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(2, VOCAB, shape))


def cache_keyword(model: PreTrainedModel) -> str:
    """Return what the installed Transformers call the cache: `cache` from 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class CacheRenamed(torch.nn.Module):
    """A model whose forward takes its cache as `name`, whatever the installed Transformers call it."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if self.name in kwargs:
            kwargs[cache_keyword(self.model)] = kwargs.pop(self.name)
        return self.model(input_ids, **kwargs)


class OpaqueCache:
    """A cache that does not say how many tokens it holds, as the tuples of Transformers 4 did not."""


def by_expert(ids: np.ndarray) -> np.ndarray:
    """Order the ids of each row: a row is a set."""
    return np.sort(ids, axis=-1)


def forward_routes(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """Top-k of the router logits that a forward over one sequence returns, [tokens, L, K] in id order."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None], output_router_logits=True).router_logits
    return by_expert(torch.stack([layer.topk(2).indices for layer in logits], dim=1).numpy())


@pytest.mark.parametrize("factory", MODELS)
def test_a_forward_records_the_top_k_of_the_router_logits(factory: Any, rng: np.random.Generator) -> None:
    model = build(factory)
    tokens = tokens_of(rng, 3, 17)
    with torch.no_grad(), record_routing(model, router_logprobs=True) as recorder:
        logits = model(input_ids=tokens, output_router_logits=True).router_logits
    trace = recorder.trace(model="tiny", policy_version=5, group_id=np.array([0, 0, 1]))

    logits_tle = torch.stack(logits, dim=1)
    np.testing.assert_array_equal(by_expert(trace.routed_experts), by_expert(logits_tle.topk(2).indices.numpy()))
    want = torch.log_softmax(logits_tle, dim=-1).gather(-1, torch.from_numpy(trace.routed_experts.astype(np.int64)))
    np.testing.assert_array_equal(trace.router_logprobs, want.half().numpy())
    assert trace.routed_experts.dtype == np.uint8
    assert trace.cu_seqlens.tolist() == [0, 17, 34, 51]
    assert (trace.num_experts, trace.moe_layer_ids) == (8, (0, 1, 2))
    assert (trace.model, trace.provenance, trace.group_id.tolist()) == ("tiny", "live", [0, 0, 1])
    assert trace.policy_version is not None
    assert (trace.policy_version == 5).all()


@pytest.mark.parametrize("factory", MODELS)
def test_generation_records_what_a_forward_over_its_tokens_routes(factory: Any, rng: np.random.Generator) -> None:
    """Prompts of different lengths padded on the left: P + N - 1 rows each, equal to an unpadded full forward."""
    model = build(factory)
    lengths = [11, 4, 1, 7]
    prompts = tokens_of(rng, 4, 11)
    mask = torch.tensor([[0] * (11 - length) + [1] * length for length in lengths])
    prompts[mask == 0] = PAD
    with record_routing(model) as recorder:
        output = model.generate(prompts, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=PAD)
    for index, sequence in enumerate(recorder.sequences()):
        ids = output[index, 11 - lengths[index] :].numpy()
        if EOS in ids[lengths[index] :]:
            ids = ids[: lengths[index] + int(np.argmax(ids[lengths[index] :] == EOS)) + 1]
        np.testing.assert_array_equal(sequence.token_ids, ids[:-1])
        routes = by_expert(sequence.routed_experts)
        np.testing.assert_array_equal(routes, forward_routes(model, ids)[:-1])


def test_a_sequence_that_ends_early_stops_before_its_end_token(rng: np.random.Generator) -> None:
    """The end token is the one that the first sequence generates fourth; the others go on unless they meet it too."""
    model = build(qwen3_moe)
    prompts = tokens_of(rng, 5, 6)
    free = model.generate(prompts, max_new_tokens=16, do_sample=False, pad_token_id=PAD, eos_token_id=None)
    end = int(free[0, 6 + 3])
    with record_routing(model, eos_token_id=end) as recorder:
        model.generate(prompts, max_new_tokens=16, do_sample=False, pad_token_id=PAD, eos_token_id=end)
    want = []
    for row in free[:, 6:].tolist():
        generated = row.index(end) + 1 if end in row else 16
        want.append(6 + generated - 1)
    assert [len(sequence.token_ids) for sequence in recorder.sequences()] == want
    assert min(want) <= 9 < max(want)


def test_the_end_token_inside_a_prompt_is_a_token_like_any_other(rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    prompts = tokens_of(rng, 2, 6)
    prompts[:, 2] = EOS
    with torch.no_grad(), record_routing(model) as recorder:
        model(prompts)
    assert [len(sequence.token_ids) for sequence in recorder.sequences()] == [6, 6]


def test_padding_on_either_side_is_left_out(rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    tokens = tokens_of(rng, 2, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 1]])
    with torch.no_grad(), record_routing(model) as recorder:
        model(tokens, mask)
    trace = recorder.trace()
    assert trace.sequence_lengths.tolist() == [3, 1]
    assert trace.valid.all()
    np.testing.assert_array_equal(
        by_expert(recorder.sequences()[0].routed_experts), forward_routes(model, tokens[0, :3].numpy())
    )


def test_calls_one_after_the_other_are_batches_one_after_the_other(rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    with torch.no_grad(), record_routing(model) as recorder:
        model(input_ids=tokens_of(rng, 2, 3))
        model(inputs_embeds=torch.zeros(1, 4, 32))
        model.generate(tokens_of(rng, 1, 5), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert recorder.trace().sequence_lengths.tolist() == [3, 3, 4, 8]
    assert (recorder.sequences()[2].token_ids == -1).all()


def test_rejected_drafts_leave_no_rows(rng: np.random.Generator) -> None:
    """Assisted generation feeds drafts, then takes the rejected ones out of the cache."""
    model = build(qwen3_moe)
    torch.manual_seed(7)
    assistant = Qwen3ForCausalLM(Qwen3Config(**COMMON | {"intermediate_size": 16, "head_dim": 8})).eval()
    prompt = tokens_of(rng, 1, 6)
    with record_routing(model) as recorder:
        output = model.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=assistant)
    (sequence,) = recorder.sequences()
    fed = len(sequence.token_ids)
    ids = output[0].numpy()
    assert fed >= len(ids) - 1
    np.testing.assert_array_equal(sequence.token_ids[: len(ids) - 1], ids[:-1])
    np.testing.assert_array_equal(by_expert(sequence.routed_experts[: len(ids) - 1]), forward_routes(model, ids)[:-1])


def test_training_with_activation_checkpointing_records_each_token_once(rng: np.random.Generator) -> None:
    model = build(qwen3_moe).train()
    model.activation_checkpointing_enable()
    tokens = tokens_of(rng, 2, 5)
    with record_routing(model) as recorder:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert recorder.trace().sequence_lengths.tolist() == [5, 5]


def test_layers_without_experts_are_not_counted() -> None:
    model = build(qwen3_moe, mlp_only_layers=[1])
    assert record_routing(model).moe_layer_ids == (0, 2)


def test_more_than_256_experts_take_two_bytes(rng: np.random.Generator) -> None:
    model = build(qwen3_moe, num_experts=300)
    with torch.no_grad(), record_routing(model) as recorder:
        model(input_ids=tokens_of(rng, 1, 64))
    assert recorder.trace().routed_experts.dtype == np.uint16


def test_a_grouped_sigmoid_router_is_recorded(rng: np.random.Generator) -> None:
    """DeepSeek-V3: first layer dense, experts chosen by biased sigmoid scores within groups."""
    sizes = {
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON | sizes)).eval()
    with torch.no_grad(), record_routing(model) as recorder:
        model(input_ids=tokens_of(rng, 2, 9))
    trace = recorder.trace()
    assert trace.moe_layer_ids == (1, 2)
    assert trace.num_experts == 8
    assert len(np.unique(trace.routed_experts)) > 2


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_gone_after_the_block(fails: bool, rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    recorder = record_routing(model)
    if fails:
        with pytest.raises(KeyboardInterrupt), recorder:
            raise KeyboardInterrupt
    else:
        with recorder:
            pass
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    with torch.no_grad():
        model(input_ids=tokens_of(rng, 1, 3))
    with pytest.raises(InvalidInputError, match="no routes were recorded"):
        recorder.trace()


def test_a_failed_call_leaves_nothing_behind(rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    with torch.no_grad(), record_routing(model) as recorder:
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 3), VOCAB + 1))
        model(input_ids=tokens_of(rng, 1, 4))
    assert recorder.trace().sequence_lengths.tolist() == [4]


def test_the_outputs_of_the_model_are_untouched(rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    tokens = tokens_of(rng, 2, 8)
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        with record_routing(model, router_logprobs=True):
            during = model(input_ids=tokens).logits
    assert torch.equal(before, during)


def test_a_model_without_experts_is_refused() -> None:
    dense = Qwen3ForCausalLM(Qwen3Config(**COMMON | {"intermediate_size": 16, "head_dim": 8}))
    with pytest.raises(InvalidInputError, match="Qwen3ForCausalLM has no MoE layer"):
        record_routing(dense)


def test_a_cache_filled_before_recording_is_refused(rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    with torch.no_grad():
        cache = model(input_ids=tokens_of(rng, 1, 5), use_cache=True).past_key_values
        with (
            record_routing(model),
            pytest.raises(InvalidInputError, match="holds 5 tokens, but only 0 of them were recorded"),
        ):
            model(input_ids=tokens_of(rng, 1, 1), **{cache_keyword(model): cache})


@pytest.mark.parametrize("name", ["past_key_values", "cache", "state"])
def test_a_cache_is_found_whatever_its_name(name: str, rng: np.random.Generator) -> None:
    """Two prompts of 5 tokens and 3 decoded ones are 2 sequences of 8 rows, not 2 of 5 and 6 of 1."""
    model = CacheRenamed(build(qwen3_moe), name)
    cache = DynamicCache(config=model.model.config)
    with torch.no_grad(), record_routing(model) as recorder:
        model(tokens_of(rng, 2, 5), **{name: cache})
        for _ in range(3):
            model(tokens_of(rng, 2, 1), **{name: cache})
    assert [len(sequence.token_ids) for sequence in recorder.sequences()] == [8, 8]


def test_a_decoded_token_without_a_cache_that_says_its_length_is_refused(rng: np.random.Generator) -> None:
    class Router(torch.nn.Module):
        top_k, num_experts = 1, 4

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = hidden.flatten()[:, None].expand(-1, 4).float()
            return logits, logits[:, :1], torch.zeros(len(logits), 1, dtype=torch.int64)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = Router()

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return self.router(input_ids)[0]

    model = Model()
    with record_routing(model) as recorder:
        model(tokens_of(rng, 2, 5), memory=OpaqueCache())
        with pytest.raises(InvalidInputError, match="called with one token per sequence and without a key-value cache"):
            model(tokens_of(rng, 2, 1), memory=OpaqueCache())
        with pytest.raises(InvalidInputError, match="has 7 tokens per sequence, but the model was called with 2"):
            model(tokens_of(rng, 2, 2), attention_mask=torch.ones(2, 7), memory=OpaqueCache())
        model(tokens_of(rng, 3, 1), use_cache=False)
    assert recorder.batch_sizes == [2, 3]


def test_a_mask_that_is_not_batch_by_tokens_is_refused(rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    mask = torch.zeros(1, 1, 4, 4)
    with torch.no_grad(), record_routing(model), pytest.raises(InvalidInputError, match=r"got \[1, 1, 4, 4\]"):
        model(input_ids=tokens_of(rng, 1, 4), attention_mask=mask)


def test_a_router_that_returns_no_ids_is_refused(rng: np.random.Generator) -> None:
    class OddRouter(torch.nn.Module):
        top_k, num_experts = 2, 8

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    class OddModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = OddRouter()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.router(input_ids.float())

    model = OddModel()
    with (
        record_routing(model),
        pytest.raises(InvalidInputError, match=r"OddRouter\) returned Tensor, but the recorder expects"),
    ):
        model(tokens_of(rng, 1, 4))


def test_a_static_cache_is_refused_by_name(rng: np.random.Generator) -> None:
    """Its masks are [batch, 1, queries, keys]; a wrong guess about padding would be silent."""
    model = build(qwen3_moe)
    with record_routing(model), pytest.raises(InvalidInputError, match="generate with the default dynamic cache"):
        model.generate(tokens_of(rng, 1, 4), max_new_tokens=2, cache_implementation="static", pad_token_id=PAD)


def test_several_answers_to_one_prompt_are_sequences_of_their_own(rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    with record_routing(model) as recorder:
        output = model.generate(
            tokens_of(rng, 2, 5), max_new_tokens=4, min_new_tokens=4, num_return_sequences=3, do_sample=True
        )
    assert [sequence.token_ids.tolist() for sequence in recorder.sequences()] == output[:, :-1].tolist()


def test_a_prompt_fed_in_chunks_is_one_sequence(rng: np.random.Generator) -> None:
    model = build(qwen3_moe)
    prompt = tokens_of(rng, 1, 7)
    with record_routing(model) as recorder:
        output = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False, prefill_chunk_size=3)
    (sequence,) = recorder.sequences()
    assert sequence.token_ids.tolist() == output[0, :-1].tolist()
    np.testing.assert_array_equal(by_expert(sequence.routed_experts), forward_routes(model, output[0].numpy())[:-1])
