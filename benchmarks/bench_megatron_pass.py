"""Host work of `begin_pass` after planning: slot tables and copies of every (micro-batch, layer) of a large pass."""

from typing import Any

import numpy as np
import pytest

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan

LAYERS, MICRO_BATCHES, RANKS, EXPERTS, TOP_K = 48, 64, 32, 128, 8
TOKENS_PER_RANK = 2048


@pytest.fixture(scope="module")
def plan() -> Plan:
    """An `ultraep` plan of skewed loads at the size of Qwen3-30B-A3B on EP32."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(EXPERTS, 0.5), size=(1, MICRO_BATCHES, LAYERS, 1))
    pairs = rng.poisson(shares * TOKENS_PER_RANK * TOP_K, (1, MICRO_BATCHES, LAYERS, RANKS, EXPERTS))
    load = StepLoad(
        pairs=pairs.astype(np.int32), tokens=np.full((1, MICRO_BATCHES, RANKS), TOKENS_PER_RANK), top_k=TOP_K
    )
    model = MoeModelSpec(
        name="benchmark",
        num_layers=LAYERS,
        moe_layer_ids=tuple(range(LAYERS)),
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=2048,
        moe_ffn_hidden_size=768,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        vocab_size=1,
        activation="swiglu",
    )
    config = BalancerConfig(objective="imbalance", ranks_per_node=8)
    return plan_of_load(load, config=config, model=model, topology=cluster_topology(config, ep_size=RANKS))


def test_slot_tables(benchmark: Any, plan: Plan) -> None:
    """[7, cells, slots] of one rank."""
    slots = pytest.importorskip("moe_rl.balancing.slots")
    tables = benchmark(lambda: slots.SlotTables.of_plan(plan, group=0, source_rank=3))
    assert tables.row.shape == (MICRO_BATCHES, LAYERS)


def test_copies_of_every_cell(benchmark: Any, plan: Plan) -> None:
    """Columns for the whole pass, and the objects of every (micro-batch, layer) of one rank."""
    cells_of = pytest.importorskip("moe_rl.megatron.replica_cells").ReplicaCells.of_plan
    buffers = _Buffers()

    def all_cells() -> int:
        anywhere = (np.diff(plan.replicas.offsets) > 0).reshape(MICRO_BATCHES, LAYERS)
        cells = cells_of(plan, anywhere=anywhere, rank=3, buffers=buffers, chunks=[range(LAYERS)])
        made = [cells.cell(m, layer) for m in range(MICRO_BATCHES) for layer in range(LAYERS)]
        return sum(len(cell.copies) for cell in made if cell is not None)

    assert benchmark(all_cells) > 0


class _Buffers:
    """The sizes that the copies depend on; no memory."""

    replica_slots, num_slots, messages = 1, 1, 2

    def staging_capacity(self, *, hosted: int, across: bool) -> int:
        return 1 + 2 * (1 - hosted)
