"""Expert TP that a run does not set: Megatron takes TP, some frameworks 1; doctor and simulation go by one rule."""

from pathlib import Path

import pytest
import yaml

from moe_rl.cli.attach_steps import steps_to_attach
from moe_rl.doctor import examine
from moe_rl.launch import interpret, read_run
from moe_rl.launch.settings import ReadRun
from moe_rl.study.launch import launch_options

ENGINE = "actor_rollout_ref.actor.megatron."
VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-235B-A22B "
    f"{ENGINE}tensor_model_parallel_size=4 {ENGINE}pipeline_model_parallel_size=8 "
    f"{ENGINE}expert_model_parallel_size=4 trainer.n_gpus_per_node=8 "
)
ETP = f"{ENGINE}expert_tensor_parallel_size"
FLAGS = "--num-layers 4 --num-experts 8 --tensor-model-parallel-size 4 --expert-model-parallel-size 2"
SKYRL = (
    "python -m skyrl.main trainer.strategy=megatron trainer.policy.megatron_config.tensor_model_parallel_size=4 "
    "trainer.policy.megatron_config.expert_model_parallel_size=2"
)
NEMO_RL = {
    "defaults": "../grpo_math_1B.yaml",
    "policy": {
        "model_name": "/models/own",
        "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 2},
    },
}
ROLL = {
    "actor_train": {
        "device_mapping": "list(range(0, 16))",
        "strategy_args": {
            "strategy_name": "megatron_train",
            "strategy_config": {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2},
        },
    }
}


def read(folder: Path, run: str | dict[str, object]) -> ReadRun:
    text, name = (run, "run.sh") if isinstance(run, str) else (yaml.safe_dump(run), "run.yaml")
    path = folder / name
    path.write_text(text)
    return interpret(read_run([path]))


def of_areal(backend: str) -> dict[str, object]:
    return {"actor": {"path": "/models/own", "backend": backend}}


@pytest.mark.parametrize(
    ("run", "framework", "parts"),
    [
        (VERL, "verl", 4),
        (f"{VERL} {ETP}=null", "verl", 4),
        (f"{VERL} {ETP}=1", "verl", 1),
        (f"{VERL} {ETP}=2", "verl", 2),
        (f"{VERL} actor_rollout_ref.actor.strategy=fsdp2", "verl", 1),
        (f"python3 train.py --rollout-batch-size 8 {FLAGS}", "slime", 4),
        (f"python3 miles/train.py --rollout-batch-size 8 {FLAGS}", "miles", 4),
        (f"torchrun pretrain_gpt.py {FLAGS}", "megatron", 4),
        (f"torchrun pretrain_gpt.py {FLAGS} --expert-tensor-parallel-size 1", "megatron", 1),
        ("torchrun pretrain_gpt.py --num-layers 4 --num-experts 8 --expert-model-parallel-size 2", "megatron", 1),
        (f"megatron sft {FLAGS.replace('-', '_').replace('__', '--')}", "megatron", 1),
        ("torchrun run.py model.tensor_model_parallel_size=4 model.num_layers=4", "megatron", 1),
        (SKYRL, "skyrl", 4),
        (NEMO_RL, "nemo_rl", 1),
        (ROLL, "roll", 4),
        (of_areal("megatron:d2p4t2e4"), "areal", 1),
        (of_areal("megatron:(attn:d4p4t2|ffn:d1p4t2e4)"), "areal", 2),
    ],
)
def test_every_framework_has_its_own_default(
    tmp_path: Path, run: str | dict[str, object], framework: str, parts: int
) -> None:
    settings = read(tmp_path, run).settings
    assert settings.framework == framework
    assert settings.parts_of_expert == parts
    experts = settings.expert_model_parallel_size
    assert settings.ranks_of_ep_group == (None if experts is None else experts.value * parts)


def test_doctor_and_simulation_read_the_same_size(tmp_path: Path) -> None:
    for more, parts, mib in (("", 4, 27), (f"{ETP}=2", 2, 54), (f"{ETP}=1", 1, 108)):
        run = read(tmp_path, f"{VERL} trainer.nnodes=16 {more}")
        found, said = launch_options([tmp_path / "run.sh"])
        assert found["expert_tensor_parallel_size"] == run.settings.parts_of_expert == parts
        memory = next("\n".join(step.sentences) for step in steps_to_attach(run) if step.title == "memory")
        # Three matrices of 4,096 x 1,536 weights with 6 bytes each; EP4 x ETP4 alone leaves the node of 8 GPUs.
        slots = 3 if parts == 4 else 1
        assert f"\n{slots * mib} MiB per GPU" in memory
        announced = "(not set: Megatron takes TP)"
        assert (announced in memory) == (announced in said[0]) == (more == "")


@pytest.mark.parametrize("unknown", [f"{ETP}=$PARTS", f"{ENGINE}tensor_model_parallel_size=$SIZE"])
def test_a_size_that_only_the_machine_knows_is_not_assumed(tmp_path: Path, unknown: str) -> None:
    run = read(tmp_path, f"{VERL} trainer.nnodes=8 {unknown}")
    assert run.expert_tensor_is_open
    assert run.settings.expert_tensor_parallel_size is None
    assert "gpus-do-not-add-up" not in found_in(run)
    steps = {step.title: "\n".join(step.sentences) for step in steps_to_attach(run)}
    assert "do not give the expert TP size" in steps["changes"]
    assert "worst case unknown" in steps["memory"]
    _, said = launch_options([tmp_path / "run.sh"])
    name = unknown.split(".")[-1].split("=")[0]
    assert any(name in sentence and "depends on" in sentence for sentence in said)


def test_an_expert_tp_that_follows_follows_a_typed_tp(tmp_path: Path) -> None:
    read(tmp_path, VERL)
    path = tmp_path / "run.sh"
    assert launch_options([path], stated={"tensor_model_parallel_size": 2})[0]["expert_tensor_parallel_size"] == 2
    path.write_text(f"{VERL} {ETP}=4\n")
    assert launch_options([path], stated={"tensor_model_parallel_size": 2})[0]["expert_tensor_parallel_size"] == 4


def found_in(run: ReadRun) -> dict[str, tuple[str, str]]:
    return {finding.trap.name: (finding.sentence, finding.remedy) for finding in examine(run, None).findings}


@pytest.mark.parametrize(
    ("run", "product"),
    [
        (f"{VERL} trainer.nnodes=8", 128),
        (f"{VERL} trainer.nnodes=16", None),
        (f"{VERL} trainer.nnodes=8 {ETP}=1", None),
        (f"{VERL} trainer.nnodes=8 {ETP}=4", 128),
        (f"{VERL} trainer.nnodes=$NODES", None),
        (f"{VERL} trainer.nnodes=2 {ETP}=1", 32),  # TP x PP; EP x PP is 32, too, and not said again
        (VERL, None),
        (f"{VERL} trainer.nnodes=8 actor_rollout_ref.actor.strategy=fsdp2", None),
        (f"{SKYRL} trainer.placement.policy_num_nodes=1 trainer.placement.policy_num_gpus_per_node=4", 8),
        (f"{SKYRL} trainer.placement.policy_num_nodes=1 trainer.placement.policy_num_gpus_per_node=8", None),
        (ROLL | {"actor_train": ROLL["actor_train"] | {"device_mapping": "list(range(0, 4))"}}, 8),
        (ROLL, None),
        (NEMO_RL | {"cluster": {"num_nodes": 1, "gpus_per_node": 6}}, 4),
        (NEMO_RL | {"cluster": {"num_nodes": 1, "gpus_per_node": 8}}, None),
        # A teacher takes a number of nodes that is not the rollout's.
        (NEMO_RL | {"cluster": {"num_nodes": 1, "gpus_per_node": 6}, "teacher": {"num_nodes": 1}}, None),
        (of_areal("megatron:d1t2e4"), 4),
        (of_areal("megatron:d2t2e4"), None),
    ],
)
def test_sizes_that_do_not_divide_the_gpus_are_an_error_where_all_are_known(
    tmp_path: Path, run: str | dict[str, object], product: int | None
) -> None:
    sentence, remedy = found_in(read(tmp_path, run)).get("gpus-do-not-add-up", ("", ""))
    assert bool(sentence) == (product is not None)
    assert product is None or f"not a multiple of {product}:" in sentence
    assert remedy.startswith("Set expert_tensor_parallel_size to 1") == (product in (8, 128))


def test_an_ep_group_that_expert_tp_makes_larger_than_a_node_is_noted(tmp_path: Path) -> None:
    sentence, _ = found_in(read(tmp_path, f"{VERL} trainer.nnodes=16"))["expert-group-leaves-node"]
    assert "is 16 GPUs, more than a node has" in sentence
    assert "expert-group-leaves-node" not in found_in(read(tmp_path, f"{VERL} trainer.nnodes=16 {ETP}=2"))
