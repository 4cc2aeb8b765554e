"""slime's mis.py and its `opsm_clipfrac` beside ours: by its rules restated as loops, and its own code where it is."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.slime.losses import _config, _dropped_sequences
from moe_rl.importance import (
    ContextParallel,
    PolicyLossInputs,
    RolloutCorrectionConfig,
    apply_rollout_correction,
)
from tests.frameworks.own_losses import functions

LENGTHS = (5, 3, 4, 2, 6, 1)
ROWS = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
UPPER, LOWER = 1.3, 0.7


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of trainer and engine, and a mask with an empty response and tokens of a tool."""
    generator = torch.Generator().manual_seed(4)
    old = -1.0 - torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64)
    rollout = (old + 0.4 * torch.randn(old.shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    mask = torch.ones(sum(LENGTHS))
    mask[ROWS[3] : ROWS[4]] = 0  # the fourth response is empty
    mask[ROWS[4] + 1 : ROWS[4] + 3] = 0  # in the fifth a tool speaks
    return old, rollout, mask


def split(values: Tensor) -> list[Tensor]:
    return list(values.split(list(LENGTHS)))


def by_hand(level: str, mode: str, normalize: bool) -> Tensor:
    """mis.py's `compute_mis_weights`: sample by sample, and the mean over all samples."""
    weights = []
    for old, rollout, mask in zip(*(split(each) for each in batch()), strict=True):
        difference = old - rollout
        log_ratio = difference if level == "token" else (difference * mask).sum().expand_as(difference)
        weight = log_ratio.exp().clamp(0.0 if mode == "truncate" else LOWER, UPPER)
        weights.append(weight * mask)
    if normalize:
        masks = split(batch()[2])
        if level == "token":
            mean = sum(each.sum() for each in weights) / sum(each.sum() for each in masks)
        else:
            mean = sum(w.sum() / m.sum().clamp(min=1) for w, m in zip(weights, masks, strict=True)) / len(weights)
        weights = [each / mean for each in weights]
    return torch.cat(weights)


def ours(level: str, mode: str, normalize: bool, **changes: Any) -> Tensor:
    """Through the reading of slime's entry."""
    options = {"rollout_is": level, "rollout_is_threshold": UPPER, "rollout_is_batch_normalize": normalize}
    if mode == "clip":
        options["rollout_is_lower_bound"] = LOWER
    weights, _, _ = apply_rollout_correction(
        _config(options | changes), *batch(), cu_seqlens=torch.tensor(ROWS),
        context_parallel=ContextParallel.whole(),
    )  # fmt: skip
    assert weights is not None
    return weights


MODES = [(level, mode, on) for level in ("token", "sequence") for mode in ("truncate", "clip") for on in (False, True)]
every_mode = pytest.mark.parametrize(("level", "mode", "normalize"), MODES)


@every_mode
def test_weights_are_slimes_in_every_mode(level: str, mode: str, normalize: bool) -> None:
    torch.testing.assert_close(ours(level, mode, normalize), by_hand(level, mode, normalize), rtol=1e-6, atol=1e-7)


def test_verls_mean_leaves_the_empty_sequence_out_by_which_the_two_differ() -> None:
    """One of six: the mean is 6 / 5 of slime's."""
    theirs, verls = (
        by_hand("sequence", "truncate", True),
        ours("sequence", "truncate", True, rollout_is_count_empty=False),
    )
    torch.testing.assert_close(verls * 6 / 5, theirs, rtol=1e-6, atol=1e-7)


def test_a_lower_bound_beside_a_band_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"with rollout_is_lower_bound 0.5, rollout_is_threshold must be a single number"
    ):
        RolloutCorrectionConfig(rollout_is_lower_bound=0.5, rollout_is_threshold="0.2_5.0")
    with pytest.raises(
        InvalidInputError, match=r"with rollout_is_lower_bound 3, rollout_is_threshold must be a single number"
    ):
        RolloutCorrectionConfig(rollout_is_lower_bound=3.0)


ADVANTAGES = torch.tensor([1.0, -1.0, -0.5, -1.0, -0.7, 0.2], dtype=torch.float64).repeat_interleave(
    torch.tensor(LENGTHS)
)


def slimes_clipfrac(
    log_prob: Tensor, old: Tensor, mask: Tensor, delta: float, advantages: Tensor = ADVANTAGES
) -> float:
    """`compute_opsm_mask` restated."""
    total = 0.0
    for current, before, keep, advantage in zip(
        *(split(each) for each in (log_prob, old, mask, advantages)), strict=True
    ):
        drift = ((before - current) * keep).sum() / keep.sum().clamp(min=1)
        total += float(((advantage < 0) & (drift > delta)).sum() / keep.sum().clamp(min=1))
    return total


def drifted() -> tuple[Tensor, Tensor, Tensor]:
    old, _, mask = batch()
    # The second and the fifth fall, the third rises: the fifth has 6 tokens, of which 4 are its own.
    moved = torch.tensor([-0.1, -0.1, 0.1, -0.1, -0.2, -0.1], dtype=torch.float64)
    return old + moved.repeat_interleave(torch.tensor(LENGTHS)), old, mask


def test_opsm_clipfrac_is_slimes_number() -> None:
    log_prob, old, mask = drifted()
    inputs = PolicyLossInputs(
        log_prob=log_prob, old_log_prob=old, advantages=ADVANTAGES, response_mask=mask, cu_seqlens=torch.tensor(ROWS)
    )
    assert float(_dropped_sequences(inputs, 0.05)) == pytest.approx(1.0 + 6 / 4)
    assert float(_dropped_sequences(inputs, 0.05)) == pytest.approx(slimes_clipfrac(log_prob, old, mask, 0.05))
    assert float(_dropped_sequences(inputs, 0.5)) == 0.0
    # With a critic, tokens of one sequence differ: those that are not punished are not counted.
    advantages = ADVANTAGES.clone()
    advantages[ROWS[5] - 2 : ROWS[5]] = torch.tensor([0.0, 0.3])
    assert float(_dropped_sequences(replace(inputs, advantages=advantages), 0.05)) == pytest.approx(1.0 + 4 / 4)
    assert slimes_clipfrac(log_prob, old, mask, 0.05, advantages) == pytest.approx(1.0 + 4 / 4)


SOURCES = Path(os.environ.get("FRAMEWORK_SOURCES", "no-such-folder")) / "slime" / "slime"
its_own_code = pytest.mark.skipif(
    not SOURCES.is_dir(), reason="FRAMEWORK_SOURCES names no folder with a checkout of slime (it is on no registry)"
)


@its_own_code
@every_mode
def test_the_loops_are_its_own_mis(level: str, mode: str, normalize: bool) -> None:
    names = ("masked_sum", "masked_mean", "masked_min", "masked_max", "metrics_append", "calculate_veto_mask")
    file = SOURCES.parent / "examples" / "train_infer_mismatch_helper" / "mis.py"
    module = functions(file, *names, "truncate", "clip", "mask", "add_ppl_metrics", "compute_mis_weights")
    args = SimpleNamespace(
        use_tis=True, use_rs=False, tis_level=level, tis_mode=mode, tis_lower_bound=LOWER, tis_upper_bound=UPPER,
        rs_lower_bound=None, rs_upper_bound=None, tis_batch_normalize=normalize,
    )  # fmt: skip
    old, rollout, mask = (split(each) for each in batch())
    weights, _, _ = module.compute_mis_weights(args, train_log_probs=old, rollout_log_probs=rollout, loss_masks=mask)
    torch.testing.assert_close(torch.cat(weights), by_hand(level, mode, normalize), rtol=1e-6, atol=1e-7)


@its_own_code
def test_the_loop_is_its_own_opsm() -> None:
    module = functions(SOURCES / "utils" / "ppo_utils.py", "compute_opsm_mask", Namespace=Any)
    log_prob, old, mask = drifted()
    _, count = module.compute_opsm_mask(
        SimpleNamespace(opsm_delta=0.05), *map(split, (log_prob, old, ADVANTAGES, mask))
    )
    assert float(count) == pytest.approx(slimes_clipfrac(log_prob, old, mask, 0.05))
