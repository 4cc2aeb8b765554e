"""What a person reads: the policy table in a terminal, and a self-contained HTML page to send to a colleague."""

from moe_rl.report.headline import Headline, headline
from moe_rl.report.html import render_html
from moe_rl.report.limits import Limits, limits
from moe_rl.report.simulation import LoadBounds, PolicyLoads, SimulationReport

__all__ = [
    "Headline",
    "Limits",
    "LoadBounds",
    "PolicyLoads",
    "SimulationReport",
    "headline",
    "limits",
    "render_html",
]
