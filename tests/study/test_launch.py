"""`--launch`: a run's own files say how its step is run; what is typed wins over them."""

import json
from pathlib import Path

import pytest
from cli_runner import moe_rl, simulated, write_npz

from benchmarks.public_recipes import SHAPES, Recipe, recipes
from moe_rl.study.launch import launch_options
from moe_rl.study.options import SimulationOptions
from moe_rl.study.rl_options import RlStepOptions, TuneOptions

SCRIPT = """
torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --num-layers 3 --num-experts 8 --moe-router-topk 2 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --expert-model-parallel-size 4 \\
  --expert-tensor-parallel-size 1 \\
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


VERL = """
python3 -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.actor.strategy=megatron \\
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \\
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \\
  actor_rollout_ref.actor.megatron.context_parallel_size=2 \\
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=2 {more} \\
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4 data.train_batch_size=16 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.nnodes=2 trainer.n_gpus_per_node=8
"""
SLIME = """
python3 train.py --rollout-batch-size 16 --n-samples-per-prompt 4 --global-batch-size 32 \\
  --use-dynamic-batch-size --max-tokens-per-gpu 2048 --context-parallel-size 2 --expert-model-parallel-size 4 \\
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2
"""
NEMO_RL = """
defaults: ../../grpo_math_1B.yaml
policy:
  train_global_batch_size: 64
  sequence_packing: {enabled: true, train_mb_tokens: 8192}
  megatron_cfg: {enabled: true, expert_model_parallel_size: 4, tensor_model_parallel_size: 1}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
SEPARATE_NODE = """
policy.generation.colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}
loss_fn: {reference_policy_kl_penalty: 0}
"""
SKYRL = """
uv run -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.policy.model.path=Qwen/Qwen3-30B-A3B \\
  trainer.policy.megatron_config.tensor_model_parallel_size=2 \\
  trainer.policy.megatron_config.expert_model_parallel_size=8 \\
  trainer.policy.megatron_config.expert_tensor_parallel_size=1 trainer.train_batch_size=64 \\
  trainer.policy_mini_batch_size=32 generator.n_samples_per_prompt=4 trainer.micro_train_batch_size_per_gpu=2 \\
  trainer.placement.policy_num_nodes=2 trainer.placement.policy_num_gpus_per_node=8 trainer.max_prompt_length=512 \\
  generator.sampling_params.max_generate_length=1536
"""
AREAL = """
actor: {path: Qwen/Qwen3-30B-A3B, backend: "megatron:d4p2t2e8", mb_spec: {max_tokens_per_mb: 10240}}
gconfig: {n_samples: 8, max_new_tokens: 4096}
train_dataset: {batch_size: 64}
"""
ROLL = """
rollout_batch_size: 64
num_return_sequences_in_group: 8
sequence_length: 4096
actor_train:
  training_args: {per_device_train_batch_size: 2}
  device_mapping: list(range(0,32))
  strategy_args: {strategy_name: megatron_train, strategy_config: {expert_model_parallel_size: 8}}
"""
ONE_EXPERT_PART = "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # 16 GPUs: one group of EP2 x ETP4, on which data-parallel ranks of TP4 x CP2 lie; another with the other half.
        (
            "run.sh",
            VERL.format(more=""),
            {"micro_batch_tokens": 8192, "global_batch_size": 16, "expert_tensor_parallel_size": 4},
        ),
        # Without expert tensor parallelism four groups of EP2 hold one data-parallel rank: half of the GPUs, too.
        (
            "run.sh",
            VERL.format(more=ONE_EXPERT_PART),
            {"micro_batch_tokens": 8192, "global_batch_size": 16, "expert_tensor_parallel_size": 1},
        ),
        ("run.sh", SLIME, {"micro_batch_tokens": 4096, "global_batch_size": 16, "layout": "slime"}),
        ("run.yaml", NEMO_RL, {"micro_batch_tokens": 8192, "global_batch_size": 16, "reference_passes": 1}),
        # One of the two nodes generates: 8 GPUs train, two groups of EP4.
        (
            "run.yaml",
            NEMO_RL + SEPARATE_NODE,
            {"train_gpus": 8, "rollout_gpus": 8, "global_batch_size": 32, "reference_passes": 0},
        ),
        # 16 GPUs with EP8 are two groups: half of the 32 prompts of an update, four samples of each.
        ("run.sh", SKYRL, {"micro_batch_tokens": 4096, "global_batch_size": 64, "num_samples": 256}),
        # 4 x 2 x 2 GPUs are the ranks that are simulated: the whole batch.
        (
            "run.yaml",
            AREAL,
            {
                "micro_batch_tokens": 10240,
                "num_samples": 512,
                "samples_per_prompt": 8,
                "train_gpus": 16,
                "global_batch_size": 512,
            },
        ),
        # 32 GPUs are four groups of EP8.
        (
            "run.yaml",
            ROLL,
            {
                "micro_batch_tokens": 8192,
                "num_samples": 512,
                "samples_per_prompt": 8,
                "train_gpus": 32,
                "global_batch_size": 128,
            },
        ),
    ],
)
def test_the_batch_of_a_run_is_read(tmp_path: Path, name: str, text: str, expected: dict[str, object]) -> None:
    path = tmp_path / name
    path.write_text(text)
    found, _ = launch_options([path], RlStepOptions)
    assert {key: found[key] for key in expected} == expected
    SimulationOptions(**launch_options([path])[0])


def test_the_batch_is_that_of_the_gpus_that_are_simulated(tmp_path: Path) -> None:
    """32 samples of an update on 16 GPUs: 8 GPUs train on half of them, and a layout search on all."""
    path = tmp_path / "run.sh"
    path.write_text(VERL.format(more=""))
    sizes = {gpus: launch_options([path], stated={"gpus": gpus})[0]["global_batch_size"] for gpus in (8, 16, 64)}
    assert sizes == {8: 16, 16: 32, 64: 32}
    assert launch_options([path])[0]["global_batch_size"] == 16
    assert launch_options([path], TuneOptions, stated={"gpus": 8})[0]["global_batch_size"] == 32


@pytest.mark.parametrize(
    ("more", "stated", "samples"),
    [
        # EP2 x ETP4, as Megatron cuts experts like attention: one of two groups of 8 GPUs.
        ("", {}, 16),
        ("", {"expert_model_parallel_size": 4}, 32),
        ("", {"expert_tensor_parallel_size": 1}, 16),
        ("", {"num_ep_groups": 2}, 32),
        ("", {"pipeline_model_parallel_size": 2}, 32),
        (ONE_EXPERT_PART, {"expert_model_parallel_size": 16}, 32),
        # TP4 alone: EP2 x ETP4 holds two data-parallel ranks.
        ("actor_rollout_ref.actor.megatron.context_parallel_size=1", {}, 16),
    ],
)
def test_typed_sizes_decide_which_part_of_the_batch_is_simulated(
    tmp_path: Path, more: str, stated: dict[str, int], samples: int
) -> None:
    """32 samples of an update on 16 GPUs."""
    path = tmp_path / "run.sh"
    path.write_text(VERL.format(more=more))
    assert launch_options([path], stated=stated)[0]["global_batch_size"] == samples


@pytest.mark.parametrize(
    ("more", "fraction"),
    [
        # verl's own: state that is put away between phases is back on the GPU when the optimizer steps.
        ("actor_rollout_ref.actor.megatron.optimizer_offload=True", None),
        ("+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True", 1.0),
        (
            "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True "
            "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=0.5",
            0.5,
        ),
    ],
)
def test_verls_offload_between_phases_is_not_megatrons_optimizer_on_the_host(
    tmp_path: Path, more: str, fraction: float | None
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.format(more=more))
    assert launch_options([path])[0].get("optimizer_offload_fraction") == fraction


OFFLOAD = "actor_rollout_ref.actor.megatron."


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ("", []),
        (f"{OFFLOAD}param_offload=True", ["parameters", "gradients"]),  # verl releases gradients with the parameters
        (f"{OFFLOAD}optimizer_offload=True {OFFLOAD}grad_offload=True", ["gradients", "optimizer"]),
        (f"{OFFLOAD}param_offload=True {OFFLOAD}optimizer_offload=True", ["parameters", "gradients", "optimizer"]),
        (f"{OFFLOAD}param_offload=$ALL", None),
    ],
)
def test_a_colocated_step_pays_for_the_state_that_verl_offloads(
    tmp_path: Path, more: str, state: list[str] | None
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.format(more=f"actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Base {more}"))
    assert launch_options([path], RlStepOptions)[0].get("offloaded_state") == state
    ran = moe_rl("rl-step", "--launch", path, "--mean-length", 2000, "--json", "-")
    assert ran.code == 0, ran.err
    offload_s = json.loads(ran.out)["policies"]["static"]["parts_s"]["offload"]
    assert (offload_s == 0) == (state == [])


ROUTER_REPLAY = "actor_rollout_ref.actor.megatron.router_replay.mode"
PADDED = "actor_rollout_ref.model.use_remove_padding=False"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (VERL.format(more=""), "log_prob"),
        (VERL.format(more=f"{ROUTER_REPLAY}=R2"), "log_prob"),
        (VERL.format(more=f"{ROUTER_REPLAY}=R3"), "rollout"),
        (VERL.format(more=PADDED), "previous_pass"),
        (VERL.format(more=f"{ROUTER_REPLAY}=R3 {PADDED}"), "previous_pass"),  # such a run is not balanced
        (SLIME, "log_prob"),
        (f"{SLIME.rstrip()} --use-rollout-routing-replay", "rollout"),
        (f"{SLIME.rstrip()} --qkv-format bshd", "previous_pass"),
        (f"{SLIME.rstrip()} --qkv-format bshd --use-routing-replay", "log_prob"),
        (SKYRL, "previous_pass"),
        (f"{SKYRL.rstrip()} trainer.policy.megatron_config.moe_enable_routing_replay=true", "rollout"),
    ],
)
def test_the_files_say_which_routes_a_plan_knows(tmp_path: Path, text: str, source: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    found, notes = launch_options([path], RlStepOptions)
    assert found["routes_from"] == source
    assert any("(routes_from previous_pass)" in note for note in notes) == (source == "previous_pass")
    assert "routes_from" not in launch_options([path])[0]


def test_nemo_rl_replays_in_the_log_prob_pass_or_knows_no_routes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(NEMO_RL)
    assert launch_options([path], RlStepOptions)[0]["routes_from"] == "previous_pass"
    path.write_text(NEMO_RL.replace("policy:", "policy:\n  router_replay: {enabled: true}"))
    assert launch_options([path], RlStepOptions)[0]["routes_from"] == "rollout"


USE_KL, KL_IN_REWARD = "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"


@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ("", 0),
        (f"{USE_KL}=False {KL_IN_REWARD}=False", 0),
        (f"{USE_KL}=True", 1),
        (f"{KL_IN_REWARD}=True", 1),
        (f"{USE_KL}=$WITH_KL", None),
        (f"{USE_KL}=$WITH_KL {KL_IN_REWARD}=True", 1),
    ],
)
def test_a_reference_pass_is_counted_where_loss_or_reward_needs_it(
    tmp_path: Path, more: str, passes: int | None
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.format(more=more))
    assert launch_options([path], RlStepOptions)[0].get("reference_passes") == passes
    assert "reference_passes" not in launch_options([path])[0]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--colocate", {"reference_passes": 0}),
        ("--rollout-num-gpus 24", {"rollout_gpus": 24, "reference_passes": 0}),
        ("--colocate --rollout-num-gpus 8 --use-kl-loss", {"reference_passes": 1}),
        ("--colocate --kl-coef 0.00", {"reference_passes": 0}),
        ("--colocate --kl-coef 0.01", {"reference_passes": 1}),
        ("--colocate --sglang-enable-dp-attention", {"rollout_attention_size": 1}),
        ("--colocate --hf-checkpoint $M/Qwen3-30B-A3B-FP8", {"model": "qwen3-30b-a3b", "rollout_precision": "fp8"}),
        ("--colocate --use-rollout-logprobs", {"old_log_prob_passes": 0}),
        ("--colocate --rollout-max-response-len 8192", {"max_length": 8192}),
        ("--colocate --rollout-max-response-len 8192 --rollout-max-prompt-len 1024", {"max_length": 9216}),
        ("--colocate --rollout-max-response-len 8192 --rollout-max-context-len 9000", {"max_length": 9000}),
    ],
)
def test_slime_says_how_its_engines_run_and_which_passes_it_has(
    tmp_path: Path, more: str, expected: dict[str, object]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SLIME.replace("--use-dynamic", f"{more} --use-dynamic"))
    found, _ = launch_options([path], RlStepOptions, has_trace=False)
    assert {name: found[name] for name in expected} == expected
    assert "max_length" not in launch_options([path], RlStepOptions)[0], "a trace has its own lengths"
    names = ("rollout_gpus", "rollout_attention_size", "rollout_precision", "old_log_prob_passes", "max_length")
    assert not [name for name in names if name in found and name not in expected]


@pytest.mark.parametrize("sizes", ["--num-layers 48 --num-experts 128", "--num-layers 24 --num-experts 128"])
def test_a_model_with_other_layers_is_not_the_one_that_its_checkpoint_names(tmp_path: Path, sizes: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SLIME.replace("--use-dynamic", f"--hf-checkpoint /m/Qwen3-30B-A3B {sizes} --use-dynamic"))
    found, _ = launch_options([path], RlStepOptions, has_trace=False)
    assert found.get("model") == ("qwen3-30b-a3b" if "48" in sizes else None)


def test_a_sourced_file_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"source ./models/shape.sh\n{SLIME}")
    assert any("models/shape.sh, which does not exist" in note for note in launch_options([path], RlStepOptions)[1])


def test_without_a_trace_the_model_is_the_scripts(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.format(more="actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Base"))
    found, notes = launch_options([path], RlStepOptions, has_trace=False)
    assert found["model"] == "qwen3-30b-a3b"
    assert not any("set --model" in note for note in notes)
    assert "model" not in launch_options([path], RlStepOptions)[0]
    ran = moe_rl("rl-step", "--launch", path, "--mean-length", 2000)
    assert ran.code == 0, ran.err
    assert "model qwen3-30b-a3b" in ran.err


@pytest.mark.lengthy
def test_typed_gpus_decide_the_batch_of_a_script(tmp_path: Path) -> None:
    path, trace = tmp_path / "run.sh", write_npz(tmp_path / "t.npz", sequences=40, tokens=300)
    path.write_text(VERL.format(more=""))
    arguments = ("--launch", path, "--num-experts", 8, "--policy", "static")
    one_group, both = (simulated(tmp_path, trace, *arguments, "--gpus", gpus) for gpus in (8, 16))
    assert both["setting"]["num_ep_groups"] == 2 * one_group["setting"]["num_ep_groups"]
    assert [run["setting"]["global_batch_tokens"] for run in (one_group, both)] == [16 * 300, 32 * 300]
    larger_group = simulated(tmp_path, trace, *arguments, "--ep", 4)
    assert larger_group["setting"]["global_batch_tokens"] == 32 * 300


def test_a_model_that_the_files_name_is_pointed_to(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.format(more="actor_rollout_ref.model.path=/models/Qwen3-30B-A3B"))
    _, notes = launch_options([path])
    assert any("To simulate qwen3-30b-a3b, set --model" in note for note in notes)


def test_a_stated_option_wins_over_the_files_and_the_note_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.format(more="actor_rollout_ref.model.path=/models/Qwen3-30B-A3B"))
    found, notes = launch_options([path], stated={"model": "qwen3-30b-a3b", "expert_model_parallel_size": 4})
    assert "expert_model_parallel_size 2 (not used)" in notes[0]
    assert found["expert_model_parallel_size"] == 2, "whoever merges the options lets the stated ones win"
    assert not any("set --model" in note for note in notes)


def test_a_step_of_rl_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.format(more=""))
    found, _ = launch_options([path], RlStepOptions)
    expected = {"samples_per_prompt": 4, "mini_batches": 2, "rollout_engine_size": 2}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.lengthy
@pytest.mark.parametrize("text", [VERL.format(more=""), VERL.format(more=ONE_EXPERT_PART), SLIME])
def test_a_script_gives_what_its_options_give_typed_by_hand(tmp_path: Path, text: str) -> None:
    path, trace = tmp_path / "run.sh", write_npz(tmp_path / "t.npz", sequences=40, tokens=300)
    path.write_text(text)
    found, _ = launch_options([path])
    typed = [word for name, value in found.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    typed = [word for word in typed if word not in ("True",)]
    same = ("--num-experts", 8, "--policy", "static,moe-rl")
    of_script = simulated(tmp_path, trace, "--launch", path, *same)
    by_hand = simulated(tmp_path, trace, *typed, *same)
    for name in ("static", "moe-rl"):
        assert of_script["policies"][name]["step_time_s"] == by_hand["policies"][name]["step_time_s"]


def test_a_data_parallel_rank_may_lie_in_several_ep_groups(tmp_path: Path) -> None:
    """verl's own recipe of Qwen3-30B: TP4 beside EP2."""
    trace = write_npz(tmp_path / "t.npz", sequences=40, tokens=300)
    shown = simulated(tmp_path, trace, "--ep", 2, "--tp", 4, "--policy", "static")["setting"]
    assert (shown["ep_size"], shown["num_ep_groups"]) == (2, 2)


def test_a_value_without_a_price_is_left_out_with_a_sentence(script: Path) -> None:
    script.write_text(SCRIPT.format(graphs="none").replace("hybridep", "someone") + " --offload-modules unheard_of")
    found, said = launch_options([script])
    assert "moe_flex_dispatcher_backend" not in found
    assert any("the effect of moe_flex_dispatcher_backend someone cannot be predicted" in sentence for sentence in said)
    SimulationOptions(**found).step_setting()


LARGE_BATCHES = ("NeMo-RL-DeepSeek-V3-DAPO",)
"""Recipes whose batch has millions of tokens, on 256 ranks: 20 s of CPU each."""


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=[pytest.mark.slow] if str(recipe) in LARGE_BATCHES else [], id=str(recipe))
        for recipe in recipes()
    ],
)
def test_what_attaches_is_simulated_without_another_option(recipe: Recipe, tmp_path: Path) -> None:
    """On a trace of its experts, with as many layers as it has model chunks."""
    suffix, shape = SHAPES[recipe.framework]
    path, sizes = tmp_path / f"recipe{suffix}", recipe.effective["sizes"]
    path.write_text(shape(recipe))
    layers = sizes.get("pipeline_model_parallel_size", 1) * sizes.get("virtual_pipeline_model_parallel_size", 2)
    experts = min(sizes.get("num_moe_experts", 128), 256)  # as many as the ids of `write_npz` reach
    trace = write_npz(tmp_path / "t.npz", sequences=8, tokens=64, layers=layers, experts=experts, top_k=4)
    ran = moe_rl("simulate", trace, "--launch", path, "--policy", "static", "--num-experts", experts)
    assert ran.code == 0, ran.err


def test_a_script_that_contradicts_itself_is_refused(script: Path, tmp_path: Path) -> None:
    script.write_text(
        SCRIPT.format(graphs="full_iteration").replace("flex --moe-flex-dispatcher-backend hybridep", "alltoall")
    )
    ran = moe_rl("simulate", write_npz(tmp_path / "t.npz"), "--launch", script, "--ep-group-tokens", 200)
    assert (ran.code, ran.out) == (2, "")
    assert "does not work with the alltoall dispatcher" in ran.err


ENGINE = "actor_rollout_ref.rollout."
OF_NEMO_RL = "policy.generation.vllm_cfg: {{tensor_parallel_size: 2, expert_parallel_size: {}}}\n"
OF_SKYRL = "generator.inference_engine.tensor_parallel_size=2 generator.inference_engine.data_parallel_size=4"


@pytest.mark.parametrize(
    ("name", "text", "size", "attention", "running"),
    [
        ("run.sh", VERL.format(more=""), 2, None, None),
        ("run.sh", VERL.format(more=f"{ENGINE}data_parallel_size=4"), 8, 2, 1024),
        ("run.sh", VERL.format(more=f"{ENGINE}data_parallel_size=4 {ENGINE}max_num_seqs=64"), 8, 2, 256),
        ("run.sh", VERL.format(more=f"{ENGINE}max_num_seqs=64"), 2, None, 64),
        ("run.sh", VERL.format(more=f"{ENGINE}data_parallel_size=8 {ENGINE}expert_parallel_size=16"), 16, 2, 2048),
        # Only an engine of TP 2 x DP 4 has this EP size.
        ("run.sh", VERL.format(more=f"{ENGINE}expert_parallel_size=8"), 8, 2, 1024),
        ("run.sh", VERL.format(more=f"{ENGINE}expert_parallel_size=2"), 2, None, None),
        ("run.yaml", NEMO_RL + OF_NEMO_RL.format(8), 8, 2, 1024),
        ("run.yaml", NEMO_RL + OF_NEMO_RL.format(1), 2, None, None),
        ("run.sh", f"{SKYRL.strip()} {OF_SKYRL}", 8, 2, 1024),
        ("run.sh", SLIME, 2, None, None),
    ],
)
def test_a_rollout_engine_has_the_gpus_of_all_its_groups(
    tmp_path: Path, name: str, text: str, size: int, attention: int | None, running: int | None
) -> None:
    path = tmp_path / name
    path.write_text(text)
    found, said = launch_options([path], RlStepOptions)
    names = ("rollout_engine_size", "rollout_attention_size", "rollout_max_running")
    assert [found.get(option) for option in names] == [size, attention, running]
    derived = "expert_parallel_size=8" in text or "expert_parallel_size: 8" in text
    assert any("as its EP size says" in sentence for sentence in said) == derived
