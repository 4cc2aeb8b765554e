"""Token permutation (`moe_permute_fusion`) in plain torch.

Follows the functions of that name in the page "API documentation / PyTorch" of TransformerEngine's user guide
(https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html), with map_type "mask" alone. Rows
stand expert by expert, and within one in the order of the tokens. What differs from Megatron's own is the map between
the two functions, which only they may read: here [E, N] int32, the row of (expert, token), -1 where there is none.
Whether this is what the release that you run does, no test on a CPU can say.
"""

import torch


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of tokens [N, H] under a map [N, E], and what `moe_unpermute` needs to bring them back."""
    if map_type != "mask":
        raise NotImplementedError(map_type)
    row_id_map = _map_of(routing_map, num_out_tokens)
    return inp[_places(row_id_map)[1]], row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (rows, their probabilities, map) of tokens [N, H] and probabilities [N, E]."""
    row_id_map = _map_of(routing_map, num_out_tokens)
    expert, token = _places(row_id_map)
    return inp[token], probs[token, expert], row_id_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
) -> torch.Tensor:
    """Return [N, H]: the sum of every token's rows, weighted by `merging_probs` [N, E] where these are given."""
    if map_type != "mask":
        raise NotImplementedError(map_type)
    expert, token = _places(row_id_map)
    rows = inp if merging_probs is None else inp * merging_probs[token, expert, None]
    shape = restore_shape or torch.Size((row_id_map.shape[1], inp.shape[1]))
    return torch.zeros(shape, dtype=inp.dtype).index_add(0, token, rows.to(inp.dtype))


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Return the chunks of rows, of `split_sizes` rows each, in the order `sorted_index`."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and probabilities, both sorted so."""
    sort = moe_sort_chunks_by_index
    return sort(inp, split_sizes, sorted_index), sort(probs, split_sizes, sorted_index)


def _map_of(routing_map: torch.Tensor, num_out_tokens: int) -> torch.Tensor:
    """Return [E, N] rows; TE allocates `num_out_tokens` rows, so that another number would leave garbage."""
    chosen = routing_map.bool().T
    rows = chosen.flatten().cumsum(0).view(chosen.shape) - 1
    if num_out_tokens != int(chosen.sum()):
        raise AssertionError(f"num_out_tokens is {num_out_tokens}, the map has {int(chosen.sum())} rows.")
    return torch.where(chosen, rows, -1).to(torch.int32)


def _places(row_id_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expert and the token of every row."""
    if row_id_map.dim() != 2:
        raise AssertionError("this is not the map that moe_permute returned.")
    expert, token = (row_id_map >= 0).nonzero(as_tuple=True)
    return expert, token
