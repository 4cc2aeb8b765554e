"""One token that no formula can use costs that token: the rest is as if it were masked; or every rank raises."""

import math
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import (
    OBJECTIVES,
    PolicyLossInputs,
    PolicyLossOutput,
    as_floats,
    policy_loss,
    rollout_correction,
    tensors,
)

NAMES = OBJECTIVES.names
BAD = {
    "log_prob": (math.nan, math.inf, -math.inf),
    "old_log_prob": (math.nan, math.inf, -math.inf),
    "rollout_log_prob": (math.nan, -math.inf),
    "advantages": (math.nan, math.inf),
    "rollout_is_weights": (math.nan, math.inf, -1.0),
    "router_shift_ratio": (math.nan, 1.5, -0.1),
}


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    old = -1.0 - torch.rand(3, 5, generator=generator, dtype=torch.float64)
    tensors = {
        "log_prob": old + 0.2 * torch.randn(3, 5, generator=generator, dtype=torch.float64),
        "old_log_prob": old,
        "rollout_log_prob": old + 0.1 * torch.randn(3, 5, generator=generator, dtype=torch.float64),
        "advantages": torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64).repeat(1, 5),
        "rollout_is_weights": torch.rand(3, 5, generator=generator, dtype=torch.float64),
        "router_shift_ratio": 0.5 + 0.5 * torch.rand(3, 5, generator=generator, dtype=torch.float64),
        "response_mask": torch.ones(3, 5),
    }
    marks = {
        "draw": torch.rand(3, 5, generator=generator),
    }
    return {name: value.to(dtype) for name, value in tensors.items()} | marks


def run(tensors: dict[str, Tensor], objective: str, **options: object) -> tuple[PolicyLossOutput, Tensor]:
    leaf = tensors["log_prob"].detach().clone().requires_grad_()
    output = policy_loss(PolicyLossInputs(**(tensors | {"log_prob": leaf})), objective=objective, **options)
    (grad,) = torch.autograd.grad(output.loss, leaf)
    return output, grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("objective", NAMES)
def test_a_bad_token_is_as_good_as_masked(objective: str, dtype: torch.dtype) -> None:
    """The table of section 3: an infinity in one log-probability ruined its row, or the batch."""
    without = batch(dtype)
    without["response_mask"][1, 2] = 0
    expected, expected_grad = run(without, objective)
    for name, values in BAD.items():
        if name == "rollout_log_prob" and name not in OBJECTIVES[objective].needs:
            continue
        for value in values:
            tensors = batch(dtype)
            tensors[name][1, 2] = value
            output, grad = run(tensors, objective)
            assert torch.equal(output.loss, expected.loss), (name, value)
            assert torch.equal(grad, expected_grad), (name, value)
            assert output.metrics.pop("actor/non_finite_tokens") == 1
            assert output.metrics == {k: v for k, v in expected.metrics.items() if k != "actor/non_finite_tokens"}


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_rollout_correction_leaves_bad_tokens_out(level: str) -> None:
    tensors = batch()
    triple = [tensors[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask")]
    triple[2][1, 2] = 0
    options = {"rollout_is": level, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.25"}
    weights, mask, metrics = rollout_correction(*triple, **options)
    for index, value in ((0, -math.inf), (1, -math.inf), (0, math.nan), (1, math.inf)):
        bad = [each.clone() for each in triple]
        bad[2][1, 2] = 1
        bad[index][1, 2] = value
        found_weights, found_mask, found = rollout_correction(*bad, **options)
        assert torch.equal(found_weights, weights)
        assert torch.equal(found_mask, mask)
        assert found.pop("rollout_corr/non_finite_tokens") == 1
        assert found == {k: v for k, v in metrics.items() if k != "rollout_corr/non_finite_tokens"}


def other_rank(count: int) -> Callable[[Tensor], Tensor]:
    """A sum with a rank that found `count` bad tokens of the first kind."""
    return lambda counts: counts + torch.tensor([count] + [0] * (counts.numel() - 1))


def test_all_ranks_raise_together() -> None:
    tensors = batch()
    policy_loss(PolicyLossInputs(**tensors), non_finite="raise", agree=other_rank(0))
    with pytest.raises(InvalidInputError, match=r"log_prob is not finite at 2 valid token\(s\)."):
        policy_loss(PolicyLossInputs(**tensors), non_finite="raise", agree=other_rank(2))
    triple = [tensors[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask")]
    with pytest.raises(InvalidInputError, match=r"old_log_prob is not finite at 1 valid token\(s\)."):
        rollout_correction(*triple, "token", non_finite="raise", sum_over_ranks=other_rank(1))
    with pytest.raises(InvalidInputError, match=r"unknown non_finite 'maks'. Did you mean 'mask'"):
        policy_loss(PolicyLossInputs(**tensors), non_finite="maks")


@pytest.mark.parametrize("objective", NAMES)
def test_the_metric_counts_the_punished_tokens_without_a_gradient(objective: str) -> None:
    """`frac_negative_zero_grad` is what autograd says, for every objective; prime-rl's squared log-ratio set aside."""
    tensors = batch()
    del tensors["router_shift_ratio"], tensors["rollout_is_weights"]
    tensors["old_log_prob"] = tensors["old_log_prob"] + 0.3 * torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    options = {"kl_tau": 0.0} if objective.startswith("prime_rl") else {}
    output, grad = run(tensors, objective, **options)
    negative = tensors["advantages"] < 0
    expected = float((grad[negative] == 0).double().mean())
    assert float(output.metrics["actor/frac_negative_zero_grad"]) == pytest.approx(expected)


def log_of(**changes: Tensor) -> dict[str, float]:
    """What a framework logs of 200 tokens, after some of them were changed."""
    values = {name: torch.full((4, 50), -0.5) for name in ("log_prob", "old_log_prob", "advantages")}
    values |= {"response_mask": torch.ones(4, 50), "router_shift_ratio": torch.ones(4, 50)}
    return as_floats(policy_loss(PolicyLossInputs(**(values | changes))).metrics)


def with_bad(value: float, tokens: int, of: float = -0.5) -> Tensor:
    values = torch.full((4, 50), of)
    values.view(-1)[:tokens] = value
    return values


@pytest.mark.filterwarnings("ignore:.* at more than 1% of the valid tokens")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"old_log_prob": with_bad(-math.inf, 3)}, r"old_log_prob is not finite at 3 of 200 valid tokens \(1.5%\)"),
        ({"response_mask": torch.full((4, 50), 0.5)}, r"response_mask holds values other than 0 and 1 at 200"),
        ({"response_mask": torch.full((4, 50), 2)}, r"response_mask holds values other than 0 and 1 at 200"),
        ({"router_shift_ratio": with_bad(1.01, 200)}, r"router_shift_ratio is outside \[0, 1\] at 200 of 200"),
        ({"rollout_is_weights": with_bad(-1.0, 9, of=1.0)}, r"rollout_is_weights is negative or not finite at 9"),
    ],
)
def test_a_loss_of_nothing_is_no_silence(changes: dict[str, Tensor], named: str) -> None:
    """More than 1 % of the valid tokens unusable: an error at the log, which names the input."""
    with pytest.raises(InvalidInputError, match=named):
        log_of(**changes)


@pytest.mark.filterwarnings("ignore:.* at more than 1% of the valid tokens")
def test_a_few_bad_tokens_and_rounding_cost_only_themselves() -> None:
    assert log_of(old_log_prob=with_bad(-math.inf, 2))["actor/non_finite_tokens"] == 2  # 1 % of 200
    rounded = log_of(router_shift_ratio=with_bad(1.0000001, 200))
    assert rounded["actor/non_finite_tokens"] == 0.0
    assert rounded["router_corr/gamma_mean"] == 1.0
    few = {name: torch.full((1, 9), -0.5) for name in ("log_prob", "old_log_prob", "advantages")}
    few["log_prob"][0, 0] = math.nan  # one token is no more than one token, however short the micro-batch
    as_floats(policy_loss(PolicyLossInputs(**few, response_mask=torch.ones(1, 9))).metrics)
    alone = {name: value[:, :1] for name, value in few.items()}
    with pytest.raises(InvalidInputError, match=r"log_prob is not finite at 1 of 1 valid tokens"):
        as_floats(policy_loss(PolicyLossInputs(**alone, response_mask=torch.ones(1, 1))).metrics)


@pytest.mark.filterwarnings("ignore:.* at more than 1% of the valid tokens")
def test_merged_metrics_still_know_what_was_lost() -> None:
    triple = [torch.full((2, 5), -1.0), with_bad(-math.inf, 200)[:2, :5], torch.ones(2, 5)]
    _, _, found = rollout_correction(*triple, "token")
    clean = policy_loss(PolicyLossInputs(**{**batch(), "router_shift_ratio": None})).metrics
    for merged in (clean | found, found | clean, {"loss": torch.zeros(())} | found):
        with pytest.raises(InvalidInputError, match=r"rollout_log_prob is not finite at 10 of 10"):
            as_floats(merged)


@pytest.mark.filterwarnings("ignore:.* at more than 1% of the valid tokens")
@pytest.mark.parametrize("name", ["log_prob", "old_log_prob"])
def test_probabilities_are_no_log_probabilities(name: str) -> None:
    """They would be used as ratios of exp(p - p'), and the run would go on and learn the wrong thing."""
    probabilities = torch.linspace(0.2, 1.0, 16).view(2, 8)
    given = {"log_prob": probabilities.log(), "old_log_prob": probabilities.log()} | {name: probabilities}
    mask = torch.ones(2, 8, dtype=torch.bool)
    inputs = PolicyLossInputs(**given, advantages=torch.ones(2, 8), response_mask=mask)
    metrics = policy_loss(inputs).metrics
    with pytest.raises(InvalidInputError, match=rf"{name} is above 0 \(impossible for a log-probability\) at 16 of 16"):
        as_floats(metrics)
    with pytest.raises(InvalidInputError, match=f"{name} is above 0"):
        policy_loss(inputs, non_finite="raise")


def test_log_probabilities_that_rounding_lifts_above_zero_are_used() -> None:
    """log_softmax in bfloat16 of logits in 16 .. 32 may end a step of 2^-3 above 0."""
    lifted = torch.full((1, 4), 2.0**-3)
    mask = torch.ones(1, 4, dtype=torch.bool)
    inputs = PolicyLossInputs(log_prob=lifted, old_log_prob=lifted, advantages=torch.ones(1, 4), response_mask=mask)
    assert policy_loss(inputs, non_finite="raise").loss.item() == -1.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"response_mask": torch.full((4, 50), 0.5)}, "response_mask holds values other than 0 and 1"),
        ({"old_log_prob": with_bad(-math.inf, 200)}, "old_log_prob is not finite"),
        ({"rollout_is_weights": with_bad(-1.0, 200, of=1.0)}, "rollout_is_weights is negative or not finite"),
        ({"router_shift_ratio": with_bad(1.01, 100)}, r"router_shift_ratio is outside \[0, 1\]"),
    ],
)
def test_who_never_logs_is_warned_of_a_loss_of_nothing(changes: dict[str, Tensor], named: str) -> None:
    values = {name: torch.full((4, 50), -0.5) for name in ("log_prob", "old_log_prob", "advantages")}
    values |= {"response_mask": torch.ones(4, 50), "router_shift_ratio": torch.ones(4, 50)} | changes
    with pytest.warns(UserWarning, match=f"{named} at more than 1% of the valid tokens: the loss leaves them out"):
        policy_loss(PolicyLossInputs(**values))


def test_a_warning_of_every_step_has_one_text_so_that_python_shows_it_once() -> None:
    texts = set()
    for lost in (3, 9):
        with pytest.warns(UserWarning, match="response_mask") as caught:
            policy_loss(PolicyLossInputs(**(batch() | {"response_mask": torch.full((3, 5), 0.5 + lost)})))
        texts |= {str(each.message) for each in caught}
    assert len(texts) == 1


def test_a_gpus_counts_are_read_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of the event: nothing is said before the copy is there, and then by the next call."""

    class Event:
        arrived = False

        def record(self) -> None: ...

        def query(self) -> bool:
            return Event.arrived

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(tensors, "_ON_THE_WAY", deque())
    all_lost, none_lost = {"mask": torch.tensor([5, 5])}, {"mask": torch.tensor([0, 5])}
    tensors.say_losses(all_lost)
    tensors.say_losses(none_lost)
    Event.arrived = True
    with pytest.warns(UserWarning, match="mask at more than 1% of the valid tokens"):
        tensors.say_losses(none_lost)
    tensors.say_losses(none_lost)
