"""What `moe-rl doctor --attach` says of a run as a whole: four words, and never an all-clear of what was not read."""

import json
from pathlib import Path

import pytest
from cli_runner import moe_rl
from runs import FIXTURES, GOOD, diagnose

from moe_rl.doctor.verdict import AttachVerdict

PLAIN = (
    "--num-layers 4 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --no-gradient-accumulation-fusion"
)
OVERRIDES = "actor_rollout_ref.actor.megatron.expert_model_parallel_size=8"


def verdict(path: Path, text: str) -> AttachVerdict:
    path.write_text(text)
    found = diagnose(path, attach=True).verdict
    assert found is not None
    return found


def test_a_run_that_sets_nothing_refused_attaches(tmp_path: Path) -> None:
    assert verdict(tmp_path / "run.sh", f"python train.py {PLAIN}\n") == AttachVerdict(word="attaches")


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ("--delay-wgrad-compute", "delay_wgrad_compute"),
        ("--cuda-graph-impl local", "cuda_graph_impl local"),
    ],
)
def test_what_attach_refuses_is_named_with_its_place(tmp_path: Path, change: str, option: str) -> None:
    found = verdict(tmp_path / "run.sh", f"python train.py {PLAIN} {change}\n")
    assert found.word == "does not attach"
    assert found.reasons[0].startswith(f"{option} is not supported")
    assert "run.sh:1" in found.reasons[0]


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        (
            "slime.sh",
            f"python train.py {PLAIN} --rollout-batch-size 4 --moe-grouped-gemm --lora-rank 16\n",
            "does not attach",
        ),
        (
            "attention.sh",
            f"python train.py {PLAIN} --rollout-batch-size 4 --moe-grouped-gemm --lora-rank 16 --target-modules "
            "linear_qkv,linear_proj\n",
            "attaches",
        ),
        (
            "open.sh",
            f"python train.py {PLAIN} --rollout-batch-size 4 --moe-grouped-gemm --lora-rank $RANK\n",
            "not readable",
        ),
        ("none.sh", f"python train.py {PLAIN} --rollout-batch-size 4 --lora-rank 0\n", "attaches"),
        (
            "verl.sh",
            f"python -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer {OVERRIDES} "
            "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B actor_rollout_ref.model.lora.rank=32\n",
            "attaches, but",
        ),
        (
            "nemo.yaml",
            "policy: {model_name: Qwen/Qwen3-30B-A3B, megatron_cfg: {enabled: true, expert_model_parallel_size: 8, "
            "peft: {enabled: true}}}\ngrpo: {}\n",
            "attaches, but",
        ),
    ],
)
def test_adapters_around_experts_are_no_all_clear(tmp_path: Path, name: str, text: str, word: str) -> None:
    found = verdict(tmp_path / name, text)
    assert found.word == word, found
    assert any("TEGroupedMLP" in reason for reason in found.reasons) == (word != "attaches")


def test_an_option_that_decides_and_is_not_known_is_not_readable(tmp_path: Path) -> None:
    found = verdict(tmp_path / "run.sh", f"python train.py {PLAIN} --moe-token-dispatcher-type $HOW\n")
    assert found.word == "not readable"
    assert "depends on $HOW" in found.reasons[0]
    later = verdict(tmp_path / "run.sh", f"python train.py --moe-token-dispatcher-type $HOW {PLAIN}\n")
    assert later.word == "attaches", "a later value counts"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--pipeline-model-parallel-size $PP", "attaches"),
        ("--tensor-model-parallel-size $TP", "attaches"),
        ("--expert-model-parallel-size 1", "does not attach"),
        ("--num-virtual-stages-per-pipeline-rank $V --pipeline-model-parallel-size 2", "attaches"),
        ("--num-virtual-stages-per-pipeline-rank $V --no-overlap-p2p-communication", "attaches"),
        (
            "--num-virtual-stages-per-pipeline-rank $V --pipeline-model-parallel-size 2 --no-overlap-p2p-communication",
            "not readable",
        ),
        ("--fp8-recipe $R", "attaches"),
        ("--fp8-format e4m3 --moe-grouped-gemm --fp8-recipe $R", "not readable"),
        ("--fp8-format $F --moe-grouped-gemm --fp8-recipe blockwise", "attaches"),
        ("--fp8-format $F --fp8-recipe blockwise", "not readable"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "does not attach"),
    ],
)
def test_what_is_not_known_matters_where_it_decides(tmp_path: Path, flags: str, word: str) -> None:
    assert verdict(tmp_path / "run.sh", f"python train.py {PLAIN} {flags}\n").word == word


def test_a_run_of_which_nobody_knows_whether_it_has_experts_is_not_readable(tmp_path: Path) -> None:
    flags = "--num-layers 4 --tensor-model-parallel-size 1 --rollout-batch-size 8"
    found = verdict(tmp_path / "run.sh", f"source models/some.sh\npython train.py {flags} ${{MODEL[@]}}\n")
    assert found.word == "not readable"
    assert found.reasons[0].startswith("nothing in these files shows that the model has experts. ")
    assert found.reasons[0].endswith("run.sh sources models/some.sh, which does not exist: give the sourced file, too.")


def test_a_file_that_is_not_there_is_a_condition(tmp_path: Path) -> None:
    text = f"source models/some.sh\nsource /opt/venv/bin/activate\npython train.py {PLAIN}\n"
    found = verdict(tmp_path / "run.sh", text)
    assert found.word == "attaches, but"
    assert len(found.reasons) == 1, "the environment's set-up says nothing about the run"
    assert found.reasons[0].endswith("run.sh sources models/some.sh, which does not exist: give the sourced file, too.")


@pytest.mark.parametrize(
    ("name", "text", "trainer"),
    [
        ("verl.sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8\n", "PyTorch's FSDP"),
        ("dp.sh", f"python3 -m verl.trainer.main_ppo {OVERRIDES} model_engine=veomni\n", "VeOmni"),
        (
            "strategy.sh",
            f"python3 -m verl.trainer.main_ppo {OVERRIDES} actor_rollout_ref.actor.strategy=fsdp2\n",
            "PyTorch's FSDP",
        ),
        ("slime.sh", f"python train.py {PLAIN} --rollout-batch-size 8 --train-backend fsdp\n", "PyTorch's FSDP"),
        ("off.yaml", "policy:\n  megatron_cfg: {enabled: false, expert_model_parallel_size: 8}\n", "DTensor"),
        (
            "base.yaml",
            "defaults: ../grpo_math_1B.yaml\npolicy: {model_name: Qwen/Qwen3-30B-A3B}\ngrpo: {a: 1}\n",
            "DTensor",
        ),
    ],
)
def test_a_run_that_another_trainer_trains_does_not_attach(tmp_path: Path, name: str, text: str, trainer: str) -> None:
    found = verdict(tmp_path / name, text)
    assert found.word == "does not attach"
    assert f"trains with {trainer} " in found.reasons[0]


def test_what_a_framework_sets_by_itself_is_read(tmp_path: Path) -> None:
    """verl builds by Megatron-Bridge; NeMo-RL's base configuration freezes the router."""
    text = (
        f"python3 -m verl.trainer.main_ppo {OVERRIDES} actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4\n"
    )
    run = diagnose(_written(tmp_path / "verl.sh", text)).run
    assert run is not None
    permute = run.settings.option("moe_permute_fusion")
    assert permute is not None
    assert str(permute) == "the default of Megatron-Bridge"
    text = (
        "defaults: ../../grpo_math_1B.yaml\npolicy:\n  megatron_cfg: {enabled: true, tensor_model_parallel_size: 4}\n"
    )
    run = diagnose(_written(tmp_path / "nemo.yaml", text)).run
    assert run is not None
    frozen = run.settings.freeze_moe_router
    assert frozen is not None
    assert (frozen.value, str(frozen)) == (True, "the default of NeMo-RL")


def test_any_option_of_megatrons_is_read_under_its_own_name(tmp_path: Path) -> None:
    """A rule of `attach` may be about an option that no trap knows."""
    prefix = "actor_rollout_ref.actor.megatron."
    text = (
        f"python3 -m verl.trainer.main_ppo +{prefix}override_transformer_config.moe_new=True "
        f"+{prefix}override_ddp_config.num_buckets=3 +{prefix}override_transformer_config.moe_other=$X\n"
    )
    run = diagnose(_written(tmp_path / "verl.sh", text)).run
    assert run is not None
    options = {name: setting.value for name, setting in run.settings.options.items() if setting.where}
    assert options == {"moe_new": True, "num_buckets": 3}
    assert "$X" in run.undecided["moe_other"]


def test_the_command_says_the_verdict_and_an_unreadable_run_is_no_success(tmp_path: Path) -> None:
    path = _written(tmp_path / "run.sh", f"python train.py {PLAIN} --fp8-format $F\n")
    ran = moe_rl("doctor", "--no-environment", "--attach", path)
    assert ran.code == 1
    assert "verdict: not readable" in ran.out
    document = json.loads(moe_rl("doctor", "--no-environment", "--attach", "--json", "-", path).out)
    assert document["verdict"]["attach"] == "not readable"
    assert document["healthy"] is False
    assert "verdict" not in json.loads(moe_rl("doctor", "--no-environment", "--json", "-", path).out)


BRIDGE = (
    "cfg = recipe()\ncfg.model.expert_model_parallel_size = 8\ncfg.model.{} = {}\ncfg.ddp.use_megatron_fsdp = False\n"
)
SWIFT = (
    "NPROC_PER_NODE=8 megatron sft --model M --expert_model_parallel_size 8 --tensor_model_parallel_size 2 --{} {}\n"
)
PARSER = (
    "import argparse\np = argparse.ArgumentParser()\n"
    'p.add_argument("--expert-model-parallel-size", type=int, default=8)\n'
    'p.add_argument("--tensor-model-parallel-size", default=1)\np.add_argument("--{}", default={})\n'
)
FIELDS = "class Options:\n    expert_model_parallel_size: int = 8\n    num_layers: int = 4\n    {}: bool = {}\n"
CALL = "run(dict(num_layers=4), TransformerConfig(num_moe_experts=8, expert_model_parallel_size=8, {}={}))\n"
MAPPING = 'CONFIG = {{"model": {{"num_moe_experts": 8, "expert_model_parallel_size": 8, "{}": {}}}}}\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bridge.py", BRIDGE),
        ("dict.py", MAPPING),
        ("call.py", CALL),
        ("fields.py", FIELDS),
        ("parser.py", PARSER),
        ("bridge.sh", "torchrun run.py model.expert_model_parallel_size=8 model.num_layers=4 model.{}={}\n"),
        ("swift.sh", SWIFT),
    ],
)
def test_options_are_read_in_the_shapes_that_other_scripts_have(tmp_path: Path, name: str, text: str) -> None:
    accepted = verdict(tmp_path / name, text.format("moe_pad_expert_input_to_capacity", False))
    refused = verdict(tmp_path / name, text.format("moe_pad_expert_input_to_capacity", True))
    option = "moe_pad_expert_input_to_capacity is not supported"
    assert refused.word == "does not attach"
    assert any(reason.startswith(option) and f"{name}:" in reason for reason in refused.reasons)
    assert not any(reason.startswith(option) for reason in accepted.reasons)


def test_what_python_computes_is_not_taken_for_accepted(tmp_path: Path) -> None:
    text = MAPPING.format("moe_pad_expert_input_to_capacity", "choose(here)")
    found = diagnose(_written(tmp_path / "computed.py", text)).run
    assert found is not None
    assert "`choose(here)`" in found.undecided["moe_pad_expert_input_to_capacity"]
    assert any("values that it computes at run time were not read" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "roles.yaml",
            "learner:\n  engine_args:\n    engine_config: {expert_model_parallel_size: 8, num_layers: 4}\n",
        ),
        ("other.sh", "python -m main trainer.learner.megatron_config.expert_model_parallel_size=8 trainer.n=1\n"),
    ],
)
def test_a_framework_that_is_not_known_is_not_readable(tmp_path: Path, name: str, text: str) -> None:
    """Its sections may mean the reference model as well as the policy."""
    ran = moe_rl("doctor", "--no-environment", "--attach", _written(tmp_path / name, text))
    assert ran.code == 2
    assert "do not show which framework reads them" in ran.err


def test_a_launcher_in_an_array_is_a_command(tmp_path: Path) -> None:
    text = (
        f"LAUNCH=(python3)\nif [ -e /opt/uv ]; then\n    LAUNCH=(uv run python3)\nfi\n"
        f'"${{LAUNCH[@]}}" -m verl.trainer.main_ppo {OVERRIDES} model_engine=megatron "$@"\n'
    )
    run = diagnose(_written(tmp_path / "run.sh", text)).run
    assert run is not None
    assert run.notes == ()
    assert run.settings.trainer is None


@pytest.mark.parametrize("run", GOOD)
def test_every_good_run_has_a_verdict(run: str) -> None:
    found = diagnose(FIXTURES / GOOD[run].file, attach=True).verdict
    assert found is not None
    assert found.word != "not readable"


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
