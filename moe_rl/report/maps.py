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
    return MapKind(
        title="Load of every rank, before and after",
        caption="Token-expert pairs of the whole step. A rank that is hot in one micro-batch and cold in another looks "
        "balanced here; the maps below show such micro-batches.",
        quantity="load / mean of the layer",
        across="EP rank",
        every=min(int(str(report.setting.get("ranks_per_node", ranks))), ranks),
        layer_ids=report.layer_ids,
        values=values,
        shown=tuple(prediction.policy for prediction in report.before_and_after),
    )


def micro_batch_maps(report: ReportData) -> MapKind:
    """Return the imbalance of every layer in every micro-batch."""
    return MapKind(
        title="Busiest rank of every layer and micro-batch, before and after",
        caption="Rows of the busiest rank over the mean: the layer waits for that rank, whichever it is.",
        quantity="max / mean rank load",
        across="micro-batch",
        every=0,
        layer_ids=report.layer_ids,
        values={policy.policy: report.loads[policy.policy].imbalance_map for policy in report.policies},
        shown=tuple(prediction.policy for prediction in report.before_and_after),
    )
