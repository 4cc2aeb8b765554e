"""Published weight syncs beside their prices by transport, and the constants that fit the rows "fitted".

    python benchmarks/weight_syncs.py

Rows and sources: tests/simulators/weight_syncs.yaml. A row counts at the geometric mean of its published range. Every
constant is fitted again on its rows, and on all of them but one. Beside it stand the least and the largest value that
meets the published seconds of a single row, at either end of their range: a transport with one row has no more than
that. "left out" is the price of a row by the constant that the other rows leave, or nothing if there are none.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml

from moe_rl.config import load_cluster, load_model
from moe_rl.core.topology import HardwareSpec
from moe_rl.simulators.weight_sync import FITTED as CONSTANTS
from moe_rl.simulators.weight_sync import TRANSPORTS, SyncPrice, SyncSetting, price_sync

DATA = Path(__file__).parents[1] / "tests" / "simulators" / "weight_syncs.yaml"
FITTED, HELD_OUT = "fitted", "held out"
# A constant is looked for within this factor of the one in force, on a logarithmic grid of half a per cent.
SEARCHED_FACTOR, GRID = 20.0, 1200


@dataclass(frozen=True, kw_only=True)
class PublishedSync:
    """A row of the data."""

    row: Mapping[str, Any]

    @property
    def range_s(self) -> tuple[float, float]:
        """Least and most published seconds."""
        return min(self.row["seconds"]), max(self.row["seconds"])

    @property
    def seconds(self) -> float:
        """Published seconds."""
        values: list[float] = self.row["seconds"]
        return math.exp(sum(map(math.log, values)) / len(values))

    @property
    def constant(self) -> str:
        """The constant that this row helps to fit; "": none."""
        return "" if "left_out" in self.row else TRANSPORTS[self.row["transport"]].constant

    @cached_property
    def hardware(self) -> HardwareSpec:
        """The cluster's constants."""
        return load_cluster(self.row["cluster"])

    @cached_property
    def setting(self) -> SyncSetting:
        """Bytes and GPUs."""
        names = ("train_gpus", "engine_gpus", "engine_size", "trainer_ep_size", "trainer_pp_size")
        sizes = {name: self.row[name] for name in names if name in self.row}
        bytes_per_param = float(self.row.get("bytes_per_param", 2))
        if "params" in self.row:
            counts = {name: self.row.get(name, 0) for name in ("dense_bytes", "expert_stacks", "dense_tensors")}
            weights = bytes_per_param * self.row["params"]
            return SyncSetting(weights_bytes=weights, num_tensors=self.row.get("tensors", 0), **counts, **sizes)
        model = load_model(self.row["model"]).spec
        return SyncSetting.of_model(model, bytes_per_param=bytes_per_param, **sizes)

    def price(self) -> SyncPrice:
        """Return the price by its transport."""
        return price_sync(self.row["transport"], self.setting, self.hardware)

    @property
    def ratio(self) -> float:
        """Price over published seconds."""
        return self.price().seconds / self.seconds


def published(part: str) -> Iterator[PublishedSync]:
    """Yield the rows of a part: `fitted` or `held out`."""
    for row in yaml.safe_load(DATA.read_text(encoding="utf-8"))[part]:
        yield PublishedSync(row=row)


def within(ratios: Sequence[float], factor: float) -> float:
    """Return the share of prices that are within a factor of the published seconds."""
    return sum(max(ratio, 1 / ratio) <= factor for ratio in ratios) / len(ratios)


def fitted(name: str, targets: Sequence[tuple[PublishedSync, float]]) -> float:
    """Return the value of a constant by which rows come nearest to their seconds, in squared logarithms."""

    def error(value: float) -> float:
        with patch.dict(CONSTANTS, {name: value}):
            return math.hypot(*(math.log(row.price().seconds / seconds) for row, seconds in targets))

    low, high = CONSTANTS[name] / SEARCHED_FACTOR, CONSTANTS[name] * SEARCHED_FACTOR
    if name.endswith("_share"):
        high = 1.0
    return float(min(np.geomspace(low, high, GRID + 1), key=error))


@dataclass(frozen=True, kw_only=True)
class ConstantFit:
    """A constant, fitted on its rows."""

    name: str
    value: float
    single: tuple[float, float]
    """The least and the largest that meets a single row."""
    left_out: tuple[float, ...]
    """Every row's price over its published seconds, by the constant of the others; empty if it is the only one."""


def fits(rows: Sequence[PublishedSync]) -> Iterator[ConstantFit]:
    """Yield every constant with what its rows among these say of it."""
    for name in CONSTANTS:
        own = [row for row in rows if row.constant == name]
        singles = [fitted(name, [(row, seconds)]) for row in own for seconds in row.range_s]
        left_out = []
        for row in own:
            others = [(other, other.seconds) for other in own if other is not row]
            if others:
                with patch.dict(CONSTANTS, {name: fitted(name, others)}):
                    left_out.append(row.ratio)
        yield ConstantFit(
            name=name,
            value=fitted(name, [(row, row.seconds) for row in own]),
            single=(min(singles), max(singles)),
            left_out=tuple(left_out),
        )


def print_rows(rows: Sequence[PublishedSync]) -> None:
    """Print every row with its price, and the shares within a factor of 1.5 and within 25 %."""
    print(f"{'model':20s} {'transport':16s} {'published s':>11s} {'price s':>8s} {'ratio':>6s} {'bound s':>8s}")
    for row in rows:
        price = row.price()
        names = f"{row.row['model']:20s} {row.row['transport']:16s}"
        print(f"{names} {row.seconds:11.2f} {price.seconds:8.2f} {row.ratio:6.2f} {price.bound_s:8.2f}")
    print(f"{shares([row.ratio for row in rows])}\n")


def print_fits(rows: Sequence[PublishedSync]) -> None:
    """Print every constant, fitted on these rows, and the shares of rows that are left out in turn."""
    print(f"{'constant':18s} {'in force':>9s} {'fitted':>9s} {'single rows':>19s}  left out")
    left_out: list[float] = []
    for fit in fits(rows):
        low, high = fit.single
        left_out += fit.left_out
        ratios = " ".join(f"{ratio:.2f}" for ratio in fit.left_out)
        singles = f"{low:.3g} .. {high:.3g}"
        print(f"{fit.name:18s} {CONSTANTS[fit.name]:9.3g} {fit.value:9.3g} {singles:>19s}  {ratios}")
    print(f"left out: {shares(left_out)}\n")


def shares(ratios: Sequence[float]) -> str:
    """Say which shares of prices are within a factor of 1.5 and within 25 %."""
    return f"{len(ratios)} within a factor of 1.5: {within(ratios, 1.5):.0%}, within 25 %: {within(ratios, 1.25):.0%}"


def main() -> None:
    """Print every row and constant."""
    rows = {part: list(published(part)) for part in (FITTED, HELD_OUT)}
    for part in rows:
        print(part)
        print_rows(rows[part])
    print("constants by the fitted rows")
    print_fits(rows[FITTED])
    print("constants by all rows, the held-out ones among them")
    print_fits(rows[FITTED] + rows[HELD_OUT])


if __name__ == "__main__":
    main()
