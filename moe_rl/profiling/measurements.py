"""Timed operations of a cluster, and the CSV that holds them: what `moe-rl profile` writes and `calibrate` reads."""

import csv
import io
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from moe_rl.core.errors import (
    InvalidInputError,
    require,
    require_known,
    require_least,
    require_positive,
    require_words,
)
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology, HardwareSpec

MOE_KINDS = ("expert_gemm", "all_to_all", "moe_layer")
KINDS = (*MOE_KINDS, "attention", "layer")
PRECISIONS = ("bf16", "fp8")
# Columns that say what attention computes.
ATTENTION = ("sequence_length", "num_attention_heads", "num_query_groups", "kv_channels")
PHASES = ("forward", "backward")
DISPATCHERS = ("deepep", "alltoall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One timed operation under uniform routing; the CSV has these columns."""

    kind: str
    """expert_gemm (with permutation and activation), all_to_all (one dispatch or combine, waiting excluded), moe_layer
    (fixed part, dispatch, experts, combine), attention (norms, projections, core) or layer (both of the last)."""
    phase: str
    dispatcher: str
    hidden_size: int
    moe_ffn_hidden_size: int
    num_experts: int
    top_k: int
    ep_size: int
    ranks_per_node: int
    tokens_per_rank: int
    time_ms: float
    group: str
    """Measurements of one group are held out together, for example a model family."""
    precision: str = "bf16"
    """Of the matrix products: bf16 or fp8."""
    sequence_length: int = 0
    """Tokens of a sequence, like the next three only for attention and layer."""
    num_attention_heads: int = 0
    num_query_groups: int = 0
    kv_channels: int = 0

    def __post_init__(self) -> None:
        whose = "measurement: "
        require_words(self, whose=whose, kind=KINDS, phase=PHASES, dispatcher=DISPATCHERS, precision=PRECISIONS)
        require_positive(self, "time_ms", whose=whose)
        attention = dict.fromkeys(() if self.kind in MOE_KINDS else ATTENTION, 1)
        require_least(self, whose=whose, ep_size=1, ranks_per_node=1, tokens_per_rank=1, **attention)
        require(
            self.model().num_experts % self.ep_size == 0,
            f"measurement: ep_size {self.ep_size} does not divide the {self.num_experts} experts.",
        )
        fills_nodes = self.ep_size <= self.ranks_per_node or self.ep_size % self.ranks_per_node == 0
        require(
            fills_nodes,
            f"measurement: ep_size {self.ep_size} is not a multiple of ranks_per_node {self.ranks_per_node}.",
        )

    def model(self) -> MoeModelSpec:
        """Return the part of a model that the measured operation sees; its activation is SwiGLU."""
        return MoeModelSpec(
            name=self.group,
            num_layers=1,
            moe_layer_ids=(0,),
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            moe_ffn_hidden_size=self.moe_ffn_hidden_size,
            num_attention_heads=max(1, self.num_attention_heads),
            num_query_groups=max(1, self.num_query_groups),
            kv_channels=max(1, self.kv_channels),
            vocab_size=1,
        )

    def topology(self, hardware: HardwareSpec) -> ClusterTopology:
        """Return the EP group that it was measured on."""
        return ClusterTopology(hardware=hardware, ep_size=self.ep_size, ranks_per_node=self.ranks_per_node)


def read_measurements(path: Path) -> list[Measurement]:
    """Read a CSV whose header names the fields of `Measurement`."""
    columns = fields(Measurement)
    require(path.exists(), f"{path} does not exist.")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"{path} is not a readable CSV: {error}.") from None
    require(bool(rows), f"{path} contains no measurements.")
    # csv keeps the values beyond the header's columns under the key None.
    header = set(rows[0]) - {None}
    missing = sorted({item.name for item in columns if item.default is MISSING} - header)
    require(not missing, f"{path} lacks the columns {', '.join(missing)}.")
    for column in sorted(header):
        require_known(column, list(Measurement.__annotations__), f"{path} has an unknown column {column!r}.")
    # Line 1 is the header.
    return [_parse_row(path, number, row) for number, row in enumerate(rows, start=2)]


def measurements_csv(measurements: Iterable[Measurement]) -> str:
    """Return the CSV that `read_measurements` reads back."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Measurement.__annotations__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(measurement) for measurement in measurements)
    return text.getvalue()


def _parse_row(path: Path, number: int, row: dict[str, str]) -> Measurement:
    values: dict[str, str | int | float] = {}
    for name, kind in Measurement.__annotations__.items():
        if name not in row:
            continue
        text = (row[name] or "").strip()
        try:
            values[name] = kind(text)
        except ValueError:
            raise InvalidInputError(f"{path} line {number}: {name} {text!r} is not a number.") from None
    try:
        return Measurement(**values)  # type: ignore[arg-type]  # converted by the annotations just above
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} line {number}: {error}") from None
