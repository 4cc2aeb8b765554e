"""`moe-rl simulate`: which steps and layouts of a trace are simulated, and what planners know of the routes."""

from pathlib import Path

import numpy as np
import pytest
from cli_runner import moe_rl, routes, simulated, write_npz

from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceWriter

BATCH = ("--ep", 4, "--ep-group-tokens", 200)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "good.npz")


def test_rerouted_pairs_are_priced_as_they_occur_and_said(tmp_path: Path, trace: Path) -> None:
    """Plans are those of the exact routes; what they meet is not."""
    same = ("--ep", 4, "--ep-group-tokens", 160, "--policy", "static,ultraep")
    exact, rerouted = (simulated(tmp_path, trace, *same, *more) for more in ((), ("--reroute", 0.3)))
    assert "reroute" not in exact["setting"]
    assert rerouted["setting"]["reroute"] == 0.3
    assert rerouted["policies"]["ultraep"]["imbalance"] > exact["policies"]["ultraep"]["imbalance"]
    assert rerouted["policies"]["ultraep"]["replicas_per_plan"] == exact["policies"]["ultraep"]["replicas_per_plan"]
    assert any(note.startswith("30 % of the token-expert pairs go to a different expert") for note in rerouted["notes"])
    refused = moe_rl("simulate", trace, *same, "--reroute", 1.5)
    assert refused.code == 2
    assert "--reroute must be between 0 and 1, got 1.5." in refused.err


def stored_steps(path: Path, *, steps: int, micro_batches: int = 2, dp_ranks: int = 4) -> Path:
    """A trace directory of several steps with a recorded layout; odd steps mirror the experts of even ones."""
    count = micro_batches * dp_ranks
    with TraceWriter(path, num_experts=8, moe_layer_ids=(2, 3, 5), top_k=2) as writer:
        for step in range(steps):
            writer.append(
                RoutingTrace.from_sequences(
                    [abs(7 * (step % 2) - routes(30 + index, seed=index).astype(int)) for index in range(count)],
                    num_experts=8,
                    moe_layer_ids=(2, 3, 5),
                    step=np.full(count, step),
                    micro_batch=np.repeat(np.arange(micro_batches), dp_ranks),
                    dp_rank=np.tile(np.arange(dp_ranks), micro_batches),
                    provenance="R3",
                    model="tiny",
                )
            )
    return path


def test_routes_that_planners_do_not_know_are_priced_as_they_occur(tmp_path: Path, trace: Path) -> None:
    same = (*BATCH, "--policy", "static,ultraep", "--objective", "imbalance")
    known, partly = (simulated(tmp_path, trace, *same, *more) for more in ((), ("--unknown-routes", 0.5)))
    assert "unknown_routes" not in known["setting"]
    assert partly["setting"]["unknown_routes"] == 0.5
    assert partly["policies"]["static"]["imbalance"] == known["policies"]["static"]["imbalance"]
    assert partly["policies"]["ultraep"]["imbalance"] > known["policies"]["ultraep"]["imbalance"]
    assert any("the routes of 50 % of the sequences" in note for note in partly["notes"])
    refused = moe_rl("simulate", trace, *same, "--unknown-routes", 1)
    assert refused.code == 2
    assert "--unknown-routes must be at least 0 and less than 1, got 1.0." in refused.err


def test_single_tokens_that_planners_do_not_know_choose_as_their_micro_batch_does(tmp_path: Path, trace: Path) -> None:
    same = (*BATCH, "--policy", "static,ultraep", "--objective", "imbalance")
    options = ((), ("--unknown-pairs", 0.3), ("--unknown-routes", 0.3))
    known, tokens, sequences = (
        simulated(tmp_path, trace, *same, *more)["policies"]["ultraep"]["imbalance"] for more in options
    )
    assert known < tokens < sequences
    said = simulated(tmp_path, trace, *same, "--unknown-pairs", 0.3)
    assert said["setting"]["unknown_pairs"] == 0.3
    assert any("the routes of 30 % of the tokens" in note for note in said["notes"])
    counts = tmp_path / "counts.moetrace"
    assert moe_rl("trace", "convert", trace, counts, "--num-experts", 8, "--counts-only").code == 0
    refused = moe_rl("simulate", counts, *same, "--unknown-pairs", 0.1)
    assert refused.code == 2
    assert "--unknown-pairs hides the routes of tokens, but the trace contains only counts." in refused.err


@pytest.mark.lengthy
def test_steps_between_two_choices_of_homes_share_what_moving_costs(tmp_path: Path) -> None:
    path = stored_steps(tmp_path / "s.moetrace", steps=3)
    # EPLB's own interval of 20 steps stands back behind one that is stated.
    parameters = "relibra.temperature=0.1,eplb.reorder_interval=1"
    same = ("--ep", 4, "--policy", "static,eplb,relibra", "--policy-option", parameters)
    every, third = (simulated(tmp_path, path, *same, "--reorder-interval", interval) for interval in (1, 3))
    assert every["setting"]["eplb_history"] == "previous step (1)"
    assert every["setting"]["steps_served"] == 1
    assert third["setting"]["steps_served"] == 3
    assert third["setting"]["reorder_interval"] == 3
    # Homes were chosen at step 0, before which nothing is known.
    assert third["setting"]["eplb_history"] == "first half of this step's micro-batches"
    assert any("home ranks were chosen at an earlier step" in note for note in third["notes"])
    first, shared = (
        simulated(tmp_path, path, *same, "--step", 0, "--reorder-interval", interval) for interval in (1, 3)
    )
    once, third_of_it = (document["policies"]["eplb"]["breakdown_s"]["reorder"] for document in (first, shared))
    assert 0 < third_of_it < once


def test_what_balancing_brings_alone_is_known_only_where_sequences_can_be_packed(tmp_path: Path) -> None:
    path = stored_steps(tmp_path / "s.moetrace", steps=1)
    recorded = simulated(tmp_path, path, "--ep", 4)
    assert "balancing_alone" not in recorded
    free = simulated(tmp_path, path, "--ep", 4, "--micro-batch-tokens", 100)
    assert free["balancing_alone"]["step_time_s"] >= free["policies"]["moe-rl"]["step_time_s"]
    assert not {"static+pack", "moe-rl-unpacked"} & set(free["policies"])


def test_eplb_plans_on_the_previous_step_or_says_what_it_took_instead(tmp_path: Path) -> None:
    path = stored_steps(tmp_path / "s.moetrace", steps=3)
    last = simulated(tmp_path, path, "--ep", 4)
    assert last["trace"]["step"] == 2
    assert last["setting"]["eplb_history"] == "previous step (1)"
    assert not any("eplb plans on" in note for note in last["notes"])
    page = tmp_path / "first.html"
    first = simulated(tmp_path, path, "--ep", 4, "--step", 0, "--html", page)
    assert first["setting"]["eplb_history"] == "first half of this step's micro-batches"
    sentence = "the trace has no earlier step, so eplb plans from the first half of this step's micro-batches."
    assert sentence in first["notes"]
    assert sentence.replace("'", "&#39;") in page.read_text()
    without = simulated(tmp_path, path, "--ep", 4, "--policy", "static,eplb-oracle")
    assert "eplb_history" not in without["setting"]


def test_the_history_decides_what_eplb_plans(tmp_path: Path) -> None:
    path = stored_steps(tmp_path / "s.moetrace", steps=2)
    document = simulated(tmp_path, path, "--ep", 4, "--policy", "eplb,eplb-oracle", "--objective", "imbalance")
    policies = document["policies"]
    # The step before is the mirror image: its hot experts are now the cold ones.
    assert policies["eplb"]["imbalance"] > policies["static"]["imbalance"] > policies["eplb-oracle"]["imbalance"]


def test_eplb_gets_as_many_slots_as_moe_rl(tmp_path: Path, trace: Path) -> None:
    """Its copies all stay for a step: a resident slot is one more slot to fill."""
    common = (trace, *BATCH, "--policy", "eplb-oracle", "--objective", "imbalance")
    resident = simulated(tmp_path, *common, "--replica-slots", 1, "--resident-slots", 1)
    replicas = simulated(tmp_path, *common, "--replica-slots", 2)
    both = [document["policies"]["eplb-oracle"]["imbalance_by_layer"] for document in (resident, replicas)]
    assert both[0] == both[1]
    fewer = simulated(tmp_path, *common, "--replica-slots", 1)["policies"]["eplb-oracle"]
    assert fewer["imbalance_by_layer"] != both[0]


def test_a_recorded_layout_is_used_as_it_is(tmp_path: Path) -> None:
    path = stored_steps(tmp_path / "s.moetrace", steps=1, micro_batches=3, dp_ranks=4)
    document = simulated(tmp_path, path, "--ep", 2, "--ranks-per-node", 2)
    assert document["setting"]["num_micro_batches"] == 3
    assert document["setting"]["num_ep_groups"] == 2
    assert document["setting"]["micro_batches"] == "as recorded"


def test_a_model_from_the_trace_states_its_assumptions(tmp_path: Path) -> None:
    path = stored_steps(tmp_path / "s.moetrace", steps=1)
    document = simulated(tmp_path, path, "--ep", 4, "--hidden-size", 512)
    (note,) = (note for note in document["notes"] if note.startswith("model: "))
    assert "moe_ffn_hidden_size 768" in note
    assert "hidden_size 2048" not in note
    assert document["setting"]["model"] == "tiny"
    assert document["setting"]["model_origin"] == "layers, experts and top-k of the trace"


def test_a_repacked_plan_is_simulated_under_its_own_layout(tmp_path: Path) -> None:
    """Half of the sequences mirror the taste of the others: mixed micro-batches balance, and only packing mixes."""
    mirrored = [abs(7 * (index % 3 == 0) - routes(40, seed=index).astype(int)) for index in range(12)]
    np.savez(tmp_path / "m.npz", **{f"s{index}": ids for index, ids in enumerate(mirrored)})
    only_packing = "moe-rl.reorder=false,moe-rl.replicate=false"
    options = ("--policy", "moe-rl", "--objective", "imbalance", "--num-experts", 8, "--policy-option", only_packing)
    document = simulated(tmp_path, tmp_path / "m.npz", *BATCH, *options)
    assert not any("not packed differently" in note for note in document["notes"])
    policies = document["policies"]
    assert policies["moe-rl"]["imbalance"] < policies["static"]["imbalance"]
    assert policies["moe-rl"]["replicas_per_plan"] == policies["moe-rl"]["moved_bytes"] == 0


def test_a_recorded_layout_is_never_repacked(tmp_path: Path) -> None:
    path = stored_steps(tmp_path / "s.moetrace", steps=1)
    notes = simulated(tmp_path, path, "--ep", 4, "--policy", "moe-rl")["notes"]
    assert "moe-rl: sequences were not packed differently: the batch layout is fixed." in notes
