"""What is written for an engine is read back as it was; what is broken is refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.expert_map import ExpertMap
from moe_rl.rollout_engines import ROLLOUT_ENGINES, encoded_map, read_expert_map
from moe_rl.rollout_engines.base import RunShape

LAYERS = (1, 2, 4)
SHAPE = RunShape(num_layers=6, moe_layer_ids=LAYERS, num_experts=4, ep_size=2)
ROW = [0, 1, 2, 2, 3, 0]


def a_map(rows: list[list[int]] | None = None, *, ep_size: int = 2) -> ExpertMap:
    slots = np.array(rows or [ROW, [3, 2, 1, 0, 1, 2], ROW], np.int32)
    return ExpertMap(slots=slots, moe_layer_ids=LAYERS, num_layers=6, num_experts=4, ep_size=ep_size)


def written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_sglangs_file_has_every_hidden_layer_and_no_other_key() -> None:
    document = json.loads(encoded_map(ROLLOUT_ENGINES["sglang"], a_map()))
    assert list(document) == ["physical_to_logical_map"]
    rows = document["physical_to_logical_map"]
    assert len(rows) == 6
    assert rows[0] == rows[3] == rows[5] == [0, 1, 2, 3, 0, 1]
    assert [rows[layer] for layer in LAYERS] == a_map().slots.tolist()


GOOD = [[0, 1, 2, 3, 0, 1], ROW, ROW, ROW, ROW, ROW]


@pytest.mark.parametrize(
    ("name", "document", "sentence"),
    [
        ("m.json", {"physical_to_logical_map": GOOD[1:]}, "one row per hidden layer .6., but has 5"),
        ("m.json", {"physical_to_logical_map": GOOD, "origin": "x"}, "accepts only the key physical_to_logical_map"),
        ("m.json", {"physical_to_logical_map": [*GOOD[:4], ROW[:5], ROW]}, "all rows must have the same number"),
        (
            "m.json",
            {"physical_to_logical_map": [row[:5] for row in GOOD]},
            r"a multiple of 2 \(the number of EP ranks\)",
        ),
        ("m.json", {"physical_to_logical_map": [*GOOD[:4], [0, 0, 1, 2, 3, 1], ROW]}, "puts expert 0 on rank 0 twice"),
        (
            "m.json",
            {"physical_to_logical_map": [*GOOD[:4], [0, 1, 2, 2, 1, 0], ROW]},
            "no slot for expert 3 in layer 4",
        ),
        ("m.json", {"physical_to_logical_map": [*GOOD[:4], [0, 1, 2, 4, 3, 0], ROW]}, "expert ids must be 0 to 3"),
        ("m.json", {"physical_to_logical_map": [*GOOD[:4], [0, 1, 2, 2.5, 3, 0], ROW]}, "whole numbers"),
        ("m.json", {"logical_count": [[1, 2]]}, "does not match the format of any known engine"),
        ("m.json", [1, 2], "not contain a JSON object"),
    ],
)
def test_a_file_that_an_engine_would_break_on_is_refused(
    name: str, document: Any, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        read_expert_map(written(tmp_path / name, document), SHAPE)


def test_a_missing_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="does not exist"):
        read_expert_map(tmp_path / "none.json", SHAPE)
    (tmp_path / "m.json").write_bytes(b"{\x00: [")
    with pytest.raises(InvalidInputError, match="cannot be read as an expert map"):
        read_expert_map(tmp_path / "m.json", SHAPE)
