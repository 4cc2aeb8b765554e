"""What a person reads: the policy table in a terminal, and a self-contained HTML page to send to a colleague."""

from moe_rl.report.faces import SimulationReport, Sweep
from moe_rl.report.headline import Headline, headline
from moe_rl.report.html import render_html
from moe_rl.report.limits import Limits, limits
from moe_rl.report.simulation import LoadBounds, PolicyLoads

__all__ = [
    "Headline",
    "Limits",
    "LoadBounds",
    "PolicyLoads",
    "SimulationReport",
    "Sweep",
    "headline",
    "limits",
    "render_html",
]
