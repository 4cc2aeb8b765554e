"""SGLang's own expert_location.py takes the exported maps, and its tables are the predicted ones.

The engine does not run: its file is loaded from the wheel around stand-ins of the modules that hold its configuration.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_rl.core.decode import DecodeBatches
from moe_rl.core.expert_map import ExpertMap
from moe_rl.frameworks.sglang.expert_map import preferred_slots, static_slots
from moe_rl.planner.others.eplb import rebalance_experts
from moe_rl.planner.rollout_map import spread_copies
from moe_rl.rollout_engines import ROLLOUT_ENGINES, encoded_map

pytestmark = pytest.mark.framework
torch = pytest.importorskip("torch")
ENGINE = ROLLOUT_ENGINES["sglang"]
EXPERTS, LAYERS, MOE_LAYERS = 16, 5, (1, 2, 4)
CONFIG = SimpleNamespace(hf_config=None)


@contextmanager
def sglang(*, ep_size: int, nodes: int, copies: int, location: str, backend: str, algorithm: str) -> Iterator[Any]:
    """SGLang's module, for a rank of an engine with these settings."""
    root = Path(str(distribution("sglang").locate_file("sglang")))
    if not (root / "srt" / "eplb").is_dir():
        pytest.fail("the sglang wheel has no srt/eplb")
    settings = SimpleNamespace(
        ep_num_redundant_experts=copies,
        ep_dispatch_algorithm=algorithm,
        moe_a2a_backend=backend,
        init_expert_location=location,
        ep_join_mode=None,
        eplb_algorithm="auto",
    )
    parallel = SimpleNamespace(ep_size=ep_size, nnodes=nodes, elastic_ep_initial_size=None, tp_size=ep_size)
    wanted = SimpleNamespace(num_layers=LAYERS, num_logical_experts=EXPERTS, num_groups=None)
    model = SimpleNamespace(get_model_config_for_expert_location=lambda _: wanted)
    held = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "sglang"}
    for name in held:
        del sys.modules[name]
    try:
        for name in ("sglang", "sglang.srt", "sglang.srt.eplb", "sglang.srt.eplb.eplb_algorithms"):
            package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
        standins = {
            "sglang.srt.runtime_context": {
                "get_device": lambda: SimpleNamespace(device="cpu"),
                "get_exec": lambda: SimpleNamespace(moe=settings),
                "get_parallel": lambda: parallel,
                "get_resources": lambda: SimpleNamespace(expert_location_metadata=None),
            },
            "sglang.srt.elastic_ep.elastic_ep": {"elastic_expanded_world_enabled": lambda: False},
            "sglang.srt.model_loader": {"get_model_architecture": lambda _: (model, None)},
        }
        for name, values in standins.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(values)
        yield importlib.import_module("sglang.srt.eplb.expert_location")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(held)


def planned(rng: np.random.Generator, *, ep_size: int, copies: int) -> ExpertMap:
    start = ExpertMap.start(
        num_layers=LAYERS, moe_layer_ids=MOE_LAYERS, num_experts=EXPERTS, ep_size=ep_size, copies=copies
    )
    return spread_copies(rng.gamma(0.5, size=(8, len(MOE_LAYERS), EXPERTS)), start, iterations=50)


@pytest.mark.parametrize(("ep_size", "nodes", "copies"), [(4, 2, 8), (8, 2, 16), (8, 1, 8), (4, 1, 0)])
def test_every_rank_loads_the_map_and_sends_tokens_where_was_predicted(
    ep_size: int, nodes: int, copies: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    expert_map = planned(rng, ep_size=ep_size, copies=copies)
    path = tmp_path / "map.json"
    path.write_bytes(encoded_map(ENGINE, expert_map))
    predicted = static_slots(expert_map, ep_size // nodes)
    with sglang(
        ep_size=ep_size, nodes=nodes, copies=copies, location=str(path), backend="deepep", algorithm="static"
    ) as module:
        for rank in range(ep_size):
            loaded = module.compute_initial_expert_location_metadata(CONFIG, rank)
            assert np.array_equal(loaded.physical_to_logical_map.numpy()[list(MOE_LAYERS)], expert_map.slots)
            table = loaded.logical_to_rank_dispatch_physical_map.numpy()[list(MOE_LAYERS)]
            assert np.array_equal(table, predicted[rank])
            for row, layer in enumerate(MOE_LAYERS):
                # The copies that the dynamic choice draws from: one where the rank prefers one.
                near, _, count = preferred_slots(
                    expert_map.slots[row], num_experts=EXPERTS, ep_size=ep_size, ranks_per_node=ep_size // nodes
                )
                open_to = loaded.logical_to_all_physical_map_num_valid[layer].numpy()
                assert np.array_equal(open_to, np.where(near[rank] >= 0, 1, count))


def test_without_all_to_all_the_row_of_a_token_chooses_its_copy(rng: np.random.Generator, tmp_path: Path) -> None:
    expert_map = planned(rng, ep_size=4, copies=8)
    path = tmp_path / "map.json"
    path.write_bytes(encoded_map(ENGINE, expert_map))
    ids = np.argsort(rng.random((12, len(MOE_LAYERS), EXPERTS)), axis=2)[:, :, :3].astype(np.uint8)
    batches = DecodeBatches(
        routes=ids,
        batch=np.zeros(12, np.int64),
        source=np.arange(12) % 4,
        num_batches=1,
        num_experts=EXPERTS,
        ep_size=4,
    )
    (choice,) = [each for each in ENGINE.choices if each.name == "by row"]
    predicted = choice.serve(expert_map, batches, 4)
    with sglang(ep_size=4, nodes=1, copies=8, location=str(path), backend="none", algorithm="dynamic") as module:
        dispatch = importlib.import_module("sglang.srt.eplb.expert_location_dispatch")
        for rank in range(4):
            loaded = module.compute_initial_expert_location_metadata(CONFIG, rank)
            for row, layer in enumerate(MOE_LAYERS):
                info = dispatch.ExpertLocationDispatchInfo(
                    ep_dispatch_algorithm="dynamic",
                    partial_logical_to_rank_dispatch_physical_map=None,
                    partial_logical_to_all_physical_map=loaded.logical_to_all_physical_map[layer],
                    partial_logical_to_all_physical_map_num_valid=loaded.logical_to_all_physical_map_num_valid[layer],
                    num_physical_experts=expert_map.num_slots,
                    rank_invariant=True,
                )
                sent = dispatch.topk_ids_logical_to_physical(torch.from_numpy(ids[:, row].astype(np.int64)), info)
                assert np.array_equal(sent.numpy(), predicted[:, row])


def test_its_eplb_is_ours_up_to_ties(rng: np.random.Generator) -> None:
    load = rng.gamma(0.5, size=(3, EXPERTS))
    with sglang(ep_size=4, nodes=1, copies=8, location="trivial", backend="deepep", algorithm="static"):
        theirs = importlib.import_module("sglang.srt.eplb.eplb_algorithms.deepseek")
        slots, _, _ = theirs.rebalance_experts(torch.from_numpy(load), 24, 1, 1, 4, False)
    ours = rebalance_experts(load, num_physical_experts=24, num_groups=1, num_nodes=1, num_ranks=4)
    assert np.array_equal(np.sort(slots.numpy().reshape(3, 4, 6)), np.sort(ours.reshape(3, 4, 6)))
