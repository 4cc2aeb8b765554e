"""An expert's matrices as the bytes of its parts, and back.

Part j of S has rows j of the gate and up matrices and columns j of the down matrix, in this order. Example: FFN 4 in
two parts, hidden size 2: part 0 is gate[0:2], up[0:2], down[:, 0:2], 12 elements.
"""

from dataclasses import dataclass

import torch

from moe_rl.core.errors import require


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Sizes of one expert: gate and up [FFN, H], down [H, FFN], in S parts."""

    hidden_size: int
    ffn_size: int
    parts_per_expert: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require(
            self.ffn_size % self.parts_per_expert == 0,
            f"an FFN size of {self.ffn_size} cannot be divided into {self.parts_per_expert} equal parts.",
        )

    @property
    def rows_per_part(self) -> int:
        """Rows of gate and up, and columns of down, in a part."""
        return self.ffn_size // self.parts_per_expert

    @property
    def expert_bytes(self) -> int:
        """Bytes of a whole expert."""
        return 3 * self.hidden_size * self.ffn_size * self.dtype.itemsize

    def pack(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of parts `start` .. `stop` - 1, counted within these matrices: a whole expert or a shard."""
        pieces = []
        for part in range(start, stop):
            rows = slice(part * self.rows_per_part, (part + 1) * self.rows_per_part)
            pieces += [gate[rows].reshape(-1), up[rows].reshape(-1), down[:, rows].reshape(-1)]
        return torch.cat(pieces).to(self.dtype).view(torch.uint8)

    def unpack(self, body: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return gate, up and down of `count` neighboring parts."""
        aligned = body if body.storage_offset() % self.dtype.itemsize == 0 else body.clone()
        rows = aligned.view(self.dtype).view(count, 3, -1)
        gate, up = (rows[:, which].reshape(-1, self.hidden_size) for which in (0, 1))
        down = rows[:, 2].reshape(count, self.hidden_size, -1).transpose(0, 1).reshape(self.hidden_size, -1)
        return gate, up, down
