"""The heat maps of the page: load of every rank, and imbalance of every micro-batch, both by layer.

L MoE layers, P EP ranks, M micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from moe_rl.report.charts import layer_map
from moe_rl.report.heatmap import color_of, levels_base64, png_data_uri
from moe_rl.report.simulation import ReportData
from moe_rl.report.words import read_words

WORDS = read_words("sentences.yaml")["maps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapKind:
    """Maps [L, N] of one quantity, one per policy, on a common scale."""

    title: str
    caption: str
    quantity: str
    """What the scale shows."""
    across: str
    """What the columns are."""
    every: int
    """Columns between dashed lines; 0 for none."""
    layer_ids: Sequence[int]
    values: Mapping[str, NDArray[np.float32]]
    """By policy."""
    shown: tuple[str, ...]
    """Policies shown before anything is chosen: before, after."""

    @property
    def top(self) -> float:
        """Upper end of the scale."""
        return max(2.0, max(float(value.max(initial=0.0)) for value in self.values.values()))

    @property
    def gradient(self) -> Markup:
        """Stops of the scale's CSS gradient."""
        top = self.top
        stops = [0.0, 0.5, 1.0, *(1.0 + (top - 1.0) * share for share in (0.2, 0.4, 0.6, 0.8, 1.0))]
        colors = ["#{:02x}{:02x}{:02x}".format(*color_of(value, top)) for value in stops]
        return Markup(", ".join(f"{color} {value / top:.1%}" for value, color in zip(stops, colors, strict=True)))

    def pictures(self) -> list[dict[str, object]]:
        """Return name and chart of the policies shown first."""
        return [
            {
                "name": name,
                "svg": layer_map(
                    self.values[name],
                    label=f"{self.title}: {name}",
                    layer_ids=self.layer_ids,
                    across=self.across,
                    every=self.every,
                    top=self.top,
                ),
            }
            for name in self.shown
        ]

    def data(self) -> dict[str, object]:
        """Return what the page's script needs to show another policy and a tool tip."""
        top = self.top
        return {
            "top": top,
            "layers": list(self.layer_ids),
            "columns": next(iter(self.values.values())).shape[1],
            "column": self.across.removeprefix("EP "),
            "shown": list(self.shown),
            "policies": {
                name: {"png": png_data_uri(value, top), "levels": levels_base64(value, top)}
                for name, value in self.values.items()
            },
        }


def rank_maps(report: ReportData) -> MapKind:
    """Return the load of every rank and layer in the whole step."""
    values = {policy.policy: report.loads[policy.policy].rank_share for policy in report.policies}
    ranks = next(iter(values.values())).shape[1]
    every = min(int(str(report.setting.get("ranks_per_node", ranks))), ranks)
    return _maps(report, "ranks", values, every=every)


def micro_batch_maps(report: ReportData) -> MapKind:
    """Return the imbalance of every layer in every micro-batch."""
    values = {policy.policy: report.loads[policy.policy].imbalance_map for policy in report.policies}
    return _maps(report, "micro_batches", values, every=0)


def _maps(report: ReportData, kind: str, values: Mapping[str, NDArray[np.float32]], *, every: int) -> MapKind:
    shown = tuple(prediction.policy for prediction in report.before_and_after)
    return MapKind(**WORDS[kind], every=every, layer_ids=report.layer_ids, values=values, shown=shown)
