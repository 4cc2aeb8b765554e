"""What `moe-rl doctor run.sh --attach` prints below the verdict: lines with their place, levers, memory, undo."""

import json
from pathlib import Path

from cli_runner import moe_rl
from runs import FIXTURES

from moe_rl.cli.attach_steps import steps_to_attach
from moe_rl.launch import interpret, read_run

VERL, SLIME = FIXTURES / "verl" / "train_moe.sh", FIXTURES / "slime" / "train_fp8.sh"
ROOT = Path(__file__).parents[2]
MEGATRON = (
    "python train.py --num-layers 4 --num-experts 8 --moe-router-topk 2 --hidden-size 1024 --moe-ffn-hidden-size 512 "
    "--moe-token-dispatcher-type alltoall --no-gradient-accumulation-fusion --expert-tensor-parallel-size 1 "
)


def sentences(*files: Path) -> dict[str, str]:
    steps = steps_to_attach(interpret(read_run(list(files)), None))
    return {step.title: "\n".join(step.sentences) for step in steps}


def megatron(folder: Path, options: str) -> dict[str, str]:
    path = folder / "run.sh"
    path.write_text(MEGATRON + options)
    return sentences(path)


def test_slimes_arguments_are_put_beside_one_that_the_script_has() -> None:
    lines = sentences(SLIME, FIXTURES / "slime" / "models" / "qwen3_moe.sh")["write"]
    assert "--custom-megatron-init-path moe_rl.frameworks.slime.attach.init" in lines
    assert "`--expert-model-parallel-size 4` (train_fp8.sh:17)" in lines
    assert '\\"MOE_RL\\": \\"observe\\",   (a new line below train_fp8.sh:54;' in lines


def slime(folder: Path, arguments: str) -> str:
    path = folder / "run.sh"
    path.write_text(f"MISC=(\n{arguments}\n)\npython3 train.py --actor-num-nodes 1 --num-experts 8 ${{MISC[@]}}\n")
    return sentences(path)["write"]


def test_arguments_that_the_script_has_are_not_to_be_added_again(tmp_path: Path) -> None:
    init, step = "--custom-megatron-init-path", "--custom-megatron-before-train-step-hook-path"
    hooks = "moe_rl.frameworks.slime.attach"
    write = slime(tmp_path, f"{init} {hooks}.init\n{step} {hooks}.before_train_step")
    assert '"MOE_RL": "observe"   (in env_vars of the Ray job' in write
    assert "export" not in write
    assert f"nothing for {init}: run.sh:2 has it" in write
    assert f"nothing for {step}: run.sh:3 has it" in write
    assert "(to the arguments" not in write
    other = slime(tmp_path, f"{init} mine.start")
    assert f"run.sh:2 has {init} mine.start: let your function call {hooks}.init" in other
    assert f"{step} {hooks}.before_train_step   (to the arguments)" in other


def test_copies_across_nodes_depend_on_the_size_of_the_ep_group(tmp_path: Path) -> None:
    assert "no replicas across nodes" in megatron(tmp_path, "--expert-model-parallel-size 8\n")["changes"]
    assert (
        "experts also get replicas across nodes" in megatron(tmp_path, "--expert-model-parallel-size 16\n")["changes"]
    )
    overlapped = "--expert-model-parallel-size 16 --overlap-moe-expert-parallel-comm\n"
    assert "no replicas across nodes" in megatron(tmp_path, overlapped)["changes"]


def test_memory_is_one_slot_in_a_node_and_three_across() -> None:
    """Three matrices of 2048 x 768 weights with 2 + 4 bytes each are 27 MiB."""
    assert "\n27 MiB per GPU: one slot" in sentences(VERL)["memory"]


def test_memory_across_nodes_and_without_widths(tmp_path: Path) -> None:
    """Three slots of three matrices of 1024 x 512 weights with 6 bytes each are 27 MiB, too."""
    assert "\n27 MiB per GPU: 3 slots" in megatron(tmp_path, "--expert-model-parallel-size 16\n")["memory"]
    path = tmp_path / "plain.sh"
    path.write_text(MEGATRON.replace("--hidden-size 1024", "") + "--expert-model-parallel-size 4\n")
    assert "because the files do not give the size of an expert" in sentences(path)["memory"]


def test_steps_follow_a_verdict_that_lets_the_run_attach_and_no_other(tmp_path: Path) -> None:
    ran = moe_rl("doctor", "--no-environment", "--attach", VERL)
    assert "MOE_RL=observe" in ran.out
    assert "unset MOE_RL" in ran.out
    titles = [
        step["title"]
        for step in json.loads(moe_rl("doctor", "--no-environment", "--attach", "--json", "-", VERL).out)["steps"]
    ]
    assert titles == ["write", "changes", "memory", "results", "untested", "look first", "gain", "undo"]
    path = tmp_path / "run.sh"
    path.write_text(MEGATRON + "--expert-model-parallel-size 4 --delay-wgrad-compute\n")
    assert "steps" not in json.loads(moe_rl("doctor", "--no-environment", "--attach", "--json", "-", path).out)
    assert "steps" not in json.loads(moe_rl("doctor", "--no-environment", "--json", "-", VERL).out)


def test_an_error_that_does_not_keep_attach_away_is_to_be_fixed_first(tmp_path: Path) -> None:
    """The engine returns no routes, so replay fails on the first batch, balanced or not."""
    path = tmp_path / "run.sh"
    path.write_text(VERL.read_text().replace("engine_returns_routes=True", "engine_returns_routes=False"))
    ran = moe_rl("doctor", "--no-environment", "--attach", "--json", "-", path)
    (step, *_) = json.loads(ran.out)["steps"]
    assert step["title"] == "fix first"
    assert step["sentences"][0].startswith("replay-half-on (run.sh:")
    assert "Fix the errors above first" in moe_rl("doctor", "--no-environment", "--attach", path).out


def test_a_path_that_ends_in_a_listed_model_tells_the_size_of_an_expert(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL.read_text().replace("Qwen/Qwen3-30B-A3B", "/models/Qwen3-30B-A3B"))
    assert "/models/" in path.read_text()
    assert "27 MiB per GPU: one slot for an expert of 2,048 x 768" in sentences(path)["memory"]


def test_a_loop_that_observes_by_its_config_is_not_told_of_the_variable(tmp_path: Path) -> None:
    text = "\n".join(megatron(tmp_path, "--expert-model-parallel-size 8\n").values())
    assert "with BalancerConfig(observe=True), nothing moves" in text
    assert "Then remove `observe=True`" in text
    assert "MOE_RL" not in text


def verl(folder: Path, more: str) -> dict[str, str]:
    path = folder / "run.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=megatron {more}\n")
    return sentences(path)


DYNAMIC, BUDGET = "actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def test_what_happens_to_micro_batches_depends_on_a_token_budget(tmp_path: Path) -> None:
    changes = verl(tmp_path, f"{DYNAMIC}=True {BUDGET}=30720")["changes"]
    assert "samples change their data-parallel rank and micro-batch" in changes
    assert "micro-batches of 30,720 tokens per GPU may shrink" in changes
    assert "off: MOE_RL_FIT_MICRO_BATCHES=false" in changes
    assert "if the run packs them by tokens" in verl(tmp_path, "")["changes"]
    unpacked = verl(tmp_path, f"{DYNAMIC}=False")["changes"]
    assert "MOE_RL_PACK" not in unpacked
    assert "MOE_RL_FIT_MICRO_BATCHES" not in unpacked


def test_metrics_have_the_names_of_the_frameworks_log(tmp_path: Path) -> None:
    assert "compare actor/moe_rl/imbalance with actor/moe_rl/would_be_imbalance" in verl(tmp_path, "")["look first"]
    assert "compare moe_rl/imbalance with moe_rl/would_be_imbalance" in sentences(SLIME)["look first"]


def test_a_hub_id_of_a_listed_model_tells_the_size_of_an_expert(tmp_path: Path) -> None:
    memory = verl(tmp_path, "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Base")["memory"]
    assert "27 MiB per GPU: one slot for an expert of 2,048 x 768" in memory


def test_experts_take_twice_the_memory_on_their_way_from_the_host(tmp_path: Path) -> None:
    """verl's own offload is over when experts move."""
    own = "actor_rollout_ref.actor.megatron.optimizer_offload=True"
    assert "up to 1 GiB while experts move" in verl(tmp_path, own)["memory"]
    megatrons = "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True"
    assert (
        "up to 2 GiB = 2 x 1 GiB while experts move (reorder_scratch_bytes, doubled because of"
        in verl(tmp_path, megatrons)["memory"]
    )


def script(folder: Path, first: str, command: str = "python3") -> Path:
    path = folder / "run.sh"
    options = "actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.expert_model_parallel_size=8"
    path.write_text(f"{first}\n{command} -m verl.trainer.main_ppo {options}\n")
    return path


def test_a_switch_that_the_script_has_is_not_to_be_written_again(tmp_path: Path) -> None:
    observed = sentences(script(tmp_path, "export MOE_RL=observe"))["write"]
    assert "export MOE_RL" not in observed
    assert "run.sh:1 sets it to observe" in observed
    balanced = sentences(script(tmp_path, "export MOE_RL=moe-rl"))["write"]
    assert "sets it to moe-rl: for a first look, set it to observe" in balanced
    assert "export MOE_RL=observe" in sentences(script(tmp_path, "export OTHER=1"))["write"]


def test_a_variable_that_would_end_the_run_is_to_be_fixed_first(tmp_path: Path) -> None:
    path = script(tmp_path, "export MOE_RL=moe-rl\nexport MOE_RL_UNTILL=40")
    ran = moe_rl("doctor", "--no-environment", "--attach", "--json", "-", path)
    assert ran.code == 1
    document = json.loads(ran.out)
    assert not document["healthy"]
    (step, *_) = document["steps"]
    assert step["title"] == "fix first"
    (reason,) = step["sentences"]
    assert "run.sh:2: moe_rl does not know the environment variable MOE_RL_UNTILL" in reason
    assert "MOE_RL_UNTIL" in reason.replace("MOE_RL_UNTILL", "")
    for fine in ("MOE_RL_UNTIL=40", "MOE_RL_REPLICA_SLOTS=2", "MOE_RL_CONFIG=/shared/run.yaml", "MOE_RL_POLICY=moe-rl"):
        good = moe_rl("doctor", "--no-environment", "--attach", script(tmp_path, f"export {fine}"))
        assert good.code == 0, good.out
        assert "fix first" not in good.out


def test_what_uv_runs_is_installed_by_uv(tmp_path: Path) -> None:
    uv = "uv run --frozen --all-packages --extra vllm python3"
    write = sentences(script(tmp_path, "", uv))["write"]
    assert write.startswith("uv pip install ")
    assert "on every node" in write
    assert "repeat this line after each sync" in write
    assert "uv sync" not in sentences(script(tmp_path, ""))["write"]
    assert sentences(script(tmp_path, ""))["write"].startswith("pip install ")


def test_megatron_bridge_is_named_as_untested(tmp_path: Path) -> None:
    bridge = "actor_rollout_ref.actor.megatron.use_mbridge=True"
    assert "Megatron-Bridge, which was tested only with a stand-in" in verl(tmp_path, bridge)["untested"]
    vanilla = f"{bridge} actor_rollout_ref.actor.megatron.vanilla_mbridge=True"
    assert "Bridge" not in verl(tmp_path, vanilla)["untested"]
    assert "Bridge" not in verl(tmp_path, "")["untested"]


def test_what_never_ran_is_named_as_the_page_on_tests_names_it() -> None:
    page = (ROOT / "docs" / "status.md").read_text()
    assert "Nothing has run on several GPUs, with NCCL or with a rollout engine." in page
    for file in (SLIME, VERL):
        assert "never run on more than one GPU, with NCCL or with a rollout engine, nor" in sentences(file)["untested"]
    (row,) = [line for line in page.splitlines() if line.startswith("| slime ")]
    for words in ("own actor", "which needs Megatron-LM and a GPU"):
        assert words in sentences(SLIME)["untested"]
    assert "actors, which need Megatron-LM and a GPU |" in row
    (row,) = [line for line in page.splitlines() if line.startswith("| [verl]")]
    for words in ("rollout engines", "trainer v1", "two nodes"):
        assert words in row.split("|")[-2]
        assert words in sentences(VERL)["untested"]


def test_the_worst_case_is_the_sum_of_its_lines(tmp_path: Path) -> None:
    """Three slots of 1,024 x 512 are 27 MiB, two residents of 9 MiB in each of 4 layers 72 MiB, moves take 1 GiB."""
    memory = megatron(tmp_path, "--expert-model-parallel-size 16\n")["memory"]
    assert memory.startswith("worst case 1.1 GiB per GPU")
    assert "0.1 GiB for replicas that stay for an update" in memory
    assert "With observe: only NCCL's buffers" in memory
    offloaded = megatron(tmp_path, "--expert-model-parallel-size 16 --optimizer-cpu-offload\n")
    assert offloaded["memory"].startswith("worst case 2.1 GiB")
    assert "`--optimizer-cpu-offload` (run.sh:1) makes moves slow" in offloaded["changes"]
    large = megatron(tmp_path, "--expert-model-parallel-size 16 --num-layers 2000\n")["memory"]
    assert large.startswith("worst case 5.1 GiB"), "a twentieth of 80 GiB is the limit of residents"


def test_results_say_in_a_line_each_what_stays_the_same(tmp_path: Path) -> None:
    names = [line.partition(":")[0] for line in sentences(SLIME)["results"].splitlines()]
    assert names == ["losses", "samples", "batches", "checkpoints and weights for rollout engines"]
    assert "samples and batches: unchanged" in verl(tmp_path, f"{DYNAMIC}=False")["results"]
    loop = megatron(tmp_path, "--expert-model-parallel-size 8\n")["results"]
    assert "if written inside balancer.canonical()" in loop


def test_metrics_are_where_each_framework_puts_them(tmp_path: Path) -> None:
    assert "Every worker logs them, one line `moe_rl: ...` per pass" in sentences(SLIME)["look first"]
    assert "verl sends them to its logger" in verl(tmp_path, "")["look first"]


def test_the_command_that_predicts_the_gain_runs(tmp_path: Path) -> None:
    """It takes the script as it stands, its model file included."""
    _, first, _, measured, _ = sentences(SLIME)["gain"].split("`")
    assert first.startswith(f"moe-rl rl-step --launch {SLIME}")
    assert measured == f"{first} --imbalance X"
    command = measured.replace("X", "2.5").split()
    ran = moe_rl(*command[1:], "--policy", "static", "--json", tmp_path / "step.json")
    assert ran.code == 0, ran.out
    assert "X being actor/moe_rl/imbalance" in sentences(VERL)["gain"]


def test_the_command_of_a_run_whose_sizes_do_not_fit_runs_and_says_what_it_changes(tmp_path: Path) -> None:
    """TP 2 is expert TP: EP4 x ETP2 x PP2 are 16 GPUs, of 8. The engine's EP size of 8 is that of TP 2 x DP 4."""
    engine, rollout = "actor_rollout_ref.actor.megatron.", "actor_rollout_ref.rollout."
    more = (
        f"{engine}tensor_model_parallel_size=2 {engine}pipeline_model_parallel_size=2 "
        f"{engine}expert_model_parallel_size=4 trainer.nnodes=1 trainer.n_gpus_per_node=8 "
        f"{rollout}tensor_model_parallel_size=2 {rollout}expert_parallel_size=8 {rollout}n=4 "
        "data.train_batch_size=16 actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B"
    )
    gain = verl(tmp_path, more)["gain"]
    _, first, _, measured, _ = gain.split("`")
    assert "--expert-tensor-parallel-size 1" in first
    assert measured == f"{first} --imbalance X"
    assert "because the run cannot start with 2" in gain
    ran = moe_rl(*first.split()[1:], "--json", tmp_path / "step.json")
    assert ran.code == 0, ran.err
    assert "rollout_engine_size 8" in ran.err
    assert "a rollout engine has 8 GPUs here, as its EP size says" in ran.err
    refused = moe_rl(*first.replace(" --expert-tensor-parallel-size 1", "").split()[1:])
    assert refused.code == 2
    assert "expert_tensor_parallel_size 2 (not set: Megatron takes TP)" in refused.err
    assert "--train-gpus 8 is not a multiple of 16" in refused.err
    assert "Set --expert-tensor-parallel-size 1" in refused.err
    fine = verl(tmp_path, f"{more} {engine}expert_tensor_parallel_size=1")["gain"]
    assert "--expert-tensor-parallel-size" not in fine


def test_settings_that_no_check_needs_are_counted_last() -> None:
    lines = moe_rl("doctor", "--no-environment", VERL).out.strip().splitlines()
    assert "other settings not needed" in lines[-1]
    assert not any("other settings" in line for line in lines[:-1])
