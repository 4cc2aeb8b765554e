"""What every importer yields and is told: one `RecordedSequence` per sequence, `ImportOptions` from the user."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_least
from moe_rl.core.trace import PROVENANCES, require_token_axis_first


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSequence:
    """The rows of one sequence as the producer stored them, with filler rows marked by their position."""

    routes: NDArray[np.integer]
    """[rows, layers, K] ids as recorded; rows of -1 mean that no route was captured."""
    valid: NDArray[np.bool_] | None = None
    """[rows] False where the producer's format says that the row is filler; None: no such row."""
    name: str = ""
    group: str | int | None = None
    """Prompt group; sequences with an equal value belong together, None stands alone."""
    step: int = 0
    micro_batch: int = -1
    dp_rank: int = -1
    layer_ids: tuple[int, ...] | None = None
    """Model layer of every recorded layer, where the format says it."""
    num_tokens: int | None = None
    """Tokens of the sequence, where the format says it; `misfit` says whether the rows are theirs."""
    prompt_tokens: int | None = None
    """Tokens of the prompt, if the format says it."""
    first_row: int = 0
    """Token of the first recorded row; the rows before it are filler."""
    policy_version: NDArray[np.integer] | None = None
    """[rows] version of the policy that made each row."""
    combine_weights: NDArray[np.floating] | None = None
    """[rows, layers, K] weights of the experts, where the format has them; the check of routes looks at them."""

    def __post_init__(self) -> None:
        routes = self.routes
        require(
            routes.ndim == 3 and routes.dtype.kind in "iu" and routes.shape[1] >= 1 and routes.shape[2] >= 1,
            f"the routes must be integers of shape [tokens, layers, top-k], got {routes.dtype} {list(routes.shape)}.",
        )
        require_token_axis_first(routes.shape)
        for name in ("step", "micro_batch", "dp_rank"):
            value = getattr(self, name)
            require(-1 <= value < 1 << 31, f"{name} must be -1 to {(1 << 31) - 1}, got {value}.")
        if self.valid is not None:
            require(
                self.valid.shape == routes.shape[:1],
                f"the mask of tokens with a route has shape {list(self.valid.shape)}, but there are routes for "
                f"{len(routes)} tokens.",
            )
        weights = self.combine_weights
        require(
            weights is None or weights.shape == routes.shape,
            "the combine weights must have the same shape as the routes.",
        )
        if self.layer_ids is not None:
            require(
                len(self.layer_ids) == routes.shape[1], "layer_ids must contain one layer number per recorded layer."
            )

    def at(self, path: Path, index: int) -> str:
        """Return where the sequence stands, for messages."""
        return f"{path}, sequence {index} ({self.name or 'unnamed'})"

    @property
    def layers(self) -> tuple[int, ...]:
        """Model layer of every recorded layer; counted from 0 where the format does not say it."""
        return self.layer_ids or tuple(range(self.routes.shape[1]))

    @property
    def misfit(self) -> str:
        """Why the rows cannot be those of the tokens; "" where they can."""
        if self.num_tokens in (None, len(self.routes)):
            return ""
        expected = max(0, self.num_tokens - 1 - self.first_row)
        tokens = f"{self.num_tokens} tokens, recorded from token {self.first_row} on,"
        return f"there are routes for {len(self.routes)} tokens, but {tokens} need {expected}."


AXES = ("TLK", "LTK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the user knows and the file does not say."""

    num_experts: int | None = None
    top_k: int | None = None
    """K, for payloads without a shape (SGLang)."""
    num_layers: int | None = None
    """Recorded layers, dense ones included, for payloads without a shape (SGLang)."""
    moe_layer_ids: tuple[int, ...] | None = None
    """Model layers that are MoE: picked from the recorded layers, or naming them all where just these are recorded."""
    first_k_dense: int | None = None
    """The model's first k layers are dense, all others MoE (`first_k_dense_replace` of DeepSeek-V3). Where a file does
    not number its layers, they are counted from 0, dense ones included."""
    prompt_lengths: tuple[int, ...] | None = None
    """Prompt tokens of each sequence, for formats that hold generated tokens only: prompt rows have no route."""
    layout_path: Path | None = None
    """slime's train dump, which says which micro-batch and DP rank ran each sample."""
    pipeline_size: int = 1
    """Pipeline stages of the run that wrote Megatron's router JSONL, whose layer numbers start anew in each stage."""
    axes: str = "TLK"
    """Order of the axes of an array that names none: tokens, layers, choices; LTK has layers first."""
    mask_capture_holes: bool = False
    """Take rows of zeros in every layer and choice (top-k over 1) as rows without a route instead of refusing them."""
    model: str = ""
    provenance: str | None = None

    def __post_init__(self) -> None:
        require_least(self, num_experts=1, top_k=1, num_layers=1, pipeline_size=1, first_k_dense=0)
        require(self.axes in AXES, f"axes must be {' or '.join(AXES)}, got {self.axes!r}.")
        require(min(self.prompt_lengths or (0,)) >= 0, "prompt lengths must be 0 or more.")
        require(
            self.moe_layer_ids is None or self.first_k_dense is None,
            "set either moe_layer_ids or first_k_dense, not both.",
        )
        ids = self.moe_layer_ids
        require(
            ids is None or (len(ids) > 0 and ids[0] >= 0 and list(ids) == sorted(set(ids))),
            f"moe_layer_ids must be ascending layer numbers, got {ids}.",
        )
        require(
            self.provenance in (None, *PROVENANCES),
            f"the provenance {self.provenance!r} is unknown. Known values: {', '.join(PROVENANCES)}.",
        )


# Options that describe the model or the run: true of a trace in any format, whether its reader needs them or not.
OF_EVERY_TRACE = ("num_experts", "top_k", "num_layers", "moe_layer_ids", "model", "provenance")


def require_of_use(path: Path, format: str, options: ImportOptions, reads: tuple[str, ...]) -> None:
    """Raise where an option is set that is neither of every trace nor among those that this format reads."""
    for item in fields(options):
        set_here = getattr(options, item.name) != item.default
        require(
            not set_here or item.name in OF_EVERY_TRACE or item.name in reads,
            f"{item.name} has no effect on {path}, which is read as {format}: leave {item.name} out.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """One foreign format: how to recognize a file and how to read it."""

    name: str
    summary: str
    recognizes: Callable[[Path], bool]
    read: Callable[[Path, ImportOptions], Iterator[RecordedSequence]]
    """Reads anew at each call, one sequence in memory at a time."""
    provenance: str = "R3"
    """Where routes of this format come from, unless the user says otherwise."""
    reads: tuple[str, ...] = ()
    """Options of this format alone, beside those that hold for a file of any format."""


def prompt_key(token_ids: object) -> str:
    """Return a short name for a prompt: sequences with the same prompt tokens are one prompt group."""
    return hashlib.blake2b(repr(token_ids).encode(), digest_size=16).hexdigest()


def sequence_of_tokens(
    routes: NDArray[np.integer], *, num_tokens: int, first_row: int = 0, **facts: Any
) -> RecordedSequence:
    """Return the sequence with a row for all `num_tokens` tokens, given the rows from `first_row` on.

    The last token is never fed back, so it has no route; a surplus row for it is dropped. Rows without a route are
    zeros with valid False. Rows that end neither at the last token nor one before it stay as they are (`misfit`).
    """
    rows = len(routes)
    expected = num_tokens - 1 - first_row
    facts |= {"num_tokens": num_tokens, "first_row": first_row}
    if first_row < 0 or rows not in (expected, expected + 1):
        return RecordedSequence(routes=routes, **facts)
    aligned = np.zeros((num_tokens, *routes.shape[1:]), routes.dtype)
    aligned[first_row : first_row + rows] = routes
    valid = np.zeros(num_tokens, np.bool_)
    valid[first_row : num_tokens - 1] = True
    aligned[~valid] = 0
    if (weights := facts.get("combine_weights")) is not None:
        facts["combine_weights"] = np.zeros(aligned.shape, np.float32)
        facts["combine_weights"][first_row : first_row + rows] = weights
    return RecordedSequence(routes=aligned, valid=valid, **facts)
