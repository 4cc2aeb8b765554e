"""One pass of Megatron's schedule over the cells of this rank: what to replay before a cell, what to read after it.

B sequences of a cell, N inputs of its longest one, L MoE layers, K experts per token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from examples.countdown.batches import Cell
from moe_rl.importance import RouterTap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellOutput:
    """What the model says about a cell; only `logprobs` carries a gradient."""

    logprobs: Tensor
    """[B, N] log-probability of every target under softmax(logits / temperature)."""
    entropy: Tensor
    """[B, N] of that distribution, in nats."""


CellLoss = Callable[[int, CellOutput], Tensor]
"""(index of the cell, its output) -> its share of the loss of the update, summed over cells and averaged over ranks."""


def run_pass(
    model: torch.nn.Module,
    gpt: GPTModel,
    cells: Sequence[Cell],
    loss: CellLoss,
    *,
    temperature: float,
    replay: Sequence[Tensor] | None,
    tap: RouterTap,
    forward_only: bool,
) -> None:
    """Run the cells through Megatron's schedule; `replay` holds [N * B, L, K] ids per cell, None routes freely.

    `tap` is told which token each row is.
    """
    RouterReplay.clear_global_indices()

    def forward_step(data: Iterator[int], chunk: torch.nn.Module) -> Any:
        index = next(data)
        if replay is not None:
            _replay(gpt, replay[index])
        tap.rows = cells[index].keys
        logits = _forward(chunk, cells[index])

        def loss_of(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            share = loss(index, _read(logits, cells[index], temperature))
            # The schedule divides by the number of cells: what comes in is a share of a sum, not a mean.
            return share * len(cells), {}

        return logits, loss_of

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(len(cells))),
        model=[model],
        num_microbatches=len(cells),
        seq_length=max(cell.tokens.shape[1] for cell in cells),
        micro_batch_size=len(cells[0].tokens),
        forward_only=forward_only,
    )
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()


def _forward(chunk: torch.nn.Module, cell: Cell) -> Tensor:
    size = cell.tokens.shape[1]
    hidden_from = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(size).expand(len(cell.tokens), size)
    logits: Tensor = chunk(cell.tokens, positions, hidden_from)
    return logits


def _replay(gpt: GPTModel, rows: Tensor) -> None:
    """Make the next forward replay these rows [N * B, L, K]."""
    for layer in gpt.decoder.layers:
        router = layer.mlp.router.router_replay
        router.set_target_indices(rows[:, layer.layer_number - 1].contiguous())
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def _read(logits: Tensor, cell: Cell, temperature: float) -> CellOutput:
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return CellOutput(logprobs=logprobs.gather(-1, cell.targets[..., None])[..., 0], entropy=entropy)
