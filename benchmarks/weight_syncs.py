"""Published weight syncs beside their prices by transport, and the constants that fit the shared rows.

    python benchmarks/weight_syncs.py

Rows and sources: tests/simulators/weight_syncs.yaml. A row counts at the geometric mean of its published range.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_rl.config import load_cluster, load_model
from moe_rl.core.topology import HardwareSpec
from moe_rl.simulators.weight_sync import SyncPrice, SyncSetting, price_sync

DATA = Path(__file__).parents[1] / "tests" / "simulators" / "weight_syncs.yaml"
FITTED, HELD_OUT = "fitted", "held out"


@dataclass(frozen=True, kw_only=True)
class PublishedSync:
    """A row of the data."""

    row: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """Published seconds."""
        values: list[float] = self.row["seconds"]
        return math.exp(sum(map(math.log, values)) / len(values))

    @property
    def hardware(self) -> HardwareSpec:
        """The cluster's constants."""
        return load_cluster(self.row["cluster"])

    def setting(self) -> SyncSetting:
        """Return bytes and GPUs."""
        names = ("train_gpus", "engine_gpus", "engine_size", "trainer_ep_size")
        sizes = {name: self.row[name] for name in names if name in self.row}
        bytes_per_param = float(self.row.get("bytes_per_param", 2))
        if "params" in self.row:
            weights = bytes_per_param * self.row["params"]
            return SyncSetting(weights_bytes=weights, num_tensors=self.row["tensors"], **sizes)
        model = load_model(self.row["model"]).spec
        return SyncSetting.of_model(model, bytes_per_param=bytes_per_param, **sizes)

    def price(self) -> SyncPrice:
        """Return the price by its transport."""
        return price_sync(self.row["transport"], self.setting(), self.hardware)

    @property
    def ratio(self) -> float:
        """Price over published seconds."""
        return self.price().seconds / self.seconds


def published(part: str) -> Iterator[PublishedSync]:
    """Yield the rows of a part: `fitted` or `held out`."""
    for row in yaml.safe_load(DATA.read_text(encoding="utf-8"))[part]:
        yield PublishedSync(row=row)


def within(rows: list[PublishedSync], factor: float) -> float:
    """Return the share of rows whose price is within a factor of the published seconds."""
    return sum(max(row.ratio, 1 / row.ratio) <= factor for row in rows) / len(rows)


def main() -> None:
    """Print every row, and the shares within a factor of 1.5 and within 25 %."""
    for part in (FITTED, HELD_OUT):
        rows = list(published(part))
        print(part)
        print(f"{'model':20s} {'transport':15s} {'published s':>11s} {'price s':>8s} {'ratio':>6s} {'bound s':>8s}")
        for row in rows:
            price = row.price()
            names = f"{row.row['model']:20s} {row.row['transport']:15s}"
            print(f"{names} {row.seconds:11.2f} {price.seconds:8.2f} {row.ratio:6.2f} {price.bound_s:8.2f}")
        print(f"within a factor of 1.5: {within(rows, 1.5):.0%}, within 25 %: {within(rows, 1.25):.0%}\n")


if __name__ == "__main__":
    main()
