"""Two regimes of drift x four arms x 60 fresh seeds, with exact paired tests; the rule is docs/countdown-power.md.

    python benchmarks/countdown_power.py                    every run that is missing, then results and the page's block
    python benchmarks/countdown_power.py --seeds 200 206    only the seeds 200 .. 205
    python benchmarks/countdown_power.py --results-only

It may be stopped at any moment: a run that was ended half-way goes on at its last checkpoint, a complete one is not
repeated. A seed counts when all its runs are complete, so that no arm is judged on other problems than the next one.
Results: benchmarks/results/cpu/countdown_power.json and a block of the page.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import countdown_drift as drift
import numpy as np
from countdown_study import is_complete, machine, say
from numpy.typing import NDArray

from examples.countdown.run import run_forked
from moe_rl.core.errors import require

ROOT = Path(__file__).resolve().parent.parent
STEM = ROOT / "benchmarks" / "results" / "cpu" / "countdown_power"
PAGE = ROOT / "docs" / "countdown-power.md"
MARKS = "<!-- benchmarks/countdown_power.py writes from here -->\n", "<!-- to here -->\n"

SEEDS = range(200, 260)
REGIMES = ("learning rate", "updates per rollout")
ARMS = (drift.PLAIN, "router shift", "GSPO", "router shift + R3")
LEVEL = 0.05
ANSWERS = 512
"""Held-out answers of an evaluation, 128 problems x 4 samples: a lift is a whole number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the rule looks at in one run."""

    regime: str
    arm: str
    seed: int
    commit: str
    lift_answers: int
    """Right held-out answers after the last step minus before the first."""
    collapsed_at: int | None

    @classmethod
    def of(cls, run: drift.Run) -> "Outcome":
        """Read it from a complete run."""
        answers = round(run.lift * ANSWERS)
        require(abs(run.lift * ANSWERS - answers) < 0.01, f"a lift of {run.lift} is not of {ANSWERS} answers.")
        return cls(
            regime=run.regime, arm=run.arm, seed=run.seed, commit=run.commit,
            lift_answers=answers, collapsed_at=run.collapsed_at,
        )  # fmt: skip


def sign_flip_law(differences: Sequence[int]) -> NDArray[np.float64]:
    """Return the probability of each sum over all 2^n choices of signs: index s + sum |d| stands for the sum s.

    Example: differences 1 and 2 give the sums -3, -1, 1, 3 alike: [1, 0, 1, 0, 1, 0, 1] / 4. Only positive numbers are
    added and halved, so that it is exact up to rounding, for any number of seeds.
    """
    reach = sum(map(abs, differences))
    law = np.zeros(2 * reach + 1)
    law[reach] = 1.0
    for step in map(abs, differences):
        if step:
            moved = np.zeros_like(law)
            moved[step:] += law[:-step] / 2
            moved[:-step] += law[step:] / 2
            law = moved
    return law


def sign_flip_p(differences: Sequence[int]) -> float:
    """Return the two-sided exact p of paired differences under the law that each sign is a fair coin."""
    reach, total = sum(map(abs, differences)), abs(sum(differences))
    law = sign_flip_law(differences)
    return min(1.0, float(law[: reach - total + 1].sum() + law[reach + total :].sum()))


def sign_flip_interval(differences: Sequence[int]) -> tuple[float, float]:
    """Return the 95 % interval of the shift: the shifts that the exact test does not reject, to half an answer."""

    def p_of(half_answers: int) -> float:
        return sign_flip_p([2 * difference - half_answers for difference in differences])

    middle = round(2 * sum(differences) / len(differences))
    width = 2 * max(abs(2 * difference - middle) for difference in differences) + 2
    ends = []
    for side in (-1, 1):
        inside, outside = 0, width  # an interval without an end has the width
        while outside - inside > 1:
            step = (inside + outside) // 2
            inside, outside = (step, outside) if p_of(middle + side * step) > LEVEL else (inside, step)
        ends.append((middle + side * outside) / 2)
    return ends[0], ends[1]


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Return the two-sided exact p of pairs in which one collapsed and the other did not: a fair coin for each."""
    pairs, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(pairs, count) for count in range(fewer + 1))
    return min(1.0, float(Fraction(2 * tail, 2**pairs)))


def share_interval(count: int, of: int) -> tuple[float, float]:
    """Return Clopper and Pearson's 95 % interval of a share."""

    def at_most(seen: int, share: float) -> float:
        return sum(math.comb(of, each) * share**each * (1 - share) ** (of - each) for each in range(seen + 1))

    def share_where(falls: Callable[[float], bool]) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if falls(middle) else (middle, high)
        return low

    lowest = share_where(lambda share: 1 - at_most(count - 1, share) >= LEVEL / 2) if count else 0.0
    highest = share_where(lambda share: at_most(count, share) <= LEVEL / 2) if count < of else 1.0
    return lowest, highest


def holm(p_values: Sequence[float]) -> list[bool]:
    """Return which hypotheses Holm's step-down rejects at 5 % over all of them."""
    rejected, order = [False] * len(p_values), sorted(range(len(p_values)), key=lambda place: p_values[place])
    for rank, place in enumerate(order):
        if p_values[place] > LEVEL / (len(p_values) - rank):
            break
        rejected[place] = True
    return rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm against plain in one regime, on the same seeds."""

    regime: str
    arm: str
    differences: tuple[int, ...]
    """Lift minus plain's by seed, in answers."""
    only_plain: int
    """Seeds on which plain collapsed and the arm did not."""
    only_arm: int

    @property
    def lift_p(self) -> float:
        """Exact p of the sign flips."""
        return sign_flip_p(self.differences)

    @property
    def collapse_p(self) -> float:
        """Exact p of McNemar's test."""
        return mcnemar_p(self.only_plain, self.only_arm)


def whole_seeds(outcomes: Sequence[Outcome]) -> dict[int, dict[tuple[str, str], Outcome]]:
    """Return by seed its runs by (regime, arm): the seeds of the rule that have them all."""
    by_seed: dict[int, dict[tuple[str, str], Outcome]] = {}
    for outcome in outcomes:
        by_seed.setdefault(outcome.seed, {})[outcome.regime, outcome.arm] = outcome
    return {
        seed: runs for seed, runs in sorted(by_seed.items()) if seed in SEEDS and len(runs) == len(REGIMES) * len(ARMS)
    }


def comparisons(outcomes: Sequence[Outcome]) -> list[Comparison]:
    """Return every arm against plain in every regime."""
    seeds, result = whole_seeds(outcomes).values(), []
    for regime in REGIMES:
        for arm in ARMS[1:]:
            pairs = [(runs[regime, arm], runs[regime, drift.PLAIN]) for runs in seeds]
            collapses = [(of_arm.collapsed_at is not None, plain.collapsed_at is not None) for of_arm, plain in pairs]
            result.append(
                Comparison(
                    regime=regime,
                    arm=arm,
                    differences=tuple(of_arm.lift_answers - plain.lift_answers for of_arm, plain in pairs),
                    only_plain=collapses.count((False, True)),
                    only_arm=collapses.count((True, False)),
                )
            )
    return result


def block(outcomes: Sequence[Outcome]) -> str:
    """Return what the page says of the results."""
    seeds = whole_seeds(outcomes)
    found = comparisons(outcomes)
    p_values = [p for each in found for p in (each.lift_p, each.collapse_p)]
    rejected = holm(p_values)
    names = [
        f"the {what} of {each.arm} in the regime `{each.regime}`"
        for each in found
        for what in ("lift", "collapse rate")
    ]
    apart = [name for name, is_apart in zip(names, rejected, strict=True) if is_apart]
    intervals = [sign_flip_interval(each.differences) for each in found]
    widest = max(high - low for low, high in intervals) / 2 / ANSWERS
    count = f"All {len(SEEDS)}" if len(seeds) == len(SEEDS) else f"{len(seeds)} of the {len(SEEDS)}"
    commits = sorted({outcome.commit for runs in seeds.values() for outcome in runs.values()})
    text = (
        f"{count} seeds ({min(seeds)} to {max(seeds)}) are complete: {len(seeds) * 8} runs at commit "
        f"{', '.join(commits)}. Holm's rule at 5 % over all {len(p_values)} tests finds {len(apart)} "
        f"significant difference{'' if len(apart) == 1 else 's'} from `plain`"
        f"{': ' + ', and '.join(apart) if apart else ''}.\n\n"
        f"**What the study can detect.** A sign-flip test on {len(seeds)} pairs cannot give p below "
        f"{2 / 2 ** len(seeds):.1g}. The widest interval of a difference in lift is ± {widest:.3f}; smaller "
        "differences may exist undetected. McNemar's test uses only discordant seeds. With D discordant seeds, "
        f"its p is at least 2^(1 - D), so fewer than {smallest_discordant(len(p_values))} discordant seeds cannot pass "
        "the first step of Holm's rule.\n\n"
    )
    return text + "\n".join([*_rates(seeds), "", *_tests(found, intervals, rejected)]) + "\n"


def smallest_discordant(num_tests: int) -> int:
    """Return the discordant pairs, all on one side, that the first step of Holm's rule asks for."""
    pairs = 1
    while 2.0 ** (1 - pairs) > LEVEL / num_tests:
        pairs += 1
    return pairs


def _rates(seeds: dict[int, dict[tuple[str, str], Outcome]]) -> list[str]:
    lines = ["| regime | arm | mean lift | collapsed | 95 % interval of the rate |", "|---|---|---:|---:|---|"]
    for regime in REGIMES:
        for arm in ARMS:
            runs = [by_case[regime, arm] for by_case in seeds.values()]
            collapsed = sum(run.collapsed_at is not None for run in runs)
            low, high = share_interval(collapsed, len(runs))
            lift = sum(run.lift_answers for run in runs) / len(runs) / ANSWERS
            lines.append(f"| {regime} | {arm} | {lift:+.3f} | {collapsed} of {len(runs)} | {low:.2f} .. {high:.2f} |")
    return lines


def _tests(
    found: Sequence[Comparison], intervals: Sequence[tuple[float, float]], rejected: Sequence[bool]
) -> list[str]:
    lines = [
        "| against plain | difference in lift | 95 % interval | p | only plain collapsed | only arm | p | rejected |",
        "|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for number, (each, (low, high)) in enumerate(zip(found, intervals, strict=True)):
        mean = sum(each.differences) / len(each.differences) / ANSWERS
        which = [name for name, yes in zip(("lift", "collapse"), rejected[2 * number :], strict=False) if yes]
        lines.append(
            f"| {each.arm}, {each.regime} | {mean:+.3f} | {low / ANSWERS:+.3f} .. {high / ANSWERS:+.3f} "
            f"| {each.lift_p:.3g} | {each.only_plain} | {each.only_arm} | {each.collapse_p:.3g} "
            f"| {' and '.join(which) or 'none'} |"
        )
    return lines


def complete(seeds: Sequence[int], out: Path, *, start: bool = True) -> list[Outcome]:
    """Return the outcomes of the complete runs, after starting those that are missing, seed by seed."""
    wanted = [(seed, regime, arm) for seed in seeds for regime in REGIMES for arm in ARMS]
    outcomes, commit = [], str(machine()["commit"])
    for number, (seed, regime, arm) in enumerate(wanted, 1):
        config = drift.config_of(regime, arm, seed, out)
        made_on = Path(f"{config.out}.commit")
        if start and not is_complete(config):
            import examples.countdown.rank  # noqa: F401  # what every fork needs, loaded once

            say(f"run {number} of {len(wanted)}: {regime}, {arm}, seed {seed}; {drift.cpu_seconds():.0f} s of CPU")
            made_on.parent.mkdir(parents=True, exist_ok=True)
            made_on.write_text(commit, encoding="utf-8")
            run_forked(config)
        if is_complete(config):
            outcomes.append(Outcome.of(drift.Run.read(config, regime, arm, made_on.read_text("utf-8"))))
    return outcomes


def write_results(outcomes: Sequence[Outcome]) -> None:
    """Write JSON and the block of the page."""
    require(len(whole_seeds(outcomes)) > 0, "no seed of the rule is complete yet.")
    head = {"benchmark": "countdown_power", "command": "python benchmarks/countdown_power.py", "answers": ANSWERS}
    lines = ",\n".join(json.dumps(asdict(outcome)) for outcome in outcomes)
    stem = json.dumps(head, indent=1).removesuffix("\n}")
    STEM.with_suffix(".json").write_text(f'{stem},\n "runs": [\n{lines}\n]}}\n', encoding="utf-8")
    before, _, rest = PAGE.read_text("utf-8").partition(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}{block(outcomes)}{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, default=[SEEDS.start, SEEDS.stop], metavar=("FIRST", "END"))
    parser.add_argument("--out", type=Path, default=Path("out/countdown_power"), help="folder of the runs")
    parser.add_argument("--results-only", action="store_true")
    parser.add_argument("--no-results", action="store_true", help="leave results and page as they are")
    given = parser.parse_args(argv)
    outcomes = complete(range(*given.seeds), given.out, start=not given.results_only)
    if not given.no_results:
        write_results(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
