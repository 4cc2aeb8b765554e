"""Every objective as a reader of its paper would write it: a few lines of torch, no check of any input.

`benchmarks/bench_importance.py --against-plain` takes their time, and a test compares their losses and gradients with
`policy_loss`: nothing here comes from moe_rl. A batch holds tensors [B, S] under the names of `PolicyLossInputs`; all
options are the defaults. `log(name, values)` says what a framework would report, as the function that makes it: without
metrics it is not called.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Batch = dict[str, Tensor]
Log = Callable[[str, Callable[[], Tensor]], None]
Plain = Callable[[Batch, Log], Tensor]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over valid tokens as frameworks write it."""
    return (values * mask).sum() / (mask.sum() + 1e-8)


def mean_of_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over sequences of the mean over valid tokens."""
    return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def _ratio(b: Batch) -> Tensor:
    return (b["log_prob"] - b["old_log_prob"]).clamp(-20.0, 20.0).exp()


def _fraction(log: Log, name: str, marks: Callable[[], Tensor], mask: Tensor) -> None:
    log(f"actor/{name}", lambda: masked_mean(marks().float(), mask))


def _surrogate(b: Batch, log: Log, ratio: Tensor, clipped_ratio: Tensor, dual: Tensor | float | None) -> Tensor:
    advantages, mask = b["advantages"], b["response_mask"]
    plain, clipped = -advantages * ratio, -advantages * clipped_ratio
    loss = torch.maximum(plain, clipped)
    _fraction(log, "pg_clipfrac", lambda: clipped > plain, mask)
    if dual is None:
        return loss
    cap = -advantages * dual
    _fraction(log, "pg_clipfrac_lower", lambda: (loss > cap) & (advantages < 0), mask)
    return torch.where(advantages < 0, torch.min(loss, cap), loss)


def _ppo_tokens(b: Batch, log: Log, high: float = 1.2, dual: float | None = 3.0) -> Tensor:
    ratio = _ratio(b)
    return _surrogate(b, log, ratio, ratio.clamp(0.8, high), dual)


def ppo(b: Batch, log: Log) -> Tensor:
    """PPO with dual clip."""
    return masked_mean(_ppo_tokens(b, log), b["response_mask"])


def grpo(b: Batch, log: Log) -> Tensor:
    """PPO averaged per sequence first."""
    return mean_of_means(_ppo_tokens(b, log), b["response_mask"])


def dapo(b: Batch, log: Log) -> Tensor:
    """PPO with a wider upper clip."""
    return masked_mean(_ppo_tokens(b, log, high=1.28), b["response_mask"])


def _through_tokens(b: Batch, log_ratio: Tensor) -> Tensor:
    log_prob = b["log_prob"]
    return (log_prob - log_prob.detach() + log_ratio.detach()).clamp(max=10.0).exp()


def _gspo_tokens(b: Batch, log: Log) -> Tensor:
    mask = b["response_mask"]
    mean = ((b["log_prob"] - b["old_log_prob"]) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = _through_tokens(b, mean)
    return _surrogate(b, log, ratio, ratio.clamp(1 - 3e-4, 1 + 4e-4), None)


def gspo(b: Batch, log: Log) -> Tensor:
    """GSPO."""
    return mean_of_means(_gspo_tokens(b, log), b["response_mask"])


def luspo(b: Batch, log: Log) -> Tensor:
    """GSPO summed over the tokens of a sequence."""
    return (_gspo_tokens(b, log) * b["response_mask"]).sum(-1).mean()


def gmpo(b: Batch, log: Log) -> Tensor:
    """GMPO."""
    mask, advantages = b["response_mask"], b["advantages"]
    difference, counts, sign = b["log_prob"] - b["old_log_prob"], mask.sum(-1).clamp(min=1), advantages.sign()
    clipped = difference.clamp(-0.4, 0.4)
    bounded = sign * torch.minimum(sign * difference, sign * clipped)
    ratio = ((bounded * mask).sum(-1) / counts).exp()
    _fraction(log, "pg_clipfrac", lambda: (clipped != difference) & (advantages > 0), mask)
    _fraction(log, "pg_clipfrac_lower", lambda: (clipped != difference) & (advantages < 0), mask)
    return (-(advantages * mask).sum(-1) / counts * ratio).mean()


def vespo(b: Batch, log: Log) -> Tensor:
    """VESPO."""
    mask, advantages = b["response_mask"], b["advantages"]
    difference = (b["log_prob"] - b["old_log_prob"]).detach().clamp(-20.0, 20.0)
    log_w = (difference * mask).sum(-1, keepdim=True).clamp(-18.420680743952367, 20.0)
    w = log_w.exp()
    phi = torch.where(advantages >= 0, (2.0 * log_w + 3.0 * (1.0 - w)).exp(), (3.0 * log_w + 2.0 * (1.0 - w)).exp())
    return masked_mean(-phi * advantages * b["log_prob"], mask)


def cispo(b: Batch, log: Log) -> Tensor:
    """CISPO."""
    return _weighted(b, log, -9.0, 1.2)


def scale_rl(b: Batch, log: Log) -> Tensor:
    """ScaleRL's CISPO."""
    return _weighted(b, log, 0.0, 5.0)


def _weighted(b: Batch, log: Log, low: float, high: float) -> Tensor:
    ratio = _ratio(b)
    weight = ratio.clamp(low, high)
    _fraction(log, "pg_clipfrac", lambda: weight != ratio, b["response_mask"])
    return masked_mean(-weight.detach() * b["advantages"] * b["log_prob"], b["response_mask"])


def sapo(b: Batch, log: Log) -> Tensor:
    """SAPO."""
    advantages = b["advantages"]
    tau = torch.where(advantages > 0, 1.0, 1.05)
    loss = -torch.sigmoid(tau * (_ratio(b) - 1.0)) * 4.0 / tau * advantages
    return mean_of_means(loss, b["response_mask"])


def _dppo(b: Batch, log: Log, keep: Tensor) -> Tensor:
    mask = b["response_mask"]
    ratio = _ratio(b).detach()
    _fraction(log, "pg_clipfrac", lambda: ~keep, mask)
    _fraction(log, "pg_clipfrac_lower", lambda: (ratio > 20.0) & keep, mask)
    return masked_mean(-b["advantages"] * ratio.clamp(max=20.0) * keep * b["log_prob"], mask)


def _near(b: Batch) -> Tensor:
    change = b["log_prob"].detach().exp() - b["old_log_prob"].exp()
    return torch.where(b["advantages"] > 0, change <= 0.2, change >= -0.2)


def dppo_tv(b: Batch, log: Log) -> Tensor:
    """DPPO with total variation."""
    return _dppo(b, log, _near(b))


def dppo_kl(b: Batch, log: Log) -> Tensor:
    """DPPO with the Bernoulli KL."""
    log_p, log_q = b["log_prob"].detach(), b["old_log_prob"]
    p, q = log_p.exp(), log_q.exp()
    divergence = q * (log_q - log_p) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    inwards = torch.where(b["advantages"] > 0, p <= q, p >= q)
    return _dppo(b, log, (divergence <= 0.05) | inwards)


def ctpo(b: Batch, log: Log) -> Tensor:
    """CTPO, prefix product."""
    mask = b["response_mask"]
    difference = (b["log_prob"] - b["old_log_prob"]).detach().clamp(-20.0, 20.0)
    prefix, scale = (difference * mask).cumsum(-1), mask.cumsum(-1).clamp(min=1).sqrt()
    log_ratio = (b["log_prob"] - b["log_prob"].detach() + prefix).clamp(max=10.0)
    clipped = torch.clamp(log_ratio, -0.025 * scale, 0.05 * scale)
    return masked_mean(_surrogate(b, log, log_ratio.exp(), clipped.exp(), (0.05 * scale).exp()), mask)


def aspo(b: Batch, log: Log) -> Tensor:
    """ASPO."""
    ratio, advantages, mask = _ratio(b), b["advantages"], b["response_mask"]
    lower, upper = ratio.clamp(min=0.8), ratio.clamp(max=1.2)
    bad = advantages < 0
    weight = torch.where(bad, lower, upper / upper.detach() ** 2)
    large = weight.detach() > 3.0
    _fraction(log, "pg_clipfrac", lambda: torch.where(bad, lower != ratio, upper != ratio), mask)
    _fraction(log, "pg_clipfrac_lower", lambda: large, mask)
    return masked_mean(-advantages * torch.where(large, 3.0 * b["log_prob"], weight), mask)


def dcpo(b: Batch, log: Log) -> Tensor:
    """DCPO."""
    ratio, q = _ratio(b), b["old_log_prob"].exp()
    low = (1 + (1 - 4 * 0.1 / q).clamp(min=0).sqrt()) / 2
    high = ((1 + (1 + 4 * 0.2 / q).sqrt()) / 2).clamp(max=10.0)
    return masked_mean(_surrogate(b, log, ratio, ratio.clamp(low, high), 3.0), b["response_mask"])


def decoupled_ppo(b: Batch, log: Log) -> Tensor:
    """Decoupled PPO, tokens with a behavior weight above 5 left out."""
    mask, gap = b["response_mask"], (b["old_log_prob"] - b["rollout_log_prob"]).clamp(-20.0, 20.0)
    weight = gap.exp()
    far = weight > 5.0
    weight = weight * ~far
    log("actor/behave_imp_weight", lambda: masked_mean(weight, mask & ~far))
    log("actor/behave_approx_kl", lambda: masked_mean(gap, mask))
    _fraction(log, "filtered_fraction", lambda: far, mask)
    return masked_mean(weight * _ppo_tokens(b, log, dual=None), mask)


def opsm(b: Batch, log: Log) -> Tensor:
    """PPO without punished sequences that have drifted."""
    mask = b["response_mask"]
    difference = (b["log_prob"] - b["old_log_prob"]).detach()
    drift = -(difference * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    dropped = (b["advantages"] < 0) & (drift > 1e-4)
    log("actor/opsm_clipfrac", lambda: (dropped & mask).any(-1).float().mean())
    return masked_mean(_ppo_tokens(b | {"advantages": b["advantages"] * ~dropped}, log), mask)


def _covariance(b: Batch) -> Tensor:
    log_prob, advantages, mask = b["log_prob"].detach(), b["advantages"], b["response_mask"]
    return (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))


def clip_cov(b: Batch, log: Log) -> Tensor:
    """Clip-Cov."""
    mask, advantages, ratio, covariance = b["response_mask"], b["advantages"], _ratio(b), _covariance(b)
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    candidates = torch.nonzero((covariance > 1.0) & (covariance < 5.0) & ~(clipped > plain) & mask)
    count = max(int(2e-4 * mask.sum().item()), 1)
    drawn = candidates[b["draw"][candidates[:, 0], candidates[:, 1]].argsort(descending=True)[:count]]
    keep = torch.ones_like(advantages)
    keep[drawn[:, 0], drawn[:, 1]] = 0
    _fraction(log, "pg_clipfrac", lambda: keep == 0, mask)
    return masked_mean(torch.maximum(plain, clipped) * keep, mask)


def kl_cov(b: Batch, log: Log) -> Tensor:
    """KL-Cov."""
    mask = b["response_mask"]
    valid = torch.nonzero(mask.reshape(-1))[:, 0]
    count = max(1, int(len(valid) * 2e-4))
    pulled = torch.zeros(mask.numel()).index_fill(0, valid[_covariance(b)[mask].topk(count).indices], 1.0)
    difference = b["log_prob"] - b["old_log_prob"]
    return masked_mean(-b["advantages"] * _ratio(b) + pulled.view(mask.shape) * difference.abs(), mask)


def reinforce(b: Batch, log: Log) -> Tensor:
    """REINFORCE."""
    return masked_mean(-b["advantages"] * b["log_prob"], b["response_mask"])


def dro(b: Batch, log: Log) -> Tensor:
    """DRO: the log-likelihood with a quadratic pull."""
    difference = b["log_prob"] - b["old_log_prob"]
    return masked_mean(-b["advantages"] * b["log_prob"] + 0.05 * difference**2, b["response_mask"])


def topr(b: Batch, log: Log) -> Tensor:
    """TOPR, token ratios."""
    good, ratio = b["advantages"] > 0, _ratio(b).detach()
    weight = torch.where(good, 1.0, ratio.clamp(max=1.0))
    _fraction(log, "pg_clipfrac", lambda: (ratio > 1.0) & ~good, b["response_mask"])
    return masked_mean(-weight * b["advantages"] * b["log_prob"], b["response_mask"])


def _prime(b: Batch, log: Log, keep: Tensor) -> Tensor:
    mask, advantages = b["response_mask"], b["advantages"]
    difference = b["log_prob"] - b["old_log_prob"]
    ratio = difference.clamp(-20.0, 20.0).exp()
    _fraction(log, "pg_clipfrac", lambda: ~keep, mask)
    out, high = mask & ~keep, advantages > 0
    for name, marks in (("masked", out), ("unmasked", mask & keep)):
        log(f"{name}_mismatch_kl", lambda marks=marks: masked_mean((ratio - 1 - difference).detach(), marks))
    log("is_masked", lambda: masked_mean(out.float(), mask))
    for name, marks in (("low", out & (advantages < 0)), ("high", out & high)):
        log(f"is_masked_{name}", lambda marks=marks: masked_mean(marks.float(), mask))
    for name, marks in (("negative", out & (advantages < 0)), ("positive", out & high)):
        log(f"masked_advantage_{name}", lambda marks=marks: masked_mean(marks.float(), out))
    return ((-advantages * keep * ratio + 1e-3 * difference**2) * mask).sum()


def prime_rl(b: Batch, log: Log) -> Tensor:
    """prime-rl's loss."""
    return _prime(b, log, _near(b))


def prime_rl_ipo(b: Batch, log: Log) -> Tensor:
    """prime-rl's IPO loss."""
    return _prime(b, log, (b["log_prob"].detach().exp() - b["old_log_prob"].exp()).abs() <= 0.1)


_FORMS: tuple[Plain, ...] = (
    *(ppo, grpo, dapo, gspo, luspo, gmpo, vespo, cispo, scale_rl, sapo, dppo_tv, dppo_kl, ctpo, aspo, dcpo),
    *(decoupled_ppo, opsm, clip_cov, kl_cov, reinforce, dro, topr, prime_rl, prime_rl_ipo),
)
PLAIN: dict[str, Plain] = {form.__name__: form for form in _FORMS}
"""By the objective's name."""


def without_metrics(name: str, values: Callable[[], Tensor]) -> None:
    """A `Log` for who does not report."""


def with_metrics(plain: Plain, b: Batch) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics on the host, with the KL that every framework reports beside an objective's own."""
    found: dict[str, float] = {}

    def log(name: str, values: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            found[name] = values().item()

    loss = plain(b, log)
    log("actor/ppo_kl", lambda: masked_mean(b["old_log_prob"] - b["log_prob"], b["response_mask"]))
    return loss, found
