"""Peak memory: what grows with imbalance, what recomputation takes away, and when it does not fit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from step_cases import StepCase, case_of, cases
from strategies import HARDWARE

from moe_rl.config import load_cluster, load_model
from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.memory import (
    GIB,
    MemoryForecast,
    forecast_memory,
    in_flight,
    saved_row_bytes,
    transient_row_bytes,
)
from moe_rl.simulators.result import PolicyResult
from moe_rl.simulators.setting import OFFLOAD_MODULES, StepSetting, TrainingRun

HIDDEN, WIDTH = 2048, 768


def skewed_case(micro_batches: int = 4) -> StepCase:
    """Rank 0 of 2 computes three quarters of every layer of the first micro-batch, half of the others."""
    pairs = np.full((1, micro_batches, 3, 2, 4), 500, np.int32)
    pairs[0, 0] = [750, 750, 250, 250]
    load = StepLoad(pairs=pairs, tokens=np.full((1, micro_batches, 2), 1000), top_k=2)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    return case_of(load, topology, np.random.default_rng(0), policies=())


def routed(result: PolicyResult) -> int:
    return result.memory.parts_bytes["routed_rows"]


@pytest.mark.lengthy
@given(cases())
def test_the_parts_add_up_and_imbalance_never_saves_memory(case: StepCase) -> None:
    result = case.simulate()
    for one in (*result.policies.values(), result.static, result.forced_balance):
        memory = one.memory
        assert sum(memory.parts_bytes.values()) == memory.peak_bytes == one.prediction.peak_memory_bytes
        assert memory.rank_peak_bytes.shape == (case.topology.ep_size,)
        assert memory.peak_bytes >= result.ideal.memory.peak_bytes


@pytest.mark.lengthy
@given(cases())
def test_recomputing_more_never_needs_more(case: StepCase) -> None:
    peaks = [
        case.simulate(setting=replace(case.setting, recompute=mode)).static.memory.peak_bytes
        for mode in ("none", "moe", "full")
    ]
    assert peaks[0] >= peaks[1] >= peaks[2]


def test_kept_rows_add_up_over_layers_and_recomputed_ones_do_not() -> None:
    case = skewed_case()
    rows, per_row = 3000, 2 * HIDDEN + 6 * WIDTH
    transient = rows * 6 * WIDTH
    kept = case.simulate().static
    buffer = routed(kept) - 3 * rows * per_row - transient
    assert 0 < buffer <= 2000 * 2 * HIDDEN  # at most every token of the group on the rank
    again = case.simulate(setting=StepSetting(recompute="moe")).static
    assert routed(kept) - routed(again) == 2 * rows * per_row
    assert kept.memory.rank_peak_bytes[0] > kept.memory.rank_peak_bytes[1]
    # Rank 1's worst micro-batch is a balanced one: two thirds of the rows.
    assert kept.memory.rank_peak_bytes[0] - kept.memory.rank_peak_bytes[1] >= 1000 * (3 * per_row + 6 * WIDTH)


def test_a_pipeline_holds_its_micro_batches_in_flight() -> None:
    """4 stages, 3 layers: the first stage keeps 4 micro-batches, the second 3, of the rows of its one layer.

    A flat all-to-all holds its two further copies of the rows only while a layer runs.
    """
    case = skewed_case(micro_batches=6)
    per_row, transient = 2 * HIDDEN + 6 * WIDTH, 6 * WIDTH
    static = case.simulate(setting=StepSetting(pipeline_model_parallel_size=4)).static
    flat = case.simulate(setting=StepSetting(dispatcher="alltoall", pipeline_model_parallel_size=4)).static
    held = 3000 + 3 * 2000
    assert routed(static) >= held * per_row + 3000 * transient
    # At the end of the window runs a balanced micro-batch, and the flat one receives rows, which are more than visits.
    assert 2000 * 4 * HIDDEN <= routed(flat) - routed(static) < held * 4 * HIDDEN


def test_replica_slots_and_resident_copies_take_memory() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    load = StepLoad(pairs=np.full((1, 1, 3, 2, 4), 100, np.int32), tokens=np.full((1, 1, 2), 200), top_k=2)
    case = case_of(load, topology, np.random.default_rng(1))
    results = case.simulate().policies
    each = (2 + 4) * 3 * HIDDEN * WIDTH
    assert results["homes"].memory.parts_bytes["replica_slots"] % each == 0
    assert results["resident"].memory.parts_bytes["resident_slots"] == 3 * 2 * each
    assert results["resident"].prediction.resident_bytes == 3 * 2 * each
    assert results["homes"].prediction.resident_bytes == 0
    assert case.simulate().static.memory.parts_bytes["replica_slots"] == 0


def test_a_log_probability_pass_keeps_nothing_for_backward() -> None:
    case = skewed_case()
    update, forward = case.simulate().static, case.simulate(setting=StepSetting(forward_only=True)).static
    assert forward.memory.parts_bytes["gradients"] == forward.memory.parts_bytes["optimizer"] == 0
    assert routed(forward) < routed(update) / 2


def test_shares_of_a_real_model_are_what_its_shape_says() -> None:
    """Qwen3-30B, 8192 tokens, top-8: about half a GiB of rows per layer, and as much again while it runs."""
    model, plain = load_model("qwen3-30b-a3b").spec, StepSetting()
    flat = StepSetting(dispatcher="alltoall")
    assert 8192 * 8 * saved_row_bytes(model, plain) / GIB == pytest.approx(0.53, abs=0.01)
    assert saved_row_bytes(model, flat) == saved_row_bytes(model, plain)
    assert transient_row_bytes(model, plain) == 6 * 768
    assert transient_row_bytes(model, flat) == 6 * 768 + 4 * 2048
    again = StepSetting(recompute_modules=("moe_act",))
    assert saved_row_bytes(model, plain) - saved_row_bytes(model, again) == 2 * 768
    assert saved_row_bytes(model, StepSetting(precision="fp8")) < saved_row_bytes(model, plain)


@pytest.mark.parametrize(
    "sparing",
    [
        {"grad_reduce_in_fp32": False},
        {"bf16_moments": True},
        {"use_megatron_fsdp": True},
        {"precision": "fp8"},
        {"recompute_modules": ("layernorm",)},
        {"recompute_modules": ("moe_act",)},
    ],
)
def test_every_sparing_option_spares_memory_and_the_parts_still_add_up(sparing: dict[str, object]) -> None:
    case = skewed_case()
    topology = replace(case.topology, num_ep_groups=1)
    plain, spared = (case.simulate(topology=topology, setting=StepSetting(**facts)).static for facts in ({}, sparing))
    assert spared.memory.peak_bytes < plain.memory.peak_bytes
    assert sum(spared.memory.parts_bytes.values()) == spared.memory.peak_bytes


def test_a_batch_that_does_not_fit_is_forecast() -> None:
    case = skewed_case()
    small = replace(case.topology, hardware=replace(HARDWARE, hbm_gib=0.1))
    assert not case.simulate(topology=small).static.memory.fits
    assert case.simulate().static.memory.fits
    assert case.simulate().static.memory.hbm_bytes == 80 * GIB
    assert load_cluster("h100").hbm_gib < 80


def test_each_remedy_of_a_forecast_that_does_not_fit_would_do_alone() -> None:
    """Rank 0 of four, two to a node, has three quarters of all rows: leveled nodes fit sooner than recomputation."""
    rows = np.zeros((1, 1, 48, 4))
    rows[..., :] = [60_000.0, 8_000.0, 6_000.0, 6_000.0]
    tokens = np.full((1, 1, 4), 2_500.0)
    run = TrainingRun(
        model=load_model("qwen3-30b-a3b").spec,
        topology=ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2),
        setting=StepSetting(),
    )
    whole = forecast_memory(rows, tokens, None, run=run)
    fixed = whole.peak_bytes - sum(
        whole.parts_bytes[name] for name in ("attention_activations", "logits", "routed_rows")
    )
    lacking = forecast_memory(rows, tokens, None, run=run, hbm_bytes=whole.peak_bytes - 1)
    assert (lacking.fits, lacking.fullest_rank, lacking.tokens) == (False, 0, 2_500)
    assert lacking.remedies == (
        "micro-batches with 100% of the tokens",
        "full recomputation (--recompute-granularity full)",
        "replicas that balance the ranks of each node",
        "replicas for the whole step that balance all ranks",
    )
    assert lacking.largest_micro_batch == 2_499
    fewer = forecast_memory(rows * 0.9996, tokens * 0.9996, None, run=run, hbm_bytes=whole.peak_bytes - 1)
    assert fewer.fits
    assert fewer.remedies == ()
    nothing = forecast_memory(rows, tokens, None, run=run, hbm_bytes=fixed - 1)
    assert nothing.remedies == ("micro-batches with 0% of the tokens",)
    assert f"the GPU has only {nothing.hbm_bytes / GIB:.1f} GiB" in str(nothing)


def test_a_run_forecasts_what_a_simulation_of_its_plan_does() -> None:
    """A run does not know how many ranks a token visits: it counts a row for each, of all tokens at most."""
    case = skewed_case()
    rows = case.load.pairs.sum(axis=3).reshape(1, 4, 3, 2, 2).sum(axis=4).astype(float)
    placement = ExpertPlacement.contiguous(num_layers=3, num_experts=4, ep_size=2)

    def foretold(setting: StepSetting) -> MemoryForecast:
        run = TrainingRun(model=case.model, topology=case.topology, setting=setting)
        return forecast_memory(rows, case.load.tokens.astype(float), placement, run=run, stage=0)

    flat = replace(case.setting, dispatcher="alltoall")
    simulated = case.simulate(setting=flat).static.memory
    assert foretold(flat).parts_bytes == simulated.parts_bytes
    assert (foretold(flat).rank_peak_bytes == simulated.rank_peak_bytes).all()
    assert foretold(case.setting).peak_bytes >= case.simulate().static.memory.peak_bytes


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("modules", [(), ("layernorm",), ("moe_act", "mla_up_proj")])
def test_what_is_offloaded_is_not_kept_and_all_of_it_leaves_the_residual(
    precision: str, modules: tuple[str, ...]
) -> None:
    case = skewed_case()
    setting = StepSetting(precision=precision, recompute_modules=modules)
    peak = case.simulate(setting=setting).static.memory.peak_bytes
    for module in OFFLOAD_MODULES:
        one = case.simulate(setting=replace(setting, offload_modules=(module,))).static.memory.peak_bytes
        assert one <= peak
    everything = replace(setting, offload_modules=OFFLOAD_MODULES)
    assert case.simulate(setting=everything).static.memory.peak_bytes < peak
    assert saved_row_bytes(case.model, replace(everything, recompute_modules=("moe_act",))) == 0.0


def test_the_optimizer_on_the_host_frees_its_state_and_costs_time() -> None:
    case = skewed_case()
    on_gpu, on_host = (
        case.simulate(setting=StepSetting(optimizer_offload_fraction=fraction)).static for fraction in (0.0, 1.0)
    )
    assert on_gpu.memory.parts_bytes["optimizer"] > on_host.memory.parts_bytes["optimizer"] == 0
    assert (on_host.prediction.breakdown_s or {})["optimizer"] > (on_gpu.prediction.breakdown_s or {})["optimizer"]


def test_an_interleaved_stage_holds_parts_of_micro_batches() -> None:
    """4 stages of 6 chunks: 27 chunks wait for backward on the first stage, 4.5 micro-batches' worth."""
    interleaved = StepSetting(pipeline_model_parallel_size=4, num_virtual_stages=6)
    assert in_flight(interleaved, 0) == 4.5
    assert in_flight(replace(interleaved, num_virtual_stages=1), 0) == 4
