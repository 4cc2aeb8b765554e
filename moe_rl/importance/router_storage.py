"""Compact storage of what the router shift needs from the old policy: expert ids and their log-probabilities.

An expert and its log-probability share one word: the id in the high bits, as many as the number of experts asks for,
and log p on an even grid from 2 down to -16 in the others (what lies beyond is read as -16: a probability of 1e-7).
Scores of sqrtsoftplus are no probabilities: they pass 1, and e^2 at a logit of 55.
16-bit words take 2 K bytes per token and layer, 768 B for 48 layers x top-8, ids included.

A grid this coarse costs nothing as long as both sides are rounded to it (`rounded`). A router that has not moved then
reads as exactly that. Where it has moved, the number of grid lines between the two values, times the step, has |delta|
as its expectation, since where the lines fall has nothing to do with the move; the mean over layers and experts takes
care of the rest. Rounding one side only would read the rounding error as a shift:
`python benchmarks/bench_importance.py --storage-bias` prints it; the figures are in docs/importance.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.tensors import working_dtype

# Log-probabilities above and below are read as these.
HIGHEST, LOWEST = 2.0, -16.0

# Bits of a word that the log-probability needs at least: a step of a quarter.
_LEAST_BITS = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredRouterLogProbs:
    """One layer of the old policy, ready to keep until the update."""

    words: Tensor
    """[T, K] int16 or int32."""
    num_experts: int

    @property
    def expert_ids(self) -> Tensor:
        """[T, K] int64; -1 where there is no route."""
        codes, ids = self._unpacked()
        return torch.where(codes < self._last_code, ids, torch.full_like(ids, -1))

    @property
    def log_probs(self) -> Tensor:
        """[T, K] float32; NaN where there is no route."""
        codes, _ = self._unpacked()
        return self._values(codes).masked_fill(codes == self._last_code, torch.nan)

    @property
    def valid(self) -> Tensor:
        """[T, K] bool: there is a route."""
        return self._unpacked()[0] < self._last_code

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.words.numel() * self.words.element_size()

    @property
    def step(self) -> float:
        """Distance of two neighbors on the grid."""
        return (HIGHEST - LOWEST) / (self._last_code - 1)

    @property
    def no_route(self) -> int:
        """The word of an entry without a route."""
        return self._last_code + torch.iinfo(self.words.dtype).min

    @torch.no_grad()
    def rounded(self, log_probs: Tensor) -> Tensor:
        """Return log-probabilities [T, K] on this grid, float32: what a new router's are compared as."""
        return self._values(self._codes(log_probs))

    def floored(self, log_probs: Tensor) -> Tensor:
        """Return [2]: routed entries at the end of the grid, here or in the `rounded` log_probs [T, K], and all.

        What lies below the end is read as the end, so that the shift of these entries is too small.
        """
        codes, _ = self._unpacked()
        is_routed = codes < self._last_code
        at_end = (codes == self._last_code - 1) | (self._codes(log_probs) == self._last_code - 1)
        return torch.stack([(at_end & is_routed).sum(), is_routed.sum()]).to(torch.float32)

    @property
    def _last_code(self) -> int:
        """The code of "no route", one above those of the grid."""
        return (1 << _code_bits(self.num_experts, self.words.dtype)) - 1

    def _codes(self, log_probs: Tensor) -> Tensor:
        # float64: an int32 word with 1,024 experts has steps of 4e-6, and float32 near 16 only 1e-6 of its own.
        float64_log_probs = log_probs.to(torch.float64).clamp(min=LOWEST, max=HIGHEST)
        return ((HIGHEST - float64_log_probs) / self.step).round().to(torch.int64)

    def _values(self, codes: Tensor) -> Tensor:
        return (HIGHEST - codes.to(torch.float64) * self.step).to(torch.float32)

    def _unpacked(self) -> tuple[Tensor, Tensor]:
        """Return the codes and the ids, both int64."""
        # 0 .. 2^16 - 1 instead of signed words: a shift of a negative number would keep its sign.
        unsigned = self.words.to(torch.int64) - torch.iinfo(self.words.dtype).min
        return unsigned & self._last_code, unsigned >> _code_bits(self.num_experts, self.words.dtype)


@torch.no_grad()
def store_router_log_probs(
    expert_ids: Tensor, log_probs: Tensor, *, num_experts: int, word: torch.dtype = torch.int16
) -> StoredRouterLogProbs:
    """Pack one layer's ids and log-probabilities, both [T, K]; ids below 0, and NaN, mean no route.

    `word`: torch.int16 (steps of 1/28 for 128 experts, 1/7 for 512), or torch.int32, whose steps are below 1e-5 up to
    1,024 experts.
    """
    if word not in (torch.int16, torch.int32):
        raise InvalidInputError(f"router log-probabilities are stored in torch.int16 or torch.int32 words, not {word}.")
    require(
        expert_ids.shape == log_probs.shape and expert_ids.ndim == 2,
        f"expert ids and log-probabilities must have the same shape [T, K], got {tuple(expert_ids.shape)} and "
        f"{tuple(log_probs.shape)}.",
    )
    require(num_experts >= 1, f"num_experts must be >= 1, got {num_experts}.")
    bits = _code_bits(num_experts, word)
    require(
        bits >= _LEAST_BITS,
        f"{num_experts} experts leave only {bits} bits of a {word} word for a log-probability: use torch.int32.",
    )
    if expert_ids.numel() and expert_ids.device.type == "cpu":  # elsewhere the look would wait for the device
        largest_id = int(expert_ids.max())
        require(largest_id < num_experts, f"expert id {largest_id} is out of range for {num_experts} experts.")
    empty = StoredRouterLogProbs(words=torch.empty(0, 0, dtype=word), num_experts=num_experts)
    values = log_probs.to(working_dtype(log_probs))
    is_routed = (expert_ids >= 0) & ~values.isnan()
    codes = torch.where(is_routed, empty._codes(values.nan_to_num(0.0, neginf=LOWEST)), empty._last_code)
    unsigned = (expert_ids.to(torch.int64).clamp(min=0) << bits) | codes
    return StoredRouterLogProbs(words=(unsigned + torch.iinfo(word).min).to(word), num_experts=num_experts)


def _code_bits(num_experts: int, word: torch.dtype) -> int:
    """Bits of a word that are left for the log-probability."""
    # 128 experts take 7 of 16 bits: 9 are left, 510 steps of 1/28.
    return torch.iinfo(word).bits - (num_experts - 1).bit_length()
