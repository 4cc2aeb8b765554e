"""The router shift in NeMo-RL's own loop and loss, from a checkout that `FRAMEWORK_SOURCES` names."""

import ast
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkouts import SOURCES, needs_checkout

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import PolicyLossInputs, RouterShiftUse, policy_loss
from tests.frameworks import own_losses
from tests.frameworks import record_losses as record

ROOT = SOURCES / "nemo_rl" / "nemo_rl"


@needs_checkout("nemo_rl")
@pytest.mark.framework
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            each, marks=pytest.mark.multi_rank(world_size=2, case=f"nemo_cases.{each}", launch="nemo"), id=each
        )
        for each in ("tensor_parallel", "pipeline_parallel")
    ],
)
def test_advantages_are_weighed_by_the_gamma_of_a_brute_force(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["micro_batches"] == (2 if rank["last"] else 0)
        assert rank["old"], "the log-prob pass is as it was"
        assert rank["unmoved"], "gamma is 1, bit for bit, after a reference's pass by other weights too"
        assert rank["difference"] <= 1e-5
        assert rank["least"] < 0.99, "the routers have moved"


@needs_checkout("nemo_rl")
@pytest.mark.parametrize(
    ("setting", "objective", "options"),
    [
        ({}, "ppo", {"clip_ratio_c": None}),
        ({"ratio_clip_c": 3.0}, "ppo", {}),
        ({"sequence_level_importance_ratios": True, "token_level_loss": False, "ratio_clip_min": 3e-4,
          "ratio_clip_max": 4e-4}, "gspo", {}),
    ],
)  # fmt: skip
def test_weighing_its_advantages_is_gamma_after_the_clip(
    setting: dict[str, Any], objective: str, options: dict[str, Any]
) -> None:
    b = record.recorded_batch()
    gamma = torch.rand(b["log_prob"].shape, generator=torch.Generator().manual_seed(2)).double().clamp(min=0.3)
    own = own_losses.nemo_rls_loss(ROOT.parents[1])
    names = {"advantages": "advantages", "prev_logprobs": "old_log_prob", "generation_logprobs": "rollout_log_prob"}
    data = {name: torch.nn.functional.pad(b[ours].double(), (1, 0)) for name, ours in names.items()}
    data["advantages"][:, 1:] *= gamma
    data["token_mask"] = torch.nn.functional.pad(b["response_mask"].double(), (1, 0))
    data["sample_mask"] = torch.ones(len(record.LENGTHS), dtype=torch.float64)
    log_prob = b["log_prob"].double().requires_grad_()
    config = own.ClippedPGLossConfig(reference_policy_kl_penalty=0.0, **setting)
    theirs, _ = own.ClippedPGLossFn(config)(log_prob, data, torch.tensor(4.0), torch.tensor(float(sum(record.LENGTHS))))

    def ours(weight: torch.Tensor) -> torch.Tensor:
        inputs = {name: b[name] for name in ("old_log_prob", "advantages", "response_mask")}
        return policy_loss(
            PolicyLossInputs(log_prob=log_prob, router_shift_ratio=weight, **inputs),
            objective=objective,
            router_shift=RouterShiftUse(order="after-clip"),
            loss_agg_mode="token-mean" if objective == "ppo" else "seq-mean-token-mean",
            **options,
        ).loss

    torch.testing.assert_close(theirs, ours(gamma))
    if objective == "gspo":  # its gradient goes through the sequence's ratio alone, and so gamma's mean acts
        mask = b["response_mask"]
        gamma = ((gamma * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)).expand_as(gamma)
    torch.testing.assert_close(*(torch.autograd.grad(each, log_prob)[0] for each in (theirs, ours(gamma))))


@needs_checkout("nemo_rl")
def test_its_loop_calls_what_is_wrapped_and_log_probs_come_before_the_references() -> None:
    """What the adapter relies on, read from the checkout's files."""
    train = ast.parse((ROOT / "models/megatron/train.py").read_text())
    loop = next(each for each in train.body if getattr(each, "name", "") == "megatron_forward_backward")
    calls = [ast.unparse(each) for each in ast.walk(loop) if isinstance(each, ast.Call)]
    assert "get_forward_backward_func()" in calls
    (schedule,) = [each for each in calls if each.startswith("forward_backward_func(")]
    for keyword in ("data_iterator=", "model=", "num_microbatches=", "forward_only="):
        assert keyword in schedule
    text = (ROOT / "algorithms/grpo.py").read_text()
    positions = [i for i in range(len(text)) if text.startswith("policy.get_reference_policy_logprobs(", i)]
    assert positions
    for position in positions:
        assert "policy.get_logprobs(" in text[position - 3000 : position]


def test_packed_rows_are_found_by_their_sequences() -> None:
    """Two sequences of 3 and 5 tokens, each filled up to a multiple of 4, one after the other."""
    pytest.importorskip("megatron.core", reason="rows are cut as Megatron's groups say")
    from moe_rl.frameworks.nemo_rl import attach as nemo

    params = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 8]), cu_seqlens_q_padded=torch.tensor([0, 4, 12]))
    ids = torch.tensor([[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]])
    batch = {"input_ids": ids, "input_lengths": torch.tensor([3, 5])}
    micro_batch = SimpleNamespace(data_dict=batch, packed_seq_params=params, attention_mask=None)
    run = SimpleNamespace(keys=lambda tokens, forward_only: [torch.tensor([10, 11, 12]), torch.arange(20, 25)])
    whole = SimpleNamespace(tp_size=1, tp_rank=0, cp_size=1, cp_rank=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_rl.megatron.routed_rows.RowSlice.current", classmethod(lambda cls: cls(**vars(whole))))
        ((keys, rows),) = nemo._keys_of(run, [micro_batch], True)
    assert [each.tolist() for each in keys] == [[10, 11, 12], [20, 21, 22, 23, 24]]
    assert np.array_equal(rows, [10, 11, 12, -1, 20, 21, 22, 23, 24, -1, -1, -1])
    assert nemo._padded(batch, keys, predicting=True).tolist() == [[-1, 10, 11, -1, -1], [-1, 20, 21, 22, 23]]
    micro_batch.attention_mask = torch.ones(2, 5)
    with pytest.raises(InvalidInputError, match="models that pack sequences themselves"):
        nemo._keys_of(run, [micro_batch], True)


def test_its_loss_is_not_made_where_no_pass_of_old_log_probabilities_runs() -> None:
    from moe_rl.frameworks.nemo_rl import attach as nemo

    class ClippedPGLossFn:
        """A stand-in: NeMo-RL's reads its configuration into attributes."""

        def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False) -> None:
            self.cfg = cfg

    losses: Any = SimpleNamespace(ClippedPGLossFn=ClippedPGLossFn)
    nemo.refuse_on_policy(losses)
    assert losses.ClippedPGLossFn(SimpleNamespace(force_on_policy_ratio=False)).cfg
    with pytest.raises(InvalidInputError, match="but force_on_policy_ratio skips it"):
        losses.ClippedPGLossFn(SimpleNamespace(force_on_policy_ratio=True))
