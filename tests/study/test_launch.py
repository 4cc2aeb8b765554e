"""`--launch`: a run's own files say how its step is run; what is typed wins over them."""

import json
from pathlib import Path

import pytest
from cli_runner import moe_rl, write_npz

from moe_rl.study.launch import launch_options
from moe_rl.study.options import SimulationOptions

SCRIPT = """
torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --num-layers 3 --num-experts 8 --moe-router-topk 2 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --expert-model-parallel-size 4 \\
  --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --overlap-moe-expert-parallel-comm \\
  --recompute-granularity selective --recompute-modules moe_act layernorm --fp8-format hybrid \\
  --cuda-graph-impl {graphs} --optimizer-cpu-offload --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
"""
EXPECTED = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 4,
    "moe_flex_dispatcher_backend": "hybridep",
    "overlap_moe_expert_parallel_comm": True,
    "recompute_modules": ["moe_act", "layernorm"],
    "fp8_format": "hybrid",
    "optimizer_offload_fraction": 1.0,
    "exp_avg_dtype": "bf16",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.format(graphs="transformer_engine"))
    return path


def test_a_script_says_what_its_step_is(script: Path) -> None:
    found, said = launch_options([script])
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert found["cuda_graph_impl"] == "transformer_engine"
    assert "run.sh (megatron): expert_model_parallel_size 4" in said[0]


@pytest.mark.parametrize(("held", "graph"), [("attn moe_router moe_preprocess", "partial"), ("moe_router", "router")])
def test_a_graph_without_attention_is_told_by_its_scope(script: Path, held: str, graph: str) -> None:
    script.write_text(SCRIPT.format(graphs=f"transformer_engine --cuda-graph-scope {held}"))
    stated = SimulationOptions(**launch_options([script])[0])
    assert stated.step_setting().cuda_graph == graph


def test_a_graph_of_the_whole_iteration_is_told_by_its_scope(script: Path) -> None:
    script.write_text(SCRIPT.format(graphs="local --cuda-graph-scope full_iteration"))
    assert launch_options([script])[0]["cuda_graph_impl"] == "full_iteration"


def test_what_is_typed_wins_over_the_script(script: Path, tmp_path: Path) -> None:
    trace, out = write_npz(tmp_path / "t.npz"), tmp_path / "r.json"
    arguments = ("--ep-group-tokens", 200, "--num-experts", 8, "--policy", "ultraep", "--json", out)
    ran = moe_rl("simulate", trace, "--launch", script, "--ep", 2, *arguments)
    assert ran.code == 0, ran.err
    setting = json.loads(out.read_text())["setting"]
    assert (setting["ep_size"], setting["dispatcher"], setting["cuda_graph"]) == (2, "hybridep", "partial")
    assert setting["recompute_modules"] == ["moe_act", "layernorm"]
    assert "from run.sh" in ran.err


def test_a_script_that_contradicts_itself_is_refused(script: Path, tmp_path: Path) -> None:
    script.write_text(
        SCRIPT.format(graphs="full_iteration").replace("flex --moe-flex-dispatcher-backend hybridep", "alltoall")
    )
    ran = moe_rl("simulate", write_npz(tmp_path / "t.npz"), "--launch", script, "--ep-group-tokens", 200)
    assert (ran.code, ran.out) == (2, "")
    assert "cannot hold the alltoall dispatcher" in ran.err
