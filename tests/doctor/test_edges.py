"""Files that are hardly files, values of the wrong type, several files and none: through the command itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import yaml
from cli_runner import Ran, moe_rl, snapshot
from runs import FIXTURES, GOOD, changed, diagnose

from moe_rl.core.errors import InvalidInputError
from moe_rl.doctor.diagnosis import SCHEMA
from moe_rl.doctor.verdict import attach_verdict
from moe_rl.launch import interpret, read_run
from moe_rl.launch.settings import KINDS, layer_pattern
from moe_rl.megatron.refusals import DDP_REFUSALS, REFUSALS, Refusal

SLIME = FIXTURES / GOOD["slime"].file
MEGATRON = "--num-layers 4 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2"


def doctor(*arguments: object) -> Ran:
    return moe_rl("doctor", "--no-environment", *arguments)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_exit_codes_and_json(tmp_path: Path) -> None:
    good = doctor(SLIME, "--json", "-")
    assert good.code == 0
    document = json.loads(good.out)
    assert document["schema"] == SCHEMA == "moe_rl.doctor/1"
    assert (document["healthy"], document["counts"]["error"]) == (True, 0)
    bad = doctor(changed(tmp_path, "slime", [("--moe-router-fusion", True)]), "--json", "-")
    assert bad.code == 1
    first = json.loads(bad.out)["findings"][0]
    assert (first["trap"], first["severity"]) == ("fused-router-bypasses-replay", "error")
    assert all(":" in place and Path(place.rpartition(":")[0]).is_file() for place in first["places"])
    assert first["why"]
    assert first["remedy"]


def test_every_value_says_where_it_stands(tmp_path: Path) -> None:
    for run, good in GOOD.items():
        if good.file.endswith(".toml"):  # Python's reader of TOML gives no line numbers
            continue
        document = diagnose(FIXTURES / good.file).as_json()["run"]
        placed = 0
        for name, setting in document["settings"].items():  # type: ignore[index]
            if "where" not in setting:
                continue
            path, _, line = setting["where"].rpartition(":")
            text = Path(path).read_text().splitlines()[int(line) - 1]
            last = setting["written"].split("=")[0].split(":")[0].split()[0].split(".")[-1].lstrip("-+")
            assert last in text or "--runtime-env-json" in text, (run, name, setting)
            placed += 1
        assert placed > 5


def test_the_table_shows_why_and_what_to_do(tmp_path: Path) -> None:
    ran = doctor(changed(tmp_path, "verl", [("actor_rollout_ref.rollout.enable_rollout_routing_replay", False)]))
    text = " ".join(ran.out.split())
    assert ran.code == 1
    assert "replay-half-on" in text
    assert "Why: " in text
    assert "Do: " in text
    assert "1 error, 0 warnings" in text


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.sh", "", "empty.sh is empty."),
        ("blank.yaml", " \n\n", "blank.yaml is empty."),
        ("comment.yaml", "# nothing\n", "must contain a mapping of keys to values."),
        ("list.yaml", "[1, 2]", "must contain a mapping of keys to values."),
        ("broken.yaml", "a: [1", "is not a YAML file"),
        ("tag.yaml", "a: !!python/object:os.system x", "is not a YAML file"),
        ("nul.yaml", "a: \0", "is not a YAML file"),
        ("month.yaml", "b: 1\na: 2024-13-45", "month.yaml:2: '2024-13-45' is not a valid value of the YAML type"),
        ("int.yaml", "a: !!int foo", "int.yaml:1: 'foo' is not a valid value of the YAML type"),
        ("bool_tag.yaml", "a: !!bool 3", "bool_tag.yaml:1: '3' is not a valid value of the YAML type"),
        ("knot.yaml", "a: &a {b: *a}", "contains a mapping that contains itself."),
        ("text.sh", "echo hello\n", "contains no arguments of a run"),
        ("other.sh", "ls --all --color=never\n", "do not show which framework reads them"),
        ("other.yaml", "a: 1", "do not show which framework reads them"),
        ("open.sh", f"run {MEGATRON} 'x", "open.sh:1: a single quote has no closing quote."),
        (
            "word.sh",
            f"run {MEGATRON} --num-experts eight",
            "word.sh:1: --num-experts must be a whole number, got 'eight'.",
        ),
        ("half.sh", f"run {MEGATRON} --num-experts 8.5", "must be a whole number, got '8.5'."),
        (
            "bool.yaml",
            "num_layers: 4\nmoe_router_fusion: maybe",
            "bool.yaml:2: moe_router_fusion must be true or false",
        ),
        ("number.yaml", "num_layers: true", "number.yaml:1: num_layers must be a whole number, got True."),
        ("nan.yaml", "num_layers: 4\nmoe_expert_capacity_factor: .nan", "must be a number, got nan."),
        ("layers.sh", f"run {MEGATRON} --moe-layer-freq [1]*", "--moe-layer-freq must be a word or list"),
        ("huge.sh", f"run {MEGATRON} --moe-layer-freq [1]*1000000000", "--moe-layer-freq must be a word or list"),
        ("evil.sh", f"run {MEGATRON} --moe-layer-freq __import__('os')", "--moe-layer-freq must be a word or list"),
        ("bad.py", "x = (", "bad.py:1 is not valid Python"),
        ("nul.py", "x = '\0'", "nul.py is not valid Python"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    path = write(tmp_path / name, content)
    before = snapshot(tmp_path)
    ran = doctor(path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert len(ran.err.strip().splitlines()) == 1
    assert sentence in ran.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("run", GOOD)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(tmp_path: Path, run: str) -> None:
    good = FIXTURES / GOOD[run].file
    text = good.read_text()
    damaged = tmp_path / good.name
    random = Random(run)
    pieces = [*"\"'(){}$`\\\n[]=:-|&;#*~\0é ", "None", "-1", "1e9", "${x}", "[1]*9", "<<E", text[:30]]
    sentences = []
    for _ in range(25):
        start = random.randrange(len(text))
        end = start + random.choice([0, 1, 5, 40])
        damaged.write_text(text[:start] + random.choice(pieces) + text[end:])
        try:
            diagnose(damaged, attach=True).as_json()
        except InvalidInputError as error:
            sentences.append(str(error))
    assert not [sentence for sentence in sentences if "\n" in sentence]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "there is no file" in doctor(tmp_path / "none.sh").err
    assert "is a folder" in doctor(tmp_path).err
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00run --num-layers 4")
    assert "binary.sh is not a text file." in doctor(tmp_path / "binary.sh").err
    locked = write(tmp_path / "locked.sh", f"run {MEGATRON}")
    locked.chmod(0)
    if not os.access(locked, os.R_OK):
        assert "cannot be read: Permission denied" in doctor(locked).err


def test_an_unknown_framework_is_answered_with_the_nearest() -> None:
    ran = doctor(SLIME, "--framework", "slim")
    assert ran.code == 2
    assert "unknown framework 'slim'. Did you mean 'slime'?" in ran.err


def test_the_framework_can_be_named(tmp_path: Path) -> None:
    run = diagnose(SLIME, framework="megatron").run
    assert run is not None
    assert run.settings.framework == "megatron"


def test_unknown_settings_are_counted_and_unresolved_ones_named(tmp_path: Path) -> None:
    script = f"run {MEGATRON} --moe-router-fusion $FUSE --my-own 1 --another\n"
    run = interpret(read_run([write(tmp_path / "run.sh", script)]))
    assert run.num_ignored == 2
    assert len(run.unresolved) == 1
    assert "--moe-router-fusion" in run.unresolved[0]
    assert "$FUSE" in run.unresolved[0]
    assert run.settings.moe_router_fusion is None


def test_a_list_of_arguments_is_read_whether_on_one_line_or_on_many(tmp_path: Path) -> None:
    one = interpret(read_run([write(tmp_path / "one.txt", MEGATRON)])).settings
    many = interpret(read_run([write(tmp_path / "many.txt", MEGATRON.replace(" --", "\n--"))])).settings
    assert one.num_moe_experts is not None
    assert many.num_moe_experts is not None
    assert (one.num_moe_experts.value, many.num_moe_experts.value) == (8, 8)
    assert many.num_moe_experts.where is not None
    assert many.num_moe_experts.where.line == 2


def test_of_several_files_the_later_wins(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", yaml.safe_dump({"num_layers": 4, "num_experts": 8, "moe_router_topk": 2}))
    second = write(tmp_path / "b.yaml", "num_experts: 16\n")
    settings = interpret(read_run([first, second])).settings
    assert settings.num_moe_experts is not None
    assert settings.num_layers is not None
    assert (settings.num_moe_experts.value, settings.num_layers.value) == (16, 4)
    model = FIXTURES / "slime" / "models" / "qwen3_moe.sh"
    assert len(read_run([model, SLIME]).files) == 2


def test_a_model_file_alone_says_nothing_about_flags_that_the_command_may_give(tmp_path: Path) -> None:
    model = write(tmp_path / "model.sh", f"MODEL_ARGS=({MEGATRON} --tensor-model-parallel-size 2)\n")
    assert diagnose(model).findings == ()
    command = write(tmp_path / "run.sh", f"python train.py {MEGATRON} --tensor-model-parallel-size 2\n")
    assert not diagnose(command).healthy


def test_arguments_in_one_string_are_read(tmp_path: Path) -> None:
    script = (
        'OPTIONS="\n--num-layers 4 \\\n--num-experts 8 \\\n--moe-router-fusion \\\n--expert-model-parallel-size 3 "\n'
    )
    settings = interpret(read_run([write(tmp_path / "run.sh", script)])).settings
    assert settings.expert_model_parallel_size is not None
    assert settings.expert_model_parallel_size.value == 3
    assert settings.moe_router_fusion is not None
    assert settings.moe_router_fusion.where is not None
    assert settings.moe_router_fusion.where.line == 4


def test_a_python_launcher_is_read_with_its_branches_named(tmp_path: Path) -> None:
    """As in radixark/miles:scripts/run_*.py at 31f1ca961: strings of flags, some formatted, some in a branch."""
    script = (
        "def run(args):\n"
        '    perf = (\n        "--tensor-model-parallel-size 2 "\n        "--sequence-parallel "\n'
        '        f"--expert-model-parallel-size {args.ep} "\n    )\n'
        '    if args.r3:\n        perf += "--use-rollout-routing-replay "\n'
        '    U.execute_train(perf + "--num-experts 8 --moe-router-fusion --rollout-batch-size 4", to="miles.py")\n'
    )
    path = write(tmp_path / "run_miles.py", script)
    diagnosis = diagnose(path)
    assert diagnosis.run is not None
    assert diagnosis.run.settings.framework == "miles"
    assert [each.trap.name for each in diagnosis.findings if each.severity == "error"] == [
        "fused-router-bypasses-replay"
    ]
    assert any("--expert-model-parallel-size" in sentence for sentence in diagnosis.run.unresolved)
    assert any("lines 8" in note for note in diagnosis.run.notes)


def test_defaults_decide_comparisons_in_a_python_launcher(tmp_path: Path) -> None:
    script = (
        "class Args:\n    length: int = 0\n    name: str | None = None\n"
        'flags = "--num-experts 8 --expert-model-parallel-size 2 --rollout-batch-size 4"\n'
        'if args.length > 0:\n    flags += "--seq-length 9"\n'
        'if args.length <= 0:\n    flags += "--num-layers 4"\n'
        'if args.name > 1:\n    flags += "--moe-router-topk 2"\n'
    )
    raw = read_run([write(tmp_path / "run_miles.py", script)])
    keys = {entry.key for entry in raw.entries}
    assert "num_layers" in keys
    assert "seq_length" not in keys
    assert "moe_router_topk" in keys, "None > 1 has no value, so that the branch counts"
    assert any("lines 10" in note for note in raw.notes)


def test_the_known_part_of_a_path_can_be_enough(tmp_path: Path) -> None:
    script = f"python train.py {MEGATRON} --rollout-batch-size 4 --hf-checkpoint $BASE/GLM-FP8/\n"
    run = interpret(read_run([write(tmp_path / "run.sh", script)]))
    assert run.settings.rollout_fp8 is not None
    assert run.settings.rollout_fp8.value is True
    assert run.unresolved == ()


def test_environment_variables_of_a_python_launcher_are_read(tmp_path: Path) -> None:
    script = (
        'flags = "--fp8-format e4m3 --fp8-recipe blockwise --rollout-batch-size 4 --sglang-quantization fp8"\n'
        'variables = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0", "NAME": 1}\n'
    )
    diagnosis = diagnose(write(tmp_path / "run.py", script))
    assert [each.trap.name for each in diagnosis.findings] == ["fp8-scale-mode-differs"]
    assert "run.py:2" in diagnosis.findings[0].sentence


def test_a_dense_run_has_no_trap_of_experts(tmp_path: Path) -> None:
    dense = "run --num-layers 12 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1\n"
    assert diagnose(write(tmp_path / "dense.sh", dense), attach=True).findings == ()


def test_interpolations_are_resolved_or_named(tmp_path: Path) -> None:
    text = (
        "num_layers: 4\nep: 2\nexpert_model_parallel_size: ${ep}\nnum_experts: ${oc.select:gone,8}\n"
        "moe_router_topk: ${oc.env:TOPK,2}\nmoe_expert_capacity_factor: ${mul:${ep},2}\nfp8: ${fp8_format}\n"
        "context_parallel_size: ${context_parallel_size}\n"
    )
    run = interpret(read_run([write(tmp_path / "run.yaml", text)]))
    settings = run.settings
    for setting, value in (
        (settings.expert_model_parallel_size, 2),
        (settings.num_moe_experts, 8),
        (settings.moe_router_topk, 2),
    ):
        assert setting is not None
        assert setting.value == value
    assert settings.moe_expert_capacity_factor is settings.fp8 is settings.context_parallel_size is None
    assert [sentence.removeprefix("the value of ").split()[0] for sentence in run.unresolved] == [
        "moe_expert_capacity_factor",
        "fp8",
        "context_parallel_size",
    ]


def test_a_file_that_defaults_name_and_that_is_not_there_becomes_a_note(tmp_path: Path) -> None:
    text = "defaults: ../base.yaml\npolicy:\n  megatron_cfg:\n    enabled: true\n"
    run = interpret(read_run([write(tmp_path / "recipe.yaml", text)]))
    assert any("extends ../base.yaml, which does not exist" in note for note in run.notes)
    composed = "defaults:\n- actor@actor_rollout_ref.actor: ${engine}_actor\n- _self_\nactor_rollout_ref: {hybrid: 1}\n"
    run = interpret(read_run([write(tmp_path / "trainer.yaml", composed)]))
    assert any("Give the composed configuration" in note for note in run.notes)
    write(tmp_path / "loop.yaml", "defaults: loop.yaml\na: 1\n")
    assert "in a circle" in doctor(tmp_path / "loop.yaml").err


def test_null_takes_a_setting_back(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "num_layers: 4\nnum_experts: 8\nmoe_expert_capacity_factor: null\nfp8: None\n")
    settings = interpret(read_run([path])).settings
    assert settings.moe_expert_capacity_factor is None
    assert settings.fp8 is None


def test_other_trainers_are_said_and_not_diagnosed(tmp_path: Path) -> None:
    text = "policy:\n  megatron_cfg: {enabled: false, moe_router_fusion: true}\n  router_replay: {enabled: true}\n"
    diagnosis = diagnose(write(tmp_path / "dtensor.yaml", text))
    assert diagnosis.findings == ()
    assert diagnosis.run is not None
    assert any("trains without Megatron" in note for note in diagnosis.run.notes)
    fsdp = changed(tmp_path, "verl", [("actor_rollout_ref.actor.strategy", "fsdp")])
    run = diagnose(fsdp).run
    assert run is not None
    assert any("trains with fsdp" in note for note in run.notes)


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp2", "PyTorch's FSDP"),
        ("python3 -m verl.trainer.main_ppo model_engine=veomni", "VeOmni"),
        ("python3 -m verl.trainer.main_ppo model_engine=torchtitan", "torchtitan"),
        (
            "torchrun --nnodes=2 -m verl.trainer.sft_trainer engine=megatron",
            "verl's trainer for supervised fine-tuning",
        ),
    ],
)
def test_trainers_beside_megatron_are_told_apart(tmp_path: Path, command: str, title: str) -> None:
    verdict = attach_verdict(interpret(read_run([write(tmp_path / "run.sh", f"{command} trainer.project_name=x\n")])))
    assert verdict.word == "does not attach"
    named, advice = verdict.reasons
    assert f"trains with {title} (" in named
    assert len(advice) > 40


def test_without_files_only_the_machine_is_looked_at() -> None:
    ran = moe_rl("doctor", "--json", "-")
    document = json.loads(ran.out)
    assert "run" not in document
    assert document["environment"]["python"]
    assert ran.code == (0 if document["healthy"] else 1)
    assert doctor().code == 0


@pytest.mark.parametrize("table", [REFUSALS, DDP_REFUSALS], ids=["config", "ddp"])
def test_what_attach_refuses_is_read_in_every_framework(tmp_path: Path, table: tuple[Refusal, ...]) -> None:
    options = {
        refusal.option: 8 if refusal.option in KINDS and KINDS[refusal.option] is int else True for refusal in table
    }
    section = "override_transformer_config" if table is REFUSALS else "override_ddp_config"
    megatron: dict[str, object] = {"enabled": True}
    flags = "".join(f" --{option.replace('_', '-')} {value}" for option, value in options.items())
    overrides = "".join(
        f" +actor_rollout_ref.actor.megatron.{section}.{option}={value}" for option, value in options.items()
    )
    megatron |= options if table is REFUSALS else {"distributed_data_parallel_config": options}
    for name, text in (
        ("megatron.sh", f"python train.py {MEGATRON}{flags}\n"),
        ("slime.sh", f"python train.py {MEGATRON}{flags} --rollout-batch-size 8\n"),
        ("verl.sh", f"python3 -m verl.trainer.main_ppo{overrides}\n"),
        ("nemo_rl.yaml", yaml.safe_dump({"policy": {"megatron_cfg": megatron}})),
    ):
        settings = interpret(read_run([write(tmp_path / name, text)])).settings
        read = {option for option in options if (setting := settings.option(option)) and setting.where is not None}
        assert read == options.keys(), name


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", [1]), ("([0]*2+[1]*3)*1", [0, 0, 1, 1, 1]), ("[1,0,1]", [1, 0, 1]), (2, [2]), ([0, 1], [0, 1])],
)
def test_layer_patterns_are_read_as_megatron_reads_them(text: object, expected: list[int]) -> None:
    assert layer_pattern(text) == expected


@pytest.mark.lengthy
def test_the_command_loads_no_gpu_stack(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.argv = ['moe-rl', 'doctor', *sys.argv[1:]]\nfrom moe_rl.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "print(*sorted({'torch', 'triton', 'megatron.core', 'transformers'} & set(sys.modules)), file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(SLIME)], capture_output=True, text=True, check=True)
    assert ran.stderr.split() == []
    assert "traps checked" in ran.stdout


@pytest.mark.parametrize("place", ["--rollout-function-path miles.rollout.generate", "--miles-router-port 8000", None])
def test_a_fork_that_one_argument_names_is_not_taken_for_slime(place: str | None, tmp_path: Path) -> None:
    """Its arguments are slime's, but for the name in a value, in a flag, or in the path of its files."""
    folder = tmp_path / ("plain" if place else "Miles")
    folder.mkdir()
    for name, arguments in (("train.sh", place or ""), ("of_slime.sh", "")):
        write(
            folder / name, f"python3 train.py --rollout-batch-size 4 --n-samples-per-prompt 8 {MEGATRON} {arguments}\n"
        )
    assert interpret(read_run([folder / "train.sh"])).settings.framework == "miles"
    expected = "slime" if place else "miles"
    assert interpret(read_run([folder / "of_slime.sh"])).settings.framework == expected
