"""prime-rl's packed routes, ids and the bits of their combine weights: read as both, and weights are looked at."""

import base64
import json

import numpy as np
import pytest

from moe_rl.replay import ImportOptions, recorded_sequences
from moe_rl.study.groups import TraceOptions
from moe_rl.study.replay_check import check_recorded


def packed_file(path, weights):
    """Write one sequence of 40 rows, 3 layers, top-4 of 32 as prime-rl sends it; return its ids."""
    rng = np.random.default_rng(1)
    ids = np.argsort(rng.random((40, 3, 32)), axis=2)[:, :, :4].astype(np.int32)
    words = np.concatenate([ids, weights.view(np.int32)], axis=2)
    data = base64.b64encode(words.tobytes()).decode()
    routes = {"data": data, "shape": list(words.shape), "dtype": "int32", "start": 0}
    path.write_text(json.dumps({"token_ids": list(range(41)), "routed_experts": routes}))
    return ids


def some_weights():
    drawn = np.random.default_rng(2).random((40, 3, 4)).astype(np.float32) + np.float32(0.1)
    return drawn / drawn.sum(axis=2, keepdims=True)


def test_ids_and_weights_are_read(tmp_path):
    path, weights = tmp_path / "sample.jsonl", some_weights()
    ids = packed_file(path, weights)
    (record,) = recorded_sequences(path, options=ImportOptions(num_experts=32))
    np.testing.assert_array_equal(record.routes[:40], ids)
    assert record.combine_weights is not None
    np.testing.assert_array_equal(record.combine_weights[:40], weights)


@pytest.mark.parametrize("zeroed", [False, True])
def test_the_check_names_weights_of_zero(tmp_path, zeroed):
    path, weights = tmp_path / "sample.jsonl", some_weights()
    if zeroed:
        weights[:, 1, 2] = 0.0
    packed_file(path, weights)
    verdict = check_recorded(path, TraceOptions(num_experts=32)).verdicts[0]
    assert (verdict.fault is None) == (not zeroed)
    assert not zeroed or verdict.fault == "zero_combine_weights"
