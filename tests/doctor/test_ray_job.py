"""Where a Ray job starts the run, its workers get MOE_RL from the job's runtime environment, and from nothing else."""

import json
import subprocess
from pathlib import Path

import pytest
from cli_runner import moe_rl

from moe_rl.launch import interpret, read_run
from moe_rl.launch.ray_job import RayJob

TRAIN = "python3 train.py --actor-num-nodes 2 --num-experts 8 --expert-model-parallel-size 8 --rollout-batch-size 4"
JSONS = {
    "escaped, several lines": (
        'SETTINGS="{\n  \\"env_vars\\": {\n    \\"A\\": \\"1\\",\n    \\"B\\": \\"${B}\\"\n  }\n}"\n'
        'ray job submit --address x \\\n  --runtime-env-json="${SETTINGS}" \\\n  -- '
    ),
    "escaped, empty": 'SETTINGS="{\\"env_vars\\": {\n}}"\nray job submit --runtime-env-json "$SETTINGS" -- ',
    "one line in single quotes": 'ray job submit --runtime-env-json=\'{"env_vars": {"A": "1"}}\' -- ',
    "one line, empty": "ray job submit --runtime-env-json='{\"env_vars\":{}}' -- ",
    "no variables": 'ray job submit --runtime-env-json=\'{"working_dir": "."}\' -- ',
    "nothing at all": "ray job submit --runtime-env-json='{}' -- ",
    "assigned twice": ('JSON=\'{}\'\nJSON=\'{"env_vars": {"A": "1"}}\'\nray job submit --runtime-env-json=$JSON -- '),
    "no JSON": "ray job submit --address x -- ",
}


def written(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(text + TRAIN + "\n")
    return path


def job_of(path: Path) -> RayJob:
    job = interpret(read_run([path]), None).ray_job
    assert job is not None
    return job


def steps_of(path: Path) -> dict[str, str]:
    document = json.loads(moe_rl("doctor", "--no-environment", "--attach", "--json", "-", path).out)
    return {step["title"]: "\n".join(step["sentences"]) for step in document["steps"]}


def variables_of_workers(path: Path) -> dict[str, str]:
    """Return what the script gives `ray job submit`, by running it with a `ray` that prints its arguments."""
    shim = 'ray() { printf "%s\\n" "${@#--runtime-env-json=}"; }\n'
    ran = subprocess.run(["bash", "-c", shim + path.read_text()], capture_output=True, text=True, check=True)
    document, _ = json.JSONDecoder().raw_decode(ran.stdout, ran.stdout.index("{"))
    variables: dict[str, str] = document["env_vars"]
    return variables


@pytest.mark.parametrize("name", [name for name in JSONS if name != "no JSON"])
def test_the_printed_text_at_the_printed_place_gives_workers_the_variable(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, JSONS[name])
    json_text = job_of(path).json
    assert json_text is not None
    new = json_text.with_variable("MOE_RL", "observe")
    assert new.text.strip() in steps_of(path)["write"]
    assert f"run.sh:{new.where.line}" in steps_of(path)["write"]
    lines = path.read_text().splitlines()
    if new.behind:
        line = lines[new.where.line - 1]
        assert new.behind in line
        lines[new.where.line - 1] = line.replace(new.behind, new.behind + new.text, 1)
    else:
        lines.insert(new.where.line, new.text)
    path.write_text("\n".join(lines))
    variables = variables_of_workers(path)
    assert variables["MOE_RL"] == "observe"
    assert ("A" in variables) == ('"1' in JSONS[name].replace("\\", "")), "what was there is there"
    after = steps_of(path)["write"]
    place = new.where.line + (not new.behind)
    assert f"nothing for MOE_RL: run.sh:{place} sets it to observe" in after


def test_a_job_without_a_runtime_environment_gets_one(tmp_path: Path) -> None:
    path = written(tmp_path, JSONS["no JSON"])
    line = next(line for line in steps_of(path)["write"].splitlines() if line.startswith("--runtime-env"))
    argument, place = line.split("   ")
    assert "run.sh:1" in place
    path.write_text(path.read_text().replace("submit", f"submit {argument}"))
    assert variables_of_workers(path) == {"MOE_RL": "observe"}


def test_a_runtime_environment_in_a_file_is_the_place(tmp_path: Path) -> None:
    settings = tmp_path / "env.yaml"
    settings.write_text("env_vars:\n  A: '1'\n")
    path = written(tmp_path, f"ray job submit --runtime-env={settings} -- ")
    assert f"MOE_RL: observe   (below `env_vars:` in {settings}" in steps_of(path)["write"]
    settings.write_text("env_vars:\n  A: '1'\n  MOE_RL: observe\n")
    assert "nothing for MOE_RL: env.yaml:3 sets it to observe" in steps_of(path)["write"]


def test_an_exported_variable_is_no_switch_of_a_ray_job(tmp_path: Path) -> None:
    path = written(tmp_path, "ray start --head\nexport MOE_RL=observe\n" + JSONS["escaped, several lines"])
    after = steps_of(path)
    assert "run.sh:2 exports MOE_RL, which reaches no worker" in after["fix first"]
    assert "nothing for MOE_RL" not in after["write"]
    assert '\\"MOE_RL\\": \\"observe\\",' in after["write"]
    path = written(tmp_path, "export MOE_RL=observe\nray start --head\n" + JSONS["escaped, several lines"])
    assert "run.sh:1 exports MOE_RL, which reaches at most the workers of the head node" in steps_of(path)["fix first"]
    assert moe_rl("doctor", "--no-environment", "--attach", path).code == 1


def test_verls_driver_hands_on_what_the_head_node_has(tmp_path: Path) -> None:
    """Its job runs on the head node; a variable that is exported too late reaches not even that."""
    command = "ray job submit -- python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=megatron "
    command += "actor_rollout_ref.actor.megatron.expert_model_parallel_size=8\n"
    path = tmp_path / "run.sh"
    path.write_text(f"export MOE_RL=observe\nray start --head\n{command}")
    assert "fix first" not in steps_of(path)
    path.write_text(f"ray start --head\nexport MOE_RL=observe\n{command}")
    assert "run.sh:2 exports MOE_RL, which reaches no worker" in steps_of(path)["fix first"]
    assert "head node" not in steps_of(path)["write"]


def test_a_python_launcher_takes_the_variable_as_an_argument(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    flags = "--actor-num-nodes 1 --num-experts 8 --expert-model-parallel-size 8"
    path.write_text(f"execute_train(train_args='{flags}', num_gpus_per_node=8)\n")
    assert '"MOE_RL": "observe"   (in extra_env_vars of execute_train' in steps_of(path)["write"]
    assert "delete MOE_RL from the runtime environment" in steps_of(path)["undo"]


def test_an_exported_variable_that_the_json_takes_is_a_switch(tmp_path: Path) -> None:
    json_text = (
        'ENV="{\\"env_vars\\": {\n  \\"MOE_RL\\": \\"${MOE_RL}\\"\n}}"\nray job submit --runtime-env-json="$ENV" -- '
    )
    steps = steps_of(written(tmp_path, "export MOE_RL=observe\n" + json_text))
    assert "fix first" not in steps
    assert "nothing for MOE_RL: run.sh:3 sets it to observe" in steps["write"]
    assert "outside these files (run.sh:2): set it to observe" in steps_of(written(tmp_path, json_text))["write"]


def test_undoing_is_deleting_the_variable_where_it_is_set(tmp_path: Path) -> None:
    undo = steps_of(written(tmp_path, JSONS["escaped, several lines"]))["undo"]
    assert (
        "delete MOE_RL from the runtime environment and restart; the two flags may stay as long as moe_rl is installed"
        in undo
    )
    assert "MOE_RL_UNTIL=/shared/off in the same place before the start" in undo


def test_a_wrong_variable_in_the_json_is_named_with_its_line(tmp_path: Path) -> None:
    text = JSONS["escaped, several lines"].replace('\\"A\\": \\"1\\"', '\\"MOE_RL_UNTILL\\": \\"40\\"')
    assert (
        "run.sh:3: moe_rl does not know the environment variable MOE_RL_UNTILL"
        in (steps_of(written(tmp_path, text))["fix first"])
    )
