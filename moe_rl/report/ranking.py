"""Whether the ranking of policies depends on constants that may be wrong: sentences and table rows."""

from moe_rl.report.simulation import ReportData
from moe_rl.simulators.sensitivity import FACTORS, PerturbedRanking

OFF = f"{FACTORS[1] - 1.0:.0%}".replace("%", " %")


def ranking_sentences(report: ReportData) -> tuple[str, ...]:
    """Return whether the ranking holds, and where it does not; nothing where it was not asked for."""
    if not report.sensitivity:
        return ()
    best = report.best.policy
    gains, flips = [], []
    for ranking in report.sensitivity:
        gains.append(ranking.speedup_vs_static[best])
        if not ranking.holds:
            flips.append(f"with {_name(ranking)}, {_turned(ranking)}")
    gain = f"{best} is {min(gains):.2f}x to {max(gains):.2f}x as fast as static."
    if not flips:
        return (f"The ranking of the policies holds with every constant {OFF} lower or higher; {gain}",)
    return (
        f"Constants that are {OFF} off change the ranking of the policies: {'; '.join(flips)}. In all cases, {gain}",
    )


def ranking_rows(report: ReportData) -> list[dict[str, object]]:
    """Return one row per perturbation: constants, speed-ups in the report's order, and pairs that change places."""
    rows: list[dict[str, object]] = []
    for ranking in report.sensitivity:
        speedups = [f"{ranking.speedup_vs_static[name]:.3f}x" for name in report.policy_names]
        rows.append({"constants": _name(ranking), "speedups": speedups, "turned": _turned(ranking)})
    return rows


def _name(ranking: PerturbedRanking) -> str:
    return f"{ranking.constants} x{ranking.factor:g}"


def _turned(ranking: PerturbedRanking) -> str:
    return ", ".join(f"{slower} passes {faster}" for faster, slower in ranking.turned)
