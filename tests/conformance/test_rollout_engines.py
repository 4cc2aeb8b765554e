"""Every rollout engine: its files hold what was asked, and come back as the same map; it says how to be started."""

from pathlib import Path

import numpy as np
import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.expert_map import ExpertMap
from moe_rl.planner.rollout_map import spread_copies
from moe_rl.rollout_engines import ROLLOUT_ENGINES, RolloutEngine, encoded_map, read_expert_map
from moe_rl.rollout_engines.base import RunShape

REGISTRY = ROLLOUT_ENGINES
EXPERTS, NUM_LAYERS = 8, 5


every_engine = pytest.mark.parametrize("engine", ROLLOUT_ENGINES, ids=lambda each: each.name)


@every_engine
@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize("layers", [(1, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("load", ["skewed", "one hot", "none"])
def test_a_map_survives_its_file(
    engine: RolloutEngine,
    ep_size: int,
    layers: tuple[int, ...],
    load: str,
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    copies = 4 if ep_size > 1 else 0
    start = ExpertMap.start(
        num_layers=NUM_LAYERS, moe_layer_ids=layers, num_experts=EXPERTS, ep_size=ep_size, copies=copies
    )
    loads = {"skewed": rng.gamma(0.3, size=EXPERTS), "one hot": np.eye(EXPERTS)[5], "none": np.zeros(EXPERTS)}
    made = spread_copies(np.tile(loads[load], (3, len(layers), 1)), start, iterations=20)
    path = tmp_path / "map.json"
    path.write_bytes(encoded_map(engine, made))
    shape = RunShape(num_layers=NUM_LAYERS, moe_layer_ids=layers, num_experts=EXPERTS, ep_size=ep_size)
    found, read = read_expert_map(path, shape)
    assert found.name == engine.name
    assert np.array_equal(read.slots, made.slots)
    assert any(str(path) in line for line in engine.start_lines(made, path))
    assert any(str(made.num_copies) in line for line in engine.start_lines(made, path)) or engine.name != "sglang"


@every_engine
def test_a_map_that_it_would_break_on_is_not_written(engine: RolloutEngine) -> None:
    lost = ExpertMap(
        slots=np.array([[0, 1, 2, 2]], np.int32), moe_layer_ids=(0,), num_layers=1, num_experts=4, ep_size=2
    )
    with pytest.raises(InvalidInputError, match="no slot for expert 3 in layer 0"):
        encoded_map(engine, lost)


@every_engine
def test_it_says_when_it_chooses_how(engine: RolloutEngine) -> None:
    assert len({choice.name for choice in engine.choices}) == len(engine.choices) > 0
    assert all(choice.when for choice in engine.choices)
    page = (Path(__file__).parents[2] / "docs" / "frameworks" / "rollout-engines.md").read_text()
    assert f"`{engine.name}`" in page
