"""The start is the same for the same seed, learns, is kept on disk, and leaves the caller's random state alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.countdown import warm_start as module
from examples.countdown.problems import (
    EOS_ID,
    CountdownSpec,
    decode,
    draw_problems,
    solves,
    uses_numbers,
)
from examples.countdown.warm_start import WarmStart, WrongAnswers, warm_start
from moe_rl.core.errors import InvalidInputError

SPEC = CountdownSpec(num_numbers=2, max_number=5)
SHORT = WarmStart(num_updates=40, batch_problems=16, wrong_demonstrations=0.0)
CONFIG = Qwen3MoeConfig(
    vocab_size=SPEC.vocabulary_size,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=EOS_ID,
)


def held_out_loss(weights: dict[str, torch.Tensor]) -> float:
    """Mean loss per token of the hidden solutions of held-out problems."""
    model = Qwen3MoeForCausalLM(CONFIG)
    model.load_state_dict(weights)
    tokens, labels = module._demonstrations(draw_problems(SPEC, "held-out", 0, range(32)), SPEC, SHORT, 0)
    with torch.no_grad():
        return float(model(tokens, labels=labels).loss)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    random_state = torch.get_rng_state()
    first, again = (warm_start(CONFIG, SPEC, replace(SHORT, num_updates=3), 0, None) for _ in range(2))
    other = warm_start(CONFIG, SPEC, replace(SHORT, num_updates=3), 1, None)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_start_lowers_the_loss_on_held_out_problems() -> None:
    untrained = warm_start(CONFIG, SPEC, replace(SHORT, num_updates=0), 0, None)
    assert held_out_loss(warm_start(CONFIG, SPEC, SHORT, 0, None)) < 0.8 * held_out_loss(untrained)


@pytest.mark.parametrize("kind", ["random", "sum"])
def test_the_given_share_of_demonstrations_is_wrong_or_right_by_chance(kind: WrongAnswers) -> None:
    problems = draw_problems(SPEC, "train", 0, range(400))
    solved = []
    for wrong in (0.0, 0.5, 1.0):
        settings = replace(SHORT, wrong_demonstrations=wrong, wrong_answers=kind)
        tokens, labels = module._demonstrations(problems, SPEC, settings, 0)
        answers = [decode(row[label >= 0].tolist()) for row, label in zip(tokens, labels, strict=True)]
        assert all(uses_numbers(problem, answer) for problem, answer in zip(problems, answers, strict=True))
        solved.append(sum(solves(problem, answer) for problem, answer in zip(problems, answers, strict=True)) / 400)
    assert solved[0] == 1
    assert 0 < solved[2] < 1
    if kind == "sum":
        assert solved[2] == sum(sum(problem.numbers) == problem.target for problem in problems) / 400
    # Half of the demonstrations are kept: a binomial share, four standard deviations wide.
    assert abs(solved[1] - (1 + solved[2]) / 2) < 4 * 0.5 / 400**0.5


def test_the_weights_are_kept_under_a_key_of_what_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SHORT, num_updates=2)
    made = warm_start(CONFIG, SPEC, settings, 0, tmp_path)
    for changed in (replace(settings, num_updates=3), replace(settings, learning_rate=1e-3)):
        warm_start(CONFIG, SPEC, changed, 0, tmp_path)
    warm_start(CONFIG, replace(SPEC, max_number=4), settings, 0, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(module, "train", None)
    read = warm_start(CONFIG, SPEC, settings, 0, tmp_path)
    assert read.keys() == made.keys()
    assert all(torch.equal(read[name], made[name]) for name in made)


@pytest.mark.parametrize(
    "field", ["num_updates", "batch_problems", "learning_rate", "router_aux_loss_coef", "wrong_demonstrations"]
)
def test_a_wrong_setting_is_refused(field: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        WarmStart(**{field: -1})
