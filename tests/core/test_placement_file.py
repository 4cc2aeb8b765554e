"""Placement files: what is read is what was written, and nothing damaged is accepted."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement_file import read_placement, write_placement


@given(data=st.data(), resident_slots=st.integers(0, 2))
def test_a_placement_file_is_read_back_and_replaced_in_one_rename(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, resident_slots: int
) -> None:
    folder = tmp_path_factory.mktemp("placement")
    for _ in range(2):
        placement = data.draw(placements(num_layers=2, num_experts=8, ep_size=4, resident_slots=resident_slots))
        write_placement(placement, folder / "placement.json")
        read = read_placement(folder / "placement.json")
        assert np.array_equal(read.physical_to_logical_map, placement.physical_to_logical_map)
        assert np.array_equal(read.home_rank, placement.home_rank)
        assert read.resident_slots == resident_slots
    assert [each.name for each in folder.iterdir()] == ["placement.json"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "damaged, or is not a placement"),
        ("[]", "damaged, or is not a placement"),
        ("{}", "damaged, or is not a placement"),
        (json.dumps({"schema": "moe_rl.placement/9", "sha256": ""}), "this version of moe_rl reads only"),
    ],
)
def test_a_file_that_is_no_placement_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=reason):
        read_placement(path)
