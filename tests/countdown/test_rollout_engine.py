"""The engine records what the model really did: its routes, its log-probabilities, and samples of its distribution."""

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from examples.countdown.problems import EOS_ID, CountdownSpec, decode, draw_problems, reward
from examples.countdown.rollout_engine import Precision, RolloutEngine
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.quantization.op import quantize
from moe_rl.replay.hf_recorder import record_routing

SPEC = CountdownSpec()
PROBLEMS = draw_problems(SPEC, "train", 0, range(6))


def model_config(num_experts: int = 8) -> Qwen3MoeConfig:
    """Two layers; weights large enough that tokens differ in their experts and answers differ in length."""
    return Qwen3MoeConfig(
        vocab_size=SPEC.vocabulary_size,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=32,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    torch.manual_seed(0)
    made = RolloutEngine(model_config(), max_response_tokens=SPEC.max_response_tokens, format_reward=0.1)
    made.load(made.model.state_dict(), policy_version=3)
    return made


def test_recorded_routes_are_those_of_the_models_own_routers(engine: RolloutEngine) -> None:
    """One uncached call per sequence, with routes read by the project's other recorder."""
    made = engine.generate(PROBLEMS, 3, 1.0, seed=0)
    for index in range(made.num_sequences):
        one = made.select(torch.tensor([index]))
        with torch.no_grad(), record_routing(engine.model, router_logprobs=True) as recorder:
            engine.model(one.tokens[None], use_cache=False)
        (sequence,) = recorder.sequences()
        assert sequence.router_logprobs is not None
        np.testing.assert_array_equal(sequence.routed_experts[:-1], one.routed_experts[one.routed].numpy())
        # The other recorder keeps half precision: 11 bits of values below 16.
        np.testing.assert_allclose(sequence.router_logprobs[:-1], one.router_logprobs[one.routed].numpy(), atol=2**-8)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_teacher_forced_logprobs_are_the_sampled_ones(engine: RolloutEngine, temperature: float) -> None:
    made = engine.generate(PROBLEMS, 8, temperature, seed=1)
    assert len(made.lengths.unique()) > 1
    torch.testing.assert_close(engine.logprobs(made), made.logprobs, atol=1e-5, rtol=0)


def test_a_sample_depends_on_its_problem_and_seed_and_not_on_the_batch(engine: RolloutEngine) -> None:
    together = engine.generate(PROBLEMS, 4, 1.0, seed=2)
    alone = engine.generate([PROBLEMS[4]], 4, 1.0, seed=2)
    cut = together.select(torch.arange(16, 20))
    assert torch.equal(cut.tokens, alone.tokens)
    assert torch.equal(cut.routed_experts, alone.routed_experts)
    torch.testing.assert_close(cut.logprobs, alone.logprobs, atol=1e-5, rtol=0)
    assert not torch.equal(engine.generate([PROBLEMS[4]], 4, 1.0, seed=3).tokens, alone.tokens)


def test_samples_follow_the_models_distribution(engine: RolloutEngine) -> None:
    """First tokens of 4000 samples against the softmax at temperature 0.7: chi-square, 18 degrees of freedom."""
    made = engine.generate(PROBLEMS[:1], 4000, 0.7, seed=4)
    first = made.tokens[made.cu_seqlens[:-1] + made.prompt_lengths]
    with torch.no_grad():
        logits = engine.model(made.tokens[None, : SPEC.prompt_tokens], use_cache=False).logits[0, -1]
    expected = torch.softmax(logits / 0.7, dim=-1) * len(first)
    chi_square = ((torch.bincount(first, minlength=SPEC.vocabulary_size) - expected) ** 2 / expected)[
        expected > 1
    ].sum()
    # 99.99 % quantile with 18 degrees of freedom.
    assert float(chi_square) < 48.8


def test_answers_end_at_the_end_token_and_are_rewarded(engine: RolloutEngine) -> None:
    made = engine.generate(PROBLEMS, 8, 1.0, seed=5)
    ended = 0
    for index in range(made.num_sequences):
        one = made.select(torch.tensor([index]))
        answer = one.tokens[one.response_mask].tolist()
        assert EOS_ID not in answer[:-1]
        ended += answer[-1] == EOS_ID
        assert answer[-1] == EOS_ID or len(answer) == SPEC.max_response_tokens
        expected = reward(PROBLEMS[index // 8], decode(answer), 0.1)
        assert float(one.rewards) == pytest.approx(expected)
    assert 0 < ended < made.num_sequences
    assert set(made.policy_version.tolist()) == {3}


def test_greedy_answers_follow_the_largest_logit(engine: RolloutEngine) -> None:
    for problem, solved in zip(PROBLEMS, engine.solves_greedily(PROBLEMS), strict=True):
        cold = engine.generate([problem], 1, 1e-4, seed=0)
        assert solved == (float(cold.rewards) == 1)


def test_the_engine_refuses_weights_that_are_not_its_own(engine: RolloutEngine) -> None:
    weights = engine.model.state_dict()
    other = RolloutEngine(model_config(num_experts=4), max_response_tokens=4)
    with pytest.raises(InvalidInputError, match=r"mlp.gate.weight of policy 0 is \[8, 32\]|experts"):
        other.load(weights, policy_version=0)
    with pytest.raises(InvalidInputError, match=r"missing or unknown: lm_head.weight"):
        engine.load({name: value for name, value in weights.items() if name != "lm_head.weight"}, policy_version=4)
    with pytest.raises(InvalidInputError, match="no weights yet"):
        other.generate(PROBLEMS, 2, 1.0, seed=0)


def test_the_engine_refuses_what_it_cannot_sample(engine: RolloutEngine) -> None:
    with pytest.raises(InvalidInputError, match="no problem"):
        engine.generate([], 2, 1.0, seed=0)
    with pytest.raises(InvalidInputError, match="group_size"):
        engine.generate(PROBLEMS, 0, 1.0, seed=0)
    with pytest.raises(InvalidInputError, match="temperature"):
        engine.generate(PROBLEMS, 2, 0.0, seed=0)
    with pytest.raises(InvalidInputError, match="at most 256 experts"):
        RolloutEngine(model_config(num_experts=300), max_response_tokens=4)


@pytest.mark.lengthy
def test_problems_of_several_lengths_get_the_answers_that_they_get_alone(engine: RolloutEngine) -> None:
    mixed = draw_problems(CountdownSpec(extra_numbers=2), "train", 0, range(16))
    assert len({len(problem.prompt) for problem in mixed}) == 3
    together = engine.generate(mixed, 2, 1.0, seed=0)
    assert together.problem_id.tolist() == [problem.problem_id for problem in mixed for _ in range(2)]
    for index, problem in enumerate(mixed):
        alone = engine.generate([problem], 2, 1.0, seed=0)
        of_problem = together.select(torch.tensor([2 * index, 2 * index + 1]))
        assert torch.equal(of_problem.tokens, alone.tokens)
        assert torch.equal(of_problem.routed_experts, alone.routed_experts)
    greedy = engine.solves_greedily(mixed)
    assert greedy == [engine.solves_greedily([problem])[0] for problem in mixed]


@pytest.fixture(scope="module")
def weights(engine: RolloutEngine) -> dict[str, torch.Tensor]:
    return dict(engine.model.state_dict())


@pytest.mark.parametrize("precision", ["bfloat16", "fp8-block"])
def test_a_low_precision_engine_samples_nearly_the_same_distribution(
    engine: RolloutEngine, weights: dict[str, torch.Tensor], precision: Precision
) -> None:
    """Its log-probabilities of float32 samples differ, by far less than those of other weights do."""
    made = engine.generate(PROBLEMS, 4, 1.0, seed=0)
    low = RolloutEngine(model_config(), max_response_tokens=SPEC.max_response_tokens, precision=precision)
    low.load(weights, policy_version=1)
    low.generate(PROBLEMS, 4, 1.0, seed=0)
    torch.manual_seed(1)
    other = RolloutEngine(model_config(), max_response_tokens=SPEC.max_response_tokens)
    other.load(other.model.state_dict(), policy_version=1)
    exact, mask = engine.logprobs(made), made.response_mask
    gap = (low.logprobs(made) - exact)[mask].abs().mean()
    assert 0 < float(gap) < 0.1 * float((other.logprobs(made) - exact)[mask].abs().mean())


def test_fp8_experts_multiply_the_codes_of_the_weights_they_were_given_last(weights: dict[str, torch.Tensor]) -> None:
    """Against a float32 engine that holds the dequantized weights; what is left is the rounding of activations."""
    low = RolloutEngine(model_config(), max_response_tokens=4, precision="fp8-block")
    low.load({name: torch.zeros_like(value) for name, value in weights.items()}, policy_version=0)
    low.load(weights, policy_version=1)
    rounded = {
        name: quantize(value, (128, 128), backend="reference").dequantize()
        for name, value in weights.items()
        if ".experts." in name
    }
    experts = low.model.model.layers[0].mlp.experts
    x, probs = torch.randn(10, 32), torch.rand(10, 2)
    ids = torch.rand(10, 8).argsort(-1)[:, :2]
    expected = torch.zeros(10, 32)
    for token in range(10):
        for expert, prob in zip(ids[token].tolist(), probs[token], strict=True):
            gate, up = (rounded["model.layers.0.mlp.experts.gate_up_proj"][expert] @ x[token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            expected[token] += prob * (rounded["model.layers.0.mlp.experts.down_proj"][expert] @ inner)
    # E4M3 keeps 4 significant bits: each rounding is off by at most 2^-4 of a value, and there are two in a row.
    worst = (experts(x, ids, probs) - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(worst.max()) < 2 * 2**-4
