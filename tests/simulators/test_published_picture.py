"""Dirichlet loads from mild to collapse under six policies: the step times that a closed-form study reports.

Qwen3-30B-A3B, one EP group on H100, 8 micro-batches of sequences of 8192 tokens. Shares of the expected loads go
straight into the cost model. The figures are from a calculation by the same published formulas, made apart from this
code; they hold to 0.02. Its rows with a flat all-to-all are left out: it charges a rank's NIC with the rank's own rows,
where a node's ranks share their NICs.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import reference_policies as policies
from strategies import STUDY_HARDWARE

from benchmarks.dirichlet import DIRICHLET_SCENARIOS, dirichlet_steps
from moe_rl.config import load_model
from moe_rl.core.cost import LayerRows, SoftwareCosts, independent_visits, padded_rows
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.balanced import uniform_load
from moe_rl.simulators.base_time import SourceWork
from moe_rl.simulators.pricing import StepPricing
from moe_rl.simulators.setting import StepSetting

LAYERS, MICRO_BATCHES, EXPERTS, TOP_K, LENGTH = 48, 8, 128, 8, 8192
STEADY = 1_000_000


@dataclass(frozen=True)
class Row:
    scenario: str
    ep_size: int
    imbalance: tuple[float, float, float, float]
    """static, eplb on the previous step, eplb on this step, relibra"""
    speedup: tuple[float, float, float, float, float, float]
    """over static: eplb, eplb-oracle, reorder only, relibra, relibra with node swaps, forced balance"""
    tokens: int = 8192
    setting: StepSetting = field(default_factory=StepSetting)

    @property
    def name(self) -> str:
        return f"{self.scenario}-ep{self.ep_size}-{self.setting.dispatcher}-{self.tokens}"


FULL = StepSetting(recompute="full")
ROWS = [
    Row("mild", 8, (1.19, 1.08, 1.05, 1.01), (1.03, 1.04, 1.04, 1.05, 1.05, 1.06)),
    Row("mild", 32, (1.63, 1.24, 1.15, 1.04), (1.08, 1.10, 1.09, 1.12, 1.12, 1.14)),
    Row("medium", 16, (1.64, 1.22, 1.16, 1.03), (1.13, 1.15, 1.14, 1.18, 1.19, 1.20)),
    Row("heavy", 32, (2.62, 1.48, 1.35, 1.08), (1.21, 1.24, 1.17, 1.30, 1.32, 1.35)),
    Row("extreme", 16, (2.26, 1.38, 1.30, 1.05), (1.26, 1.29, 1.20, 1.36, 1.37, 1.41)),
    Row("bursty", 32, (2.66, 2.12, 1.87, 1.18), (1.09, 1.14, 1.10, 1.28, 1.32, 1.36)),
    Row("heavy+bursty", 16, (2.15, 1.67, 1.55, 1.09), (1.13, 1.17, 1.11, 1.32, 1.34, 1.38)),
    Row("heavy+bursty", 32, (3.27, 2.18, 1.90, 1.20), (1.19, 1.25, 1.12, 1.40, 1.44, 1.51)),
    Row("collapse", 16, (2.86, 1.96, 1.78, 1.11), (1.22, 1.27, 1.16, 1.50, 1.54, 1.60)),
    Row("collapse", 32, (4.54, 2.64, 2.26, 1.26), (1.34, 1.42, 1.12, 1.67, 1.72, 1.85)),
    Row("collapse", 16, (2.86, 1.96, 1.78, 1.11), (1.24, 1.30, 1.17, 1.56, 1.60, 1.67), 16384, FULL),
]
MORE_ROWS = [
    Row("mild", 16, (1.36, 1.15, 1.09, 1.02), (1.07, 1.08, 1.08, 1.10, 1.10, 1.11)),
    Row("medium", 8, (1.33, 1.13, 1.09, 1.01), (1.06, 1.07, 1.07, 1.09, 1.09, 1.11)),
    Row("medium", 32, (2.11, 1.36, 1.25, 1.06), (1.15, 1.17, 1.14, 1.21, 1.22, 1.24)),
    Row("heavy", 16, (1.89, 1.29, 1.22, 1.04), (1.18, 1.21, 1.18, 1.26, 1.26, 1.28)),
    Row("extreme", 32, (3.42, 1.63, 1.48, 1.12), (1.34, 1.38, 1.15, 1.46, 1.48, 1.54)),
    Row("bursty", 16, (1.91, 1.64, 1.54, 1.07), (1.07, 1.10, 1.08, 1.25, 1.27, 1.29)),
    Row("heavy+bursty", 8, (1.61, 1.38, 1.32, 1.01), (1.06, 1.08, 1.06, 1.17, 1.17, 1.20)),
    Row("collapse", 8, (1.97, 1.52, 1.42, 1.02), (1.11, 1.14, 1.11, 1.25, 1.25, 1.31)),
]
NAMES = ("static", "hist", "oracle", "reorder", "relibra", "relib+", "ideal")


CASES = [pytest.param(row, id=row.name) for row in ROWS]
CASES += [pytest.param(row, id=row.name, marks=pytest.mark.slow) for row in MORE_ROWS]


@pytest.mark.lengthy
@pytest.mark.parametrize("row", CASES)
def test_the_study_is_reproduced(row: Row) -> None:
    imbalance, seconds = study(row)
    for name, expected in zip(("static", "hist", "oracle", "relibra"), row.imbalance, strict=True):
        assert imbalance[name] == pytest.approx(expected, abs=0.02), name
    for name, expected in zip(NAMES[1:], row.speedup, strict=True):
        assert seconds["static"] / seconds[name] == pytest.approx(expected, abs=0.02), name


@pytest.mark.lengthy
def test_overlap_raises_the_value_of_balancing() -> None:
    """1.56x over static and 1.19x over EPLB's oracle where 1.40x and 1.12x were without overlap; 6 % below balance.

    With nothing left exposed, which is how the study's figures come out.
    """
    overlap = StepSetting(overlap_all_to_all=True, software=SoftwareCosts(overlap_left=0.0))
    _, seconds = study(Row("heavy+bursty", 32, (0, 0, 0, 0), (0, 0, 0, 0, 0, 0), setting=overlap))
    assert seconds["static"] / seconds["relibra"] == pytest.approx(1.56, abs=0.02)
    assert seconds["oracle"] / seconds["relibra"] == pytest.approx(1.19, abs=0.02)
    assert 1 - seconds["ideal"] / seconds["relibra"] == pytest.approx(0.06, abs=0.01)


def study(row: Row) -> tuple[dict[str, float], dict[str, float]]:
    """Imbalance and seconds of one row of the study."""
    previous, current = dirichlet_steps(
        DIRICHLET_SCENARIOS[row.scenario], num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K
    )
    price = _Price(row)
    shares, slots = _shares(previous, current, row.ep_size)
    imbalance, seconds = {}, {}
    for name, x in shares.items():
        imbalance[name], seconds[name] = price(current, x, slots if name.startswith("relib") else None, name, slots)
    uniform = np.full_like(current, TOP_K / EXPERTS)
    static = np.broadcast_to(policies.contiguous(EXPERTS, row.ep_size), shares["static"].shape)
    imbalance["ideal"], seconds["ideal"] = price(uniform, static, None, "ideal", slots)
    return imbalance, seconds


def _shares(
    previous: np.ndarray, current: np.ndarray, ranks: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """x [L, M, E, P] of every policy and the slots [L, M] that the replicating ones use."""
    rng = np.random.default_rng(0)
    names = ("static", "hist", "oracle", "reorder", "relibra", "relib+")
    x = {name: np.zeros((LAYERS, MICRO_BATCHES, EXPERTS, ranks), np.float32) for name in names}
    slots = {name: np.zeros((LAYERS, MICRO_BATCHES)) for name in ("relibra", "relib+")}
    nodes = max(1, ranks // policies.RANKS_PER_NODE)
    for layer, loads in enumerate(current):
        x["static"][layer] = policies.contiguous(EXPERTS, ranks)
        x["hist"][layer] = policies.eplb(previous[layer].mean(axis=0), ranks)
        x["oracle"][layer] = policies.eplb(loads.mean(axis=0), ranks)
        weight = loads.sum(axis=0)
        node = policies.heaviest_first(weight, nodes)
        swapped = policies.swap_nodes(loads, node, rng)
        for name, of_node in (("relibra", node), ("relib+", swapped)):
            home = policies.ranks_within_nodes(weight, of_node, ranks)
            if name == "relibra":
                x["reorder"][layer] = home[:, None] == np.arange(ranks)
            for micro_batch, load in enumerate(loads):
                x[name][layer, micro_batch], slots[name][layer, micro_batch] = policies.replicate(load, home, ranks)
    return x, slots


class _Price:
    def __init__(self, row: Row) -> None:
        hardware, self.model = STUDY_HARDWARE, load_model("qwen3-30b-a3b").spec
        self.topology = ClusterTopology(hardware=hardware, ep_size=row.ep_size)
        self.tokens, self.setting = row.tokens, row.setting
        load = uniform_load(self.model, self.topology, tokens_per_rank=row.tokens)
        params = row.setting.layer_cost_params(self.model, self.topology)
        self.pricing = StepPricing(model=self.model, topology=self.topology, setting=row.setting, passes=(params,))
        counts = np.broadcast_to(load.tokens.astype(float), (1, MICRO_BATCHES, row.ep_size))
        self.work = SourceWork(tokens=counts, squares=counts * LENGTH, attention_squares=counts * LENGTH)

    def __call__(
        self, q: np.ndarray, x: np.ndarray, replicates: object, name: str, slots: dict[str, np.ndarray]
    ) -> tuple[float, float]:
        """(mean over layers and micro-batches of max / mean rows, seconds of the step)."""
        q, x = q.transpose(1, 0, 2), x.transpose(1, 0, 3, 2)
        shares = q[:, :, None, :] * x
        tokens = np.full(q.shape[:2], float(self.tokens))
        ranks = self.topology.ep_size
        visits, ingress, egress = independent_visits(shares, tokens, self.topology.ranks_per_domain)
        per_expert = shares * self.tokens * ranks
        rows = per_expert.sum(axis=3)
        used = slots[name].T if replicates is not None else np.zeros(q.shape[:2])
        at = LayerRows(
            rows=rows[None],
            padded_rows=padded_rows(per_expert, 128.0).sum(axis=3)[None],
            active_experts=(per_expert > 0).sum(axis=3)[None].astype(float),
            rank_visits=visits[None],
            nic_ingress=ingress[None],
            nic_egress=egress[None],
            replicas=used[None],
            cross_node_replicas=np.zeros((1, *q.shape[:2])),
        )
        # The study has every forward beside a backward, as in a step without a first micro-batch.
        seconds = sum(part.sum() for part in self.pricing.seconds(at, self.work, micro_batches=STEADY).values())
        return float((rows.max(axis=2) / rows.mean(axis=2)).mean()), float(seconds)
