"""What the readers of frameworks' settings make of small runs: which trainer, how many GPUs, which defaults."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_rl.launch import interpret, read_run
from moe_rl.launch.settings import ReadRun

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8"
ACTOR = "actor_rollout_ref.actor."
EXPERTS_OVER_8 = f"{ACTOR}megatron.expert_model_parallel_size=8"
NEMO_BASE = {"defaults": "../grpo_math_1B.yaml", "policy": {"model_name": "Qwen/Qwen3-30B-A3B"}, "grpo": {"a": 1}}


def read(path: Path, text: str) -> ReadRun:
    path.write_text(text)
    return interpret(read_run([path]))


def read_yaml_run(path: Path, document: dict[str, Any]) -> ReadRun:
    return read(path, yaml.safe_dump(document))


def trainer_of(run: ReadRun) -> tuple[Any, str] | None:
    """The trainer that is not Megatron, and what of the files says so; None for Megatron."""
    trainer = run.settings.trainer
    return None if trainer is None else (trainer.value, trainer.written)


def values_of(run: ReadRun, *names: str) -> list[Any]:
    """The settings' values, None for one that is not set."""
    settings = (run.settings.option(name) for name in names)
    return [None if setting is None else setting.value for setting in settings]


# AReaL

CUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@pytest.mark.parametrize(
    ("keys", "trainer", "gpus", "cut"),
    [
        ({"actor.backend": "megatron:d2p4t2e4"}, None, 16, [2, 4, 4]),
        ({"actor.backend": "megatron:(attn:d4p4t2|ffn:d1p4e8)"}, None, 32, [2, 4, 8]),
        ({"actor.backend": "fsdp:d8"}, "fsdp", 8, [None] * 3),
        ({"actor.backend": "d4"}, "FSDP", None, [None] * 3),
        ({"allocation_mode": "sglang:d4+megatron:d1p4e4"}, None, 4, [None, 4, 4]),
        ({"allocation_mode": "sglang:d4p1t2+fsdp:d8c2"}, "fsdp", 16, [None] * 3),
        ({"actor.backend": "megatron:t4", "actor.megatron.tensor_model_parallel_size": 2}, None, 4, [2, None, None]),
        ({"actor.backend": "${oc.env:BACKEND}"}, None, None, [None] * 3),
    ],
)
def test_areals_backend_says_what_trains_on_how_many_gpus_and_how_the_model_is_cut(
    tmp_path: Path, keys: dict[str, Any], trainer: str | None, gpus: int | None, cut: list[int | None]
) -> None:
    document: dict[str, Any] = {"actor": {"path": "/models/own", "megatron": {}}}
    for key, value in keys.items():
        *sections, name = key.split(".")
        section = document
        for each in sections:
            section = section[each]
        section[name] = value
    run = read_yaml_run(tmp_path / "grpo.yaml", document)
    assert run.settings.framework == "areal"
    found = trainer_of(run)
    assert (found and found[0]) == trainer
    assert run.batch.trainer_gpus == gpus
    assert values_of(run, *CUT) == cut


# ROLL


@pytest.mark.parametrize(
    ("mapping", "gpus"),
    [
        ("list(range(0, 16))", 16),
        ("list(range(8,24))", 16),
        ("list(range(8))", 8),
        ([0, 1, 5], 3),
        ("list(range(0, 16, 2))", None),
        ("${oc.env:DEVICES}", None),
        (None, None),
    ],
)
def test_rolls_devices_are_those_of_the_worker_that_trains(tmp_path: Path, mapping: Any, gpus: int | None) -> None:
    worker: dict[str, Any] = {"strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}}}
    if mapping is not None:
        worker["device_mapping"] = mapping
    other = {"strategy_args": {"strategy_name": "vllm"}, "device_mapping": "list(range(0, 4))"}
    run = read_yaml_run(tmp_path / "rlvr.yaml", {"pretrain": "/m", "actor_train": worker, "actor_infer": other})
    assert run.settings.framework == "roll"
    assert run.batch.trainer_gpus == gpus
    assert run.settings.trainer is None


def test_rolls_worker_of_another_strategy_is_another_trainer(tmp_path: Path) -> None:
    worker = {"strategy_args": {"strategy_name": "deepspeed_train"}}
    run = read_yaml_run(tmp_path / "sft.yaml", {"sft_train": worker, "reference": {"strategy_args": {}}})
    found = trainer_of(run)
    assert found is not None
    assert found[0] == "deepspeed_train"


# SkyRL


@pytest.mark.parametrize(
    ("strategy", "trainer"), [({}, "FSDP"), ({"strategy": "fsdp2"}, "fsdp2"), ({"strategy": "megatron"}, None)]
)
def test_skyrl_trains_with_fsdp_unless_its_strategy_is_another(
    tmp_path: Path, strategy: dict[str, str], trainer: str | None
) -> None:
    document = {"trainer": {**strategy, "policy": {"model": {"path": "/models/own"}}}}
    found = trainer_of(read_yaml_run(tmp_path / "grpo.yaml", document))
    assert (found and found[0]) == trainer


# NeMo-RL


def nemo_policy(**sections: Any) -> dict[str, Any]:
    return {**NEMO_BASE, "policy": {"model_name": "/models/own", **sections}}


def test_nemo_rl_trains_with_dtensor_unless_its_megatron_is_on(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for megatron, trainer in (
        ({"enabled": False}, "DTensor"),
        ({"enabled": True}, None),
        ({"enabled": "${oc.env:MEGATRON}"}, None),
        ({"tensor_model_parallel_size": 2}, "DTensor"),
    ):
        run = read_yaml_run(path, nemo_policy(megatron_cfg=megatron))
        found = trainer_of(run)
        assert (found and found[0]) == trainer, megatron
        is_off = any("policy.megatron_cfg is off" in note for note in run.notes)
        assert is_off == (megatron.get("enabled") is False)
    of_megatron = nemo_policy(megatron_cfg={"tensor_model_parallel_size": 2}) | {
        "defaults": "../grpo_math_1B_megatron.yaml"
    }
    assert trainer_of(read_yaml_run(path, of_megatron)) is None


def test_nemo_rl_takes_its_bases_values_where_all_that_is_missing_is_its_own(tmp_path: Path) -> None:
    for base, frozen in (("../grpo_math_1B.yaml", True), ("../our_own_base.yaml", None)):
        document = nemo_policy(megatron_cfg={"enabled": True}) | {"defaults": base}
        assert values_of(read_yaml_run(tmp_path / "recipe.yaml", document), "freeze_moe_router") == [frozen]


def test_nemo_rls_fp8_counts_where_its_switch_is_not_off(tmp_path: Path) -> None:
    for switch, expected in (({}, "e4m3"), ({"enabled": True}, "e4m3"), ({"enabled": False}, None)):
        fp8 = {**switch, "fp8": "e4m3", "fp8_recipe": "blockwise"}
        document = nemo_policy(megatron_cfg={"enabled": True, "num_layers": 4, "fp8_cfg": fp8})
        run = read_yaml_run(tmp_path / "recipe.yaml", document)
        assert values_of(run, "fp8", "fp8_recipe", "num_layers") == [
            expected,
            "blockwise" if expected else None,
            4,
        ]


def test_nemo_rls_fp8_rollout_has_fp32_scales_and_replay_may_leave_mtp_out(tmp_path: Path) -> None:
    for precision, scales in (("fp8", True), ("bfloat16", None)):
        document = nemo_policy(megatron_cfg={"enabled": True}, generation={"vllm_cfg": {"precision": precision}})
        run = read_yaml_run(tmp_path / "recipe.yaml", document)
        assert values_of(run, "rollout_fp32_scales", "replay_covers_mtp") == [scales, None]
    script = "export NRL_ROUTER_REPLAY_EXCLUDE_MTP={}\npython run.py policy.megatron_cfg.enabled=true\n"
    for value, covered in ((1, False), (0, True)):
        run = read(tmp_path / "run.sh", script.format(value))
        assert values_of(run, "replay_covers_mtp") == [covered]


# verl


@pytest.mark.parametrize(
    ("words", "trainer"),
    [
        ("", ("FSDP", "")),
        (EXPERTS_OVER_8, None),
        ("--config-name=ppo_megatron_trainer", None),
        ("--config-name=ppo_trainer", ("FSDP", "")),
        ("model_engine=megatron", None),
        ("model_engine=veomni", ("veomni", "model_engine=veomni")),
        ("model_engine=megatron model_engine=torchtitan", ("torchtitan", "model_engine=torchtitan")),
        (f"{ACTOR}strategy=megatron", None),
        (f"{EXPERTS_OVER_8} {ACTOR}strategy=fsdp2", ("fsdp2", f"{ACTOR}strategy=fsdp2")),
        (f"model_engine=veomni {ACTOR}strategy=$STRATEGY", ("veomni", "model_engine=veomni")),
    ],
)
def test_verls_trainer_is_that_of_its_strategy_its_engine_or_its_configuration(
    tmp_path: Path, words: str, trainer: tuple[str, str] | None
) -> None:
    run = read(tmp_path / "run.sh", f"{VERL} {words}\n")
    assert run.settings.framework == "verl"
    found = trainer_of(run)
    assert (found and found[0]) == (trainer and trainer[0])
    if trainer is not None and trainer[1]:
        assert found == trainer
    assert any("traps of Megatron's engine were not checked" in note for note in run.notes) == (trainer is not None)


def test_verls_supervised_fine_tuning_is_another_trainer_whatever_its_engine(tmp_path: Path) -> None:
    run = read(tmp_path / "run.sh", f"torchrun -m verl.trainer.sft_trainer {ACTOR}strategy=megatron\n")
    assert trainer_of(run) == ("sft", "verl.trainer.sft_trainer")


@pytest.mark.parametrize(
    ("settings", "decisive"),
    [
        ({}, None),
        ({"policy_loss.loss_mode": "vanilla", "loss_agg_mode": "token-mean"}, None),
        ({"policy_loss.loss_mode": "geo_mean", "loss_agg_mode": "token-mean"}, "policy_loss.loss_mode"),
        ({"policy_loss.loss_mode": "vanilla", "loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_agg_mode"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 1024}, None),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": "$SCALE"}, None),
        ({"policy_loss.loss_mode": "$MODE", "loss_agg_mode": "seq-mean-token-sum-norm"}, None),
    ],
)
def test_verls_setting_that_ties_the_loss_to_micro_batches_is_named(
    tmp_path: Path, settings: dict[str, Any], decisive: str | None
) -> None:
    words = [f"{ACTOR}{name}={value}" for name, value in settings.items()]
    found = read(tmp_path / "run.sh", f"{VERL} {EXPERTS_OVER_8} {' '.join(words)}\n").settings.micro_batch_loss
    if decisive is None:
        assert found is None
        return
    assert found is not None
    assert found.written == f"{ACTOR}{decisive}={settings[decisive]}"
    assert str(settings[decisive]) in found.value
