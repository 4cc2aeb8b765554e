"""What a rollout returns, by micro-batch."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(kw_only=True)
class Episodes:
    """One micro-batch of B episodes, filled up to S tokens on the right."""

    token_grid: torch.Tensor
    """[B, S]"""
    num_tokens: list[int]
    """[B]"""
    advantage: torch.Tensor
    """[B]"""
    picked_experts: list[NDArray[np.uint8]] | None = None
    """Per episode [decoder layers, tokens - 1, K]; those of dense layers mean nothing. None: not recorded."""
    old_log_probs: torch.Tensor | None = field(default=None, repr=False)
    """[B, S - 1], after `Trainer.score`."""

    @property
    def is_token(self) -> torch.Tensor:
        """[B, S]: false on what an episode is filled up with."""
        return torch.arange(self.token_grid.shape[1])[None] < torch.tensor(self.num_tokens)[:, None]

    @property
    def counts(self) -> torch.Tensor:
        """[B, S - 1]: which next tokens are part of an episode."""
        return self.is_token[:, 1:]
