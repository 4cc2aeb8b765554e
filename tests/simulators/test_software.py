"""What the training software adds to a step: host time, graphs, fused kernels, recomputation, uneven stages."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_cases import StepCase, cases
from strategies import HARDWARE, model_spec

from benchmarks.validate_model import fit as fitting
from benchmarks.validate_model.compare import PUBLISHED, memory_forecasts
from moe_rl.config import load_cluster, load_model
from moe_rl.core.cost import SoftwareCosts
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.balanced import BalancedBatch, BalancedStep
from moe_rl.simulators.pipeline import stage_layers
from moe_rl.simulators.setting import CUDA_GRAPHS, RECOMPUTE_MODULES, StepSetting, TrainingRun
from moe_rl.simulators.whole_runs import WholeRun

HOSTED = replace(HARDWARE, host_layer_ms=3.0, host_expert_ms=0.25, step_fixed_s=0.2)
QWEN = load_model("qwen3-30b-a3b").spec
NEAR = 1 + 1e-9

settings_of_runs = st.builds(
    StepSetting,
    precision=st.sampled_from(["bf16", "fp8"]),
    recompute=st.sampled_from(["none", "moe", "full"]),
    recompute_modules=st.lists(st.sampled_from(RECOMPUTE_MODULES), unique=True).map(tuple),
    mtp_num_layers=st.integers(0, 1),
    pipeline_model_parallel_size=st.sampled_from([2, 4, 7]),
    num_virtual_stages=st.sampled_from([1, 2]),
    tensor_model_parallel_size=st.sampled_from([1, 2]),
    overlap_all_to_all=st.booleans(),
)


def balanced(setting: StepSetting, *, tokens: int = 4096, micro_batches: int = 16, **hardware: float) -> BalancedStep:
    topology = ClusterTopology(hardware=replace(HOSTED, **hardware), ep_size=16)
    batch = BalancedBatch.of(
        TrainingRun(model=QWEN, topology=topology, setting=setting), tokens_per_rank=tokens, sequence_length=4096
    )
    return batch.step(micro_batches)


def uneven(layers: int, *, stages: int, virtual: int, mtp: int = 0) -> tuple[float, ...]:
    model: MoeModelSpec = model_spec(num_experts=4, num_layers=layers, top_k=2)
    setting = StepSetting(pipeline_model_parallel_size=stages, num_virtual_stages=virtual, mtp_num_layers=mtp)
    return stage_layers(model, setting)


@given(settings_of_runs)
def test_parts_add_up_and_only_overlap_is_negative(setting: StepSetting) -> None:
    step = balanced(setting)
    assert step.step_time_s == pytest.approx(sum(step.breakdown_s.values()))
    assert all(seconds >= 0 for name, seconds in step.breakdown_s.items() if name != "overlap")


@given(settings_of_runs, st.sampled_from(["host_layer_ms", "host_expert_ms", "step_fixed_s"]))
def test_more_host_time_never_helps(setting: StepSetting, constant: str) -> None:
    slower = balanced(setting, **{constant: 3 * getattr(HOSTED, constant)})
    assert slower.step_time_s >= balanced(setting).step_time_s / NEAR


@given(settings_of_runs)
def test_graphs_never_hurt_and_a_graph_of_everything_leaves_no_host_time(setting: StepSetting) -> None:
    none, router, partial, whole = (balanced(replace(setting, cuda_graph=graph)) for graph in CUDA_GRAPHS)
    times = [step.step_time_s for step in (none, router, partial, whole)]
    assert all(more * NEAR >= less for more, less in pairwise(times))
    assert whole.breakdown_s["host"] == 0.0


@given(settings_of_runs)
def test_more_tokens_and_more_micro_batches_take_longer(setting: StepSetting) -> None:
    step = balanced(setting)
    assert balanced(setting, tokens=8192).step_time_s > step.step_time_s
    assert balanced(setting, micro_batches=32).step_time_s > step.step_time_s


@given(settings_of_runs, st.sampled_from(RECOMPUTE_MODULES))
def test_recomputing_a_module_never_saves_time(setting: StepSetting, module: str) -> None:
    more = replace(setting, recompute_modules=tuple({*setting.recompute_modules, module}))
    assert balanced(more).step_time_s >= balanced(setting).step_time_s / NEAR


def test_a_layer_takes_the_larger_of_host_and_gpu() -> None:
    """Far apart, the smooth maximum is the maximum: a slow host hides the kernels, a fast one is not seen."""
    setting = StepSetting()
    free = balanced(setting, host_layer_ms=0.0, host_expert_ms=0.0)
    bound = balanced(setting, host_layer_ms=1000.0, host_expert_ms=0.0)
    fast = balanced(setting, host_layer_ms=0.01, host_expert_ms=0.0)
    assert bound.step_time_s == pytest.approx(16 * 48 * 1.0, rel=0.01)
    assert fast.step_time_s == pytest.approx(free.step_time_s, rel=1e-6)


@pytest.mark.lengthy
@given(cases())
def test_host_time_shortens_no_policy_and_leaves_the_bound_a_bound(case: StepCase) -> None:
    hosted = replace(case.topology, hardware=replace(case.topology.hardware, host_layer_ms=50.0))
    without, bound = case.times(), case.times(topology=hosted)
    for name, seconds in bound.items():
        assert seconds >= without[name] / NEAR
    assert bound["ideal"] <= min(bound.values()) * NEAR


def test_a_fused_grouped_mlp_is_faster_and_needs_fp8() -> None:
    plain = StepSetting(precision="fp8")
    assert balanced(replace(plain, fused_grouped_mlp=True)).step_time_s < balanced(plain).step_time_s
    with pytest.raises(InvalidInputError, match="fused_grouped_mlp needs precision 'fp8', got 'bf16'"):
        StepSetting(fused_grouped_mlp=True)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"cuda_graph": "full_iteration", "dispatcher": "alltoall"}, "does not work with the alltoall dispatcher"),
        ({"cuda_graph": "full"}, "cuda_graph 'full' is unknown. Known: full_iteration, none, partial"),
        ({"recompute_modules": ("mla_up",)}, "recompute_modules 'mla_up' is unknown. Did you mean 'mla_up_proj'"),
        ({"offload_modules": ("expert_fc2",)}, "offload_modules 'expert_fc2' is unknown. Did you mean 'expert_fc1'"),
        ({"optimizer_offload_fraction": 1.5}, "must lie in"),
        ({"mtp_num_layers": -1}, "mtp_num_layers must be at least 0"),
    ],
)
def test_contradictory_and_unknown_facts_are_refused(facts: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        StepSetting(**facts)


def test_stages_of_published_layouts() -> None:
    assert uneven(48, stages=4, virtual=3) == (12,) * 4
    assert uneven(94, stages=8, virtual=4) == (11, 12, 12, 12, 12, 12, 12, 11)  # embedding and loss take a place each
    assert uneven(61, stages=4, virtual=4, mtp=1) == (16, 16, 16, 14)  # Et*4|(t*4|)*14tmL
    assert uneven(61, stages=8, virtual=4, mtp=1) == (7, 8, 8, 8, 8, 8, 8, 7)  # Et|(tt|)*30mL
    assert uneven(61, stages=16, virtual=1) == (4,) * 15 + (1,)


@pytest.mark.parametrize("virtual", [1, 2])
def test_dense_layers_shorten_the_first_stage_alone(virtual: int) -> None:
    """A pipeline is as slow as its stages of MoE layers, as if the first layers were MoE layers, too."""
    setting = StepSetting(pipeline_model_parallel_size=4, num_virtual_stages=virtual)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4)
    busy = []
    for dense in (0, 1, 2):
        model = model_spec(num_experts=8, num_layers=16, top_k=2, moe_layer_ids=tuple(range(dense, 16)))
        batch = BalancedBatch.of(
            TrainingRun(model=model, topology=topology, setting=setting), tokens_per_rank=4096, sequence_length=4096
        )
        parts = batch.step(4).breakdown_s
        waits = ("pipeline_bubble", "pipeline_p2p", "grad_reduce", "param_gather", "step_fixed", "optimizer")
        busy.append(sum(seconds for name, seconds in parts.items() if name not in waits))
    assert busy == pytest.approx(busy[:1] * 3)


@given(st.integers(1, 120), st.sampled_from([2, 4, 8, 16]), st.integers(1, 4), st.integers(0, 1))
def test_stages_hold_all_layers_and_the_last_one_its_prediction_layers(
    layers: int, stages: int, virtual: int, mtp: int
) -> None:
    split = uneven(layers, stages=stages, virtual=virtual, mtp=mtp)
    assert len(split) == stages
    assert sum(split) == pytest.approx(layers + mtp)
    assert min(split) >= 0


def test_a_heavy_last_stage_is_seen() -> None:
    """The output layer stands on the last stage: a pipeline pays for it in every micro-batch, a single stage once."""
    setting = StepSetting(pipeline_model_parallel_size=4)
    topology = ClusterTopology(hardware=HOSTED, ep_size=16)
    large = replace(QWEN, vocab_size=10 * QWEN.vocab_size)
    batch = BalancedBatch.of(
        TrainingRun(model=large, topology=topology, setting=setting), tokens_per_rank=4096, sequence_length=4096
    )
    step = batch.step(16)
    assert step.breakdown_s["pipeline_imbalance"] > balanced(setting).breakdown_s["pipeline_imbalance"] > 0


ROW = {
    "name": "DeepSeekV3 256 GB200 MXFP8 EP64 PP4 VP4",
    "model": "deepseek-v3",
    "cluster": "gb200",
    "gpus": 256,
    "ep_size": 64,
    "sequence_length": 4096,
    "tokens_per_rank": 4096,
    "num_micro_batches": 64,
    "setting": {
        "dispatcher": "hybridep",
        "precision": "fp8",
        "pipeline_model_parallel_size": 4,
        "num_virtual_stages": 4,
    },
    "tokens_per_s": 4912.0,
}


def run_of(**changes: object) -> WholeRun:
    return WholeRun.of(ROW | changes, lambda name: load_model(name).spec, load_cluster)


def test_rows_may_say_graphs_in_a_phrase_and_nothing_in_their_name() -> None:
    whole = run_of(cuda_graph="full_iteration + fused grouped MLP").batch.setting
    assert (whole.cuda_graph, whole.fused_grouped_mlp, whole.mtp_num_layers) == ("full_iteration", True, 0)
    assert run_of(name="DeepSeekV3 (w/ MTP)").batch.setting == run_of(name="DeepSeekV3 (w/o MTP)").batch.setting
    with pytest.raises(InvalidInputError, match="lacks 'ep_size'"):
        WholeRun.of({k: v for k, v in ROW.items() if k != "ep_size"}, lambda name: load_model(name).spec, load_cluster)


@pytest.mark.lengthy
def test_the_fit_stays_where_the_runs_are_met_and_moves_where_they_are_not() -> None:
    runs = [run_of(), run_of(cuda_graph="partial"), run_of(cluster="h100", ep_size=8)]
    met = [replace(run, tokens_per_s=run.predicted().tokens_per_s_per_gpu) for run in runs]
    assert max(abs(fitting.fit(met, fitting.SHIPPED).errors(met))) < 1e-6
    slower = [replace(run, tokens_per_s=0.8 * run.tokens_per_s) for run in met]
    found = fitting.fit(slower, fitting.SHIPPED)
    assert abs(found.errors(slower)).mean() < 0.5 * abs(fitting.SHIPPED.errors(slower)).mean()
    assert fitting.fit(slower, fitting.SHIPPED) == found


@pytest.mark.lengthy
def test_published_configurations_that_ran_are_forecast_to_fit() -> None:
    found = memory_forecasts(PUBLISHED, model_named=lambda name: load_model(name).spec, cluster_named=load_cluster)
    assert len(found) > 40
    assert {run.name for run, memory in found if not memory.fits} == set()


def test_a_recomputed_module_costs_launches_and_graphs_spare_them() -> None:
    fast = {"host_layer_ms": 30.0}  # bound by the host
    again = StepSetting(recompute_modules=("moe_act", "layernorm"))
    slower = balanced(again, **fast).step_time_s - balanced(StepSetting(), **fast).step_time_s
    assert slower == pytest.approx(16 * 48 * 2 * SoftwareCosts().host_recompute_ms * 1e-3, rel=0.05)
    whole = replace(again, cuda_graph="full_iteration")
    assert balanced(whole, **fast).breakdown_s["host"] == 0.0
