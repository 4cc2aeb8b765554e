"""What a script sources is found although its path is another here: among the files given, or below its folder."""

from pathlib import Path

import pytest

from moe_rl.cli.attach_steps import steps_to_attach
from moe_rl.launch import interpret, read_run
from moe_rl.launch.settings import ReadRun

MODEL = "MODEL_ARGS=(--num-experts 8 --hidden-size 1024)\n"
RUN = (
    'source "/data/slime/scripts/models/small.sh"\npython3 train.py --actor-num-nodes 1 '
    "--expert-model-parallel-size 8 ${MODEL_ARGS[@]}\n"
)


def files(folder: Path, model: str, run: str = RUN) -> tuple[Path, Path]:
    script, sourced = folder / "job" / "run.sh", folder / model
    for path, text in ((script, run), (sourced, MODEL)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return script, sourced


def read(*paths: Path) -> ReadRun:
    return interpret(read_run(list(paths)), None)


def experts(run: ReadRun) -> object:
    return run.settings.value_of("num_moe_experts")


@pytest.mark.parametrize("order", [1, -1])
def test_a_given_file_is_the_sourced_one_if_its_name_is_the_same(tmp_path: Path, order: int) -> None:
    script, sourced = files(tmp_path, "elsewhere/small.sh")
    assert experts(read(script)) is None
    run = read(*(script, sourced)[::order])
    assert experts(run) == 8, "the array is there when the command takes it"
    assert run.notes == ()
    text = "\n".join(steps_to_attach(run)[0].sentences)
    assert "(run.sh:2)" in text, "the file with the command, wherever it stands in the list"
    assert "small.sh" not in text


def test_a_given_file_may_have_a_path_that_only_the_machine_knows(tmp_path: Path) -> None:
    script, sourced = files(tmp_path, "small.sh", RUN.replace("/data/slime", "${SLIME}"))
    assert "the value of $SLIME is not known" in read(script).notes[0]
    run = read(script, sourced)
    assert (experts(run), run.notes) == (8, ())


def test_of_two_given_files_the_one_whose_folder_fits_is_read(tmp_path: Path) -> None:
    script, other = files(tmp_path, "other/small.sh")
    other.write_text(MODEL.replace("8", "16"))
    _, fitting = files(tmp_path, "mine/models/small.sh")
    assert experts(read(script, other, fitting)) == 8
    _, same = files(tmp_path, "third/small.sh")
    assert "does not exist: give the sourced file" in read(script, other, same).notes[0], "neither is closer"


def test_a_file_below_the_scripts_folder_is_found_if_its_name_is_unique(tmp_path: Path) -> None:
    script, sourced = files(tmp_path, "job/scripts/models/small.sh")
    run = read(script)
    assert experts(run) == 8
    (note,) = run.notes
    assert f"{sourced}, the only file of this name below" in note
    assert run.conditions == (), "the verdict has no condition"
    files(tmp_path, "job/old/small.sh")
    ambiguous = read(script)
    assert experts(ambiguous) is None
    assert "does not exist: give the sourced file" in ambiguous.notes[0]
    assert experts(read(script, sourced)) == 8


def test_hidden_and_far_folders_are_not_looked_into(tmp_path: Path) -> None:
    for model in ("job/.git/small.sh", "job/a/b/c/d/small.sh"):
        script, _ = files(tmp_path, model)
    assert experts(read(script)) is None


def test_a_file_that_is_where_the_script_says_wins(tmp_path: Path) -> None:
    script, there = files(tmp_path, "models/small.sh", RUN.replace("/data/slime/scripts", str(tmp_path)))
    _, given = files(tmp_path, "mine/small.sh", script.read_text())
    given.write_text("MODEL_ARGS=(--num-experts 16)\n")
    assert there.is_file()
    assert experts(read(script)) == 8
