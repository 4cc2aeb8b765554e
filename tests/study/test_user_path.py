"""Every setting that validation prices is one that a user can state: options give it back, name for name."""

from dataclasses import asdict
from typing import Any

import pytest
import yaml

from benchmarks.validate_model.compare import PUBLISHED
from moe_rl.core.errors import InvalidInputError
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.whole_runs import _facts
from moe_rl.study.options import SimulationOptions, merge_options

SAME = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "mtp_num_layers",
        "use_megatron_fsdp", "optimizer_offload_fraction")  # fmt: skip


def options_of(setting: StepSetting) -> dict[str, Any]:
    """What a user of the command line states."""
    given: dict[str, Any] = {name: getattr(setting, name) for name in SAME} | {
        "moe_token_dispatcher_type": "alltoall" if setting.dispatcher == "alltoall" else "flex",
        "num_virtual_stages_per_pipeline_rank": setting.num_virtual_stages,
        "fp8_format": "e4m3" if setting.precision == "fp8" else None,
        "cuda_graph_impl": {"partial": "transformer_engine", "router": "transformer_engine"}.get(
            setting.cuda_graph, setting.cuda_graph
        ),
        "use_transformer_engine_op_fuser": setting.fused_grouped_mlp,
        "overlap_moe_expert_parallel_comm": setting.overlap_all_to_all,
        "moe_shared_expert_overlap": setting.overlap_shared_experts,
        "grad_reduce_in_bf16": not setting.grad_reduce_in_fp32,
        "offload_modules": list(setting.offload_modules),
    }
    if setting.cuda_graph == "router":
        given["cuda_graph_scope"] = ["moe_router", "moe_preprocess"]
    if setting.dispatcher != "alltoall":
        given["moe_flex_dispatcher_backend"] = setting.dispatcher
    if setting.recompute == "full":
        given["recompute_granularity"] = "full"
    elif setting.recompute_modules or setting.recompute == "moe":
        given["recompute_granularity"] = "selective"
        given["recompute_modules"] = ["moe"] * (setting.recompute == "moe") + list(setting.recompute_modules)
    if setting.bf16_moments:
        given |= {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    return given


@pytest.mark.parametrize("file", ["whole_runs.yaml", "memory_peaks.yaml"])
def test_published_settings_are_those_of_options(file: str) -> None:
    published = yaml.safe_load((PUBLISHED / file).read_text())
    for row in published["points"]:
        facts = _facts({**published, **row})
        setting = StepSetting(**facts | {"offload_modules": tuple(facts.get("offload_modules", ()))})
        stated = SimulationOptions(**options_of(setting), software="tuned").step_setting()
        assert asdict(stated) == asdict(setting), row["name"]


def test_nothing_is_read_from_a_rows_name() -> None:
    row = yaml.safe_load((PUBLISHED / "whole_runs.yaml").read_text())["points"][0]
    assert _facts(row) == _facts({**row, "name": "DeepSeekV3 (w/o MTP)"})


def test_software_is_stated_by_name() -> None:
    stated = (
        SimulationOptions(software=["host_adam_gb_per_s=40", "clamped_activation_bytes=10"]).step_setting().software
    )
    assert (stated.host_adam_gb_per_s, stated.clamped_activation_bytes) == (40.0, 10.0)
    assert stated.host_fp8 == StepSetting().software.host_fp8
    for wrong, sentence in (
        ("host_adam=4", "unknown"),
        ("host_fp8=fast", "not a number"),
        ("host_fp8=-1", "at least 0"),
    ):
        with pytest.raises(InvalidInputError, match=sentence):
            merge_options(SimulationOptions, {"software": [wrong]})


def test_a_training_loop_without_expert_parallelism_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="without expert parallelism"):
        merge_options(SimulationOptions, {"expert_model_parallel_size": 1, "use_megatron_fsdp": True})
