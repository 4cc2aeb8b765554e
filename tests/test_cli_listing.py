"""`moe-rl models`, `clusters` and `policies`: every name that is listed is one that a simulation takes."""

import json
from pathlib import Path

import pytest
from cli_runner import moe_rl

from moe_rl.config import load_cluster, load_model, model_names
from moe_rl.planner.registry import POLICIES, make_planner


@pytest.mark.parametrize("what", ["models", "clusters", "policies"])
def test_every_listed_name_is_taken(what: str) -> None:
    rows = json.loads(moe_rl(what, "--json", "-").out)
    shown = moe_rl(what).out
    for row in rows:
        name = row[what.removesuffix("s") if what != "policies" else "policy"]
        assert name in shown
        if what == "models":
            assert row["experts"] == load_model(name).spec.num_experts
        elif what == "clusters":
            assert row["memory GiB"] == load_cluster(name).hbm_gib
        else:
            assert make_planner(name, **row["parameters"]) == make_planner(name)
    assert what != "policies" or tuple(row["policy"] for row in rows) == POLICIES.names
    assert what != "models" or [row["model"] for row in rows] == model_names()


def test_an_unknown_model_says_what_else_is_taken(tmp_path: Path) -> None:
    trace = tmp_path / "any.npz"
    said = moe_rl("simulate", trace, "--model", "acme/Large-1T").err
    assert "moe-rl models" in said or "Did you mean" in said
    assert "config.json" in said
