"""How unkind the machine is: what arrives late, who is starved, how many instructions a bundle may run at once."""

import random
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

ALL = 64
"""More warps than a CTA has."""
STAGES = 5
"""Rings have 4 to 6 stages, and per stage two or three mbarriers, one after the other: these tell all but two apart."""
ORDERS = 4
"""Schedules of launches in which nothing is asynchronous: their results depend on an order of warps only where they
race, and clocks find a race in every order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One way for everything asynchronous to go wrong."""

    name: str
    grain: int = ALL
    """Most warps of a bundle: all of a CTA, a warpgroup (4), or one."""
    late_copies: bool = True
    """TMA and cp.async deliver when nothing else can go on, instead of at once."""
    late_to: int | None = None
    """TMA is late to this CTA of a cluster and early to the others."""
    late_products: bool = True
    """Tensor cores read their operands, and give results, when these are waited for, instead of at once."""
    starved_warps: frozenset[int] = frozenset()
    starved_cta: int | None = None
    """Of a cluster; None with starved warps means those of every CTA."""
    turn: int = 400
    last_stage: int | None = None
    """Of a ring: what is late for it comes last of all."""
    stray: float = 0.05
    """How often something late arrives although others could go on."""
    seed: int = 0

    def is_late(self, rank: int) -> bool:
        return self.late_copies if self.late_to is None else rank == self.late_to

    def is_last(self, work: Any) -> bool:
        """Whether work that is late is of the stage that waits for all others; its mbarrier's number says of which."""
        return self.last_stage is not None and getattr(work, "barrier", None) is not None and (
            work.barrier.agent % STAGES == self.last_stage
        )  # fmt: skip

    def is_starved(self, bundle: Any) -> bool:
        here = self.starved_cta in (None, bundle.cta.rank)
        if self.starved_warps:
            return here and not self.starved_warps.isdisjoint(range(bundle.low, bundle.high))
        return self.starved_cta is not None and here

    def steps(self, choose: random.Random) -> int:
        """Return how many instructions the next turn has."""
        return self.turn if choose.random() > 0.3 else choose.randint(1, max(2, self.turn // 4))


def schedules(texts: Collection[str], count: int = 20) -> list[Schedule]:
    """Return `count` schedules for kernels, given as PTX.

    Each combination of early and late copies and products; each role (warps that do one part of the work), each CTA
    and its copies starved, in a cluster with late copies in one CTA and early ones in the other; then random
    interleavings of single warps, warpgroups and whole CTAs, in which another stage's copies come last each time.
    """
    cluster = max((int(size) for text in texts for size in re.findall(r"\.reqnctapercluster (\d+)", text)), default=1)
    roles = _roles(texts)
    found = [
        Schedule(name="late"),
        Schedule(name="early", late_copies=False, late_products=False),
        Schedule(name="late copies, early products", late_products=False),
        Schedule(name="early copies, late products", late_copies=False),
        Schedule(name="single warps, late", grain=1, turn=60),
    ]
    for rank in range(cluster) if cluster > 1 else ():
        found.append(Schedule(name=f"starve CTA {rank}", starved_cta=rank, grain=4, late_copies=False))
        found.append(Schedule(name=f"copies to CTA {rank} late", late_to=rank, grain=4))
    found += [
        Schedule(
            name=f"starve warps {min(warps)}.. of CTA {rank}, copies {'late' if late else 'early'}",
            starved_warps=warps, starved_cta=rank, late_copies=late, grain=4 if len(warps) >= 4 else 1,
        )
        for rank in range(cluster) for number, warps in enumerate(roles) for late in (True, False)
        if cluster == 1 or late == ((rank + number) % 2 == 0)
    ]  # fmt: skip
    found += [
        Schedule(
            name=f"random {seed}", grain=(ALL, 4, 1)[seed % 3], late_copies=seed % 2 == 0,
            late_products=seed % 4 < 2, turn=(12, 60, 400)[seed // 3 % 3], stray=0.3, last_stage=seed % STAGES,
            seed=seed,
        )
        for seed in range(count)
    ]  # fmt: skip
    return found[:count]


def _roles(texts: Iterable[str]) -> list[frozenset[int]]:
    """Return the warps that have a part of their own in specialized kernels: warpgroups, and single warps beyond 4."""
    found: list[frozenset[int]] = []
    for text in texts:
        threads = int(text.split(".reqntid ", 1)[1].split()[0])
        if "setmaxnreg" in text or ("tcgen05" in text and threads > 128):
            found += [frozenset(range(low, min(low + 4, threads // 32))) for low in range(0, threads // 32, 4)]
    return list(dict.fromkeys(found))
