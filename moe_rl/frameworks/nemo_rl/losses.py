"""NeMo-RL: a loss object that plugs in where its `ClippedPGLossFn` does, with every objective.

    loss_fn = PolicyLoss("gspo", token_level_loss=False, reference_policy_kl_penalty=0.01)

The policy term is an objective, the importance-sampling correction a `RolloutCorrectionConfig`, the KL against the
reference model and the metrics are NeMo-RL's. Source: NVIDIA-NeMo/RL:nemo_rl/algorithms/loss/loss_functions.py,
`ClippedPGLossFn`, and interfaces.py. Its filtered-logprob mask needs no counterpart: tokens whose log-probability is
not finite are masked and counted. With sequence-level ratios its own `sampling_importance_ratio` comes out multiplied
by the number of samples (a broadcast); ours does not.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.diagnostics import KlEstimator, kl_estimate
from moe_rl.importance.objectives import Objective, make_objective
from moe_rl.importance.policy_loss import PolicyLossInputs, policy_token_loss
from moe_rl.importance.rollout_config import RolloutCorrectionConfig
from moe_rl.importance.rollout_correction import apply_rollout_correction
from moe_rl.importance.router_shift import RouterShiftUse
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import bounded_exp, silenced, usable_mask, working_dtype

_LARGEST_KL = 10.0
"""NeMo-RL's `kl_output_clamp_value`."""


class PolicyLoss:
    """NeMo-RL's `LossFunction`, on next-token log-probabilities [B, S - 1]."""

    def __init__(
        self,
        objective: str | Objective = "grpo",
        *,
        token_level_loss: bool = True,
        rollout_correction: RolloutCorrectionConfig | None = None,
        reference_policy_kl_penalty: float = 0.0,
        reference_policy_kl_type: KlEstimator = "k3",
        force_on_policy_ratio: bool = False,
        router_shift: RouterShiftUse | None = None,
        **options: Any,
    ) -> None:
        """Take an objective with its `options`; the other names are NeMo-RL's.

        `token_level_loss`: mean over tokens, else over sequences of their means. `force_on_policy_ratio`: the current
        policy stands for the old one, right with one update per rollout.
        """
        interfaces = importlib.import_module("nemo_rl.algorithms.loss.interfaces")
        self.input_type = interfaces.LossInputType.LOGPROB
        self.loss_type = interfaces.LossType.TOKEN_LEVEL if token_level_loss else interfaces.LossType.SEQUENCE_LEVEL
        self._token_level, self._on_policy = token_level_loss, force_on_policy_ratio
        self._rule, self._use = make_objective(objective, options), router_shift
        self._correction = rollout_correction
        self._kl = (reference_policy_kl_penalty, reference_policy_kl_type)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, metrics); sums are divided by the global counts, so that micro-batches add up.

        `data` holds `advantages`, `prev_logprobs` (not with `force_on_policy_ratio`), `generation_logprobs`,
        `token_mask`, with a KL penalty `reference_policy_logprobs`, with a router shift `router_shift_ratio`, all
        [B, S], and `sample_mask` [B]; their first column is dropped, as in NeMo-RL.
        """
        seqs, toks = (torch.as_tensor(count).clamp(min=1e-8) for count in (global_valid_seqs, global_valid_toks))
        mask = (data["token_mask"][:, 1:] != 0) & (data["sample_mask"] != 0).unsqueeze(-1)
        prev = next_token_logprobs.detach() if self._on_policy else data["prev_logprobs"][:, 1:]
        generation = data["generation_logprobs"][:, 1:]
        weights: Tensor | None = None
        metrics: dict[str, Tensor] = {}
        if self._correction is not None:
            weights, mask, metrics = apply_rollout_correction(
                self._correction, prev, generation, mask, context_parallel=_WHOLE
            )
        gamma = data.get("router_shift_ratio")
        tokens = policy_token_loss(
            PolicyLossInputs(
                log_prob=next_token_logprobs,
                old_log_prob=prev,
                advantages=data["advantages"][:, 1:],
                response_mask=mask,
                rollout_is_weights=weights,
                rollout_log_prob=generation,
                router_shift_ratio=None if gamma is None else gamma[:, 1:],
                context_parallel=_WHOLE,
            ),
            self._rule,
            router_shift=self._use,
        )
        loss = self._reduced(tokens.loss, data, seqs, toks)
        penalty, estimator = self._kl
        if penalty != 0:
            reference = data["reference_policy_logprobs"][:, 1:]
            kl = penalty * self._reduced(
                _reference_kl(next_token_logprobs, reference, tokens.mask, estimator), data, seqs, toks
            )
            loss, metrics = loss + kl, metrics | {"kl_penalty": kl}
        metrics = metrics | tokens.metrics | _mismatch(next_token_logprobs, prev, generation, tokens.mask, toks)
        if weights is not None:
            metrics["sampling_importance_ratio"] = (weights * tokens.mask).sum() / toks
        metrics |= {"loss": loss, "num_valid_samples": (data["sample_mask"] != 0).sum()}
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _reduced(self, values: Tensor, data: Mapping[str, Any], seqs: Tensor, toks: Tensor) -> Tensor:
        """Sum over tokens, or over sequences of their means, divided by the global count."""
        if self._token_level:
            return values.sum() / toks
        counts: Tensor = (data["token_mask"][:, 1:] != 0).sum(dim=1).clamp(min=1)
        return (values.sum(dim=1) / counts).sum() / seqs


_WHOLE = ContextParallel.whole()


def _reference_kl(current: Tensor, reference: Tensor, mask: Tensor, estimator: KlEstimator) -> Tensor:
    """KL to the reference model per token, times a 1 whose gradient is that of the token's score."""
    usable = usable_mask(mask, {"reference": reference})
    dtype = working_dtype(current, reference)
    ours, theirs = silenced(current, usable, dtype), silenced(reference, usable, dtype)
    kl = kl_estimate(ours, theirs, estimator, importance_ratio=(ours - ours.detach()).exp())
    return kl.clamp(-_LARGEST_KL, _LARGEST_KL) * usable


@torch.no_grad()
def _mismatch(current: Tensor, prev: Tensor, generation: Tensor, mask: Tensor, toks: Tensor) -> dict[str, Tensor]:
    """NeMo-RL's metrics of trainer against engine, under its names."""
    usable = usable_mask(mask, {"prev": prev, "generation": generation})
    dtype = working_dtype(current, prev, generation)
    curr, prev, generation = (silenced(each, usable, dtype) for each in (current, prev, generation))

    def mean(values: Tensor) -> Tensor:
        return (values * usable).sum() / toks

    ratio = bounded_exp(curr - prev)
    mixture = torch.logaddexp(prev, generation) - torch.log(torch.tensor(2.0))
    js = 0.5 * (kl_estimate(mixture, prev, "k3") + kl_estimate(mixture, generation, "k3"))
    layout = SequenceLayout.of(usable, None, _WHOLE)
    return {
        "probs_ratio": mean(ratio),
        "probs_ratio_min": layout.token_min(ratio, usable),
        "probs_ratio_max": layout.token_max(ratio, usable),
        "token_mult_prob_error": mean(bounded_exp((generation - prev).abs())),
        "gen_kl_error": mean(kl_estimate(generation, prev, "k3")),
        "policy_kl_error": mean(kl_estimate(prev, generation, "k3")),
        "js_divergence_error": mean(js),
        "approx_entropy": -mean(bounded_exp(curr - generation) * curr),
    }
