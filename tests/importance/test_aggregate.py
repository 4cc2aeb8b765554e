"""The five aggregation modes on a batch small enough to add up by hand."""

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import LOSS_AGG_MODES, BatchTotals, agg_loss
from moe_rl.importance.sequences import SequenceLayout

LOSS = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 64.0, 64.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])

# Valid: 1, 2 | 8 | none. Sum 11 over 3 tokens and 2 sequences with a valid token.
BY_HAND = {
    "token-mean": 11 / 3,
    "token-sum": 11.0,
    "seq-mean-token-sum": (3 + 8) / 2,
    "seq-mean-token-sum-norm": (3 + 8) / 2 / 3,  # the padded width is 3
    "seq-mean-token-mean": (1.5 + 8) / 2,
}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_each_mode_by_hand(mode: str) -> None:
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(BY_HAND[mode])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_totals_replace_the_counts_and_dp_size_multiplies(mode: str) -> None:
    # The whole batch has 6 tokens in 4 sequences, the constant is 5, two ranks are averaged by the framework.
    totals = BatchTotals(batch_num_tokens=6, global_batch_size=4, dp_size=2, loss_scale_factor=5.0)
    by_hand = {
        "token-mean": 2 * 11 / 6,
        "token-sum": 2 * 11.0,
        "seq-mean-token-sum": 2 * 11 / 4,
        "seq-mean-token-sum-norm": 2 * 11 / 4 / 5,
        "seq-mean-token-mean": 2 * (1.5 + 8) / 4,
    }
    assert agg_loss(LOSS, MASK, mode, totals=totals).item() == pytest.approx(by_hand[mode])


def test_totals_count_valid_tokens_and_sequences() -> None:
    totals = BatchTotals.from_mask(MASK)
    assert (totals.batch_num_tokens, totals.global_batch_size) == (3, 2)
    packed = BatchTotals.from_mask(MASK.reshape(-1), cu_seqlens=torch.tensor([0, 3, 3, 6, 9]))
    assert (packed.batch_num_tokens, packed.global_batch_size) == (3, 2)
    doubled = BatchTotals.from_mask(MASK, sum_over_ranks=lambda counts: 2 * counts)
    assert (doubled.batch_num_tokens, doubled.global_batch_size) == (6, 4)


def test_the_norm_mode_on_packed_tensors_needs_its_constant() -> None:
    packed = {"loss_mat": LOSS.reshape(-1), "loss_mask": MASK.reshape(-1), "cu_seqlens": torch.tensor([0, 3, 6, 9])}
    with pytest.raises(InvalidInputError, match=r"needs BatchTotals.loss_scale_factor"):
        agg_loss(**packed, loss_agg_mode="seq-mean-token-sum-norm")
    totals = BatchTotals(batch_num_tokens=3, global_batch_size=2, loss_scale_factor=3)
    loss = agg_loss(**packed, loss_agg_mode="seq-mean-token-sum-norm", totals=totals)
    assert loss.item() == pytest.approx(BY_HAND["seq-mean-token-sum-norm"])


def test_impossible_totals_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"dp_size must be >= 1, got 0"):
        BatchTotals(batch_num_tokens=1, global_batch_size=1, dp_size=0)
    with pytest.raises(InvalidInputError, match=r"loss_scale_factor must be > 0"):
        BatchTotals(batch_num_tokens=1, global_batch_size=1, loss_scale_factor=0.0)


def test_cu_seqlens_must_describe_the_batch() -> None:
    tokens = torch.zeros(4)
    for cu_seqlens, message in (
        (torch.tensor([0, 3]), "from 0 to the number of tokens .4."),
        (torch.tensor([0, 3, 2, 4]), "must not decrease"),
        (torch.tensor([0.0, 4.0]), "must be integers"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            SequenceLayout.of(tokens, cu_seqlens)
    with pytest.raises(InvalidInputError, match=r"padded"):
        SequenceLayout.of(tokens.reshape(2, 2), torch.tensor([0, 4]))
    with pytest.raises(InvalidInputError, match=r"got 3 dimensions"):
        SequenceLayout.of(tokens.reshape(2, 2, 1), None)


def test_packed_sequences_sum_max_and_run_like_rows() -> None:
    layout = SequenceLayout.of(torch.zeros(5), torch.tensor([0, 2, 2, 5]))
    values = torch.tensor([1.0, 2.0, -3.0, -4.0, -5.0])
    mask = torch.tensor([True, True, False, True, True])
    assert layout.sum(values).tolist() == [3.0, 0.0, -12.0]
    assert layout.max(values, mask).tolist() == [2.0, 0.0, -4.0]
    assert layout.cumsum(values).tolist() == [1.0, 3.0, -3.0, -7.0, -12.0]
    assert layout.expand(torch.tensor([7.0, 8.0, 9.0]), values).tolist() == [7.0, 7.0, 9.0, 9.0, 9.0]


def test_vapos_positive_example_term_as_the_page_writes_it() -> None:
    # Only the first response is right: -(ln 0.5 + ln 0.25) / 2 = 1.5 ln 2, times 0.1; none right: 0.
    log_prob = torch.tensor([[0.5, 0.25], [0.1, 0.9]], dtype=torch.float64).log().requires_grad_()
    correct = torch.tensor([[True], [False]]).expand(2, 2)
    loss = 0.1 * agg_loss(-log_prob, correct, "token-mean")
    assert loss.item() == pytest.approx(0.15 * 0.6931471806)
    (grad,) = torch.autograd.grad(loss, log_prob)
    assert torch.equal(grad, torch.tensor([[-0.05, -0.05], [0.0, 0.0]], dtype=torch.float64))
    assert agg_loss(-log_prob, torch.zeros(2, 2), "token-mean").item() == 0.0
