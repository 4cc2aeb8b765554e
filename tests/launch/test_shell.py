"""Scripts are followed as a shell would, with the line of every value, and nothing is run."""

import shutil
import subprocess
from pathlib import Path

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.launch.files import read_run
from moe_rl.launch.shell.follow import Shell

FLAGS = "--num-layers 4 --expert-model-parallel-size 2"


def followed(text: str) -> Shell:
    shell = Shell(path=Path("run.sh"))
    shell.follow_file(Path("run.sh"), text)
    return shell


def words(text: str) -> list[str]:
    """Return the words of the script's last command."""
    return [word.text for word in followed(text).launches[-1].words]


SCRIPTS = [
    ("run --a 1", ["run", "--a", "1"]),
    ("run 'a b' \"c  d\" e\\ f", ["run", "a b", "c  d", "e f"]),
    ("run a \\\n  b # not this\n", ["run", "a", "b"]),
    ("X=1\nrun $X ${X} \"$X$X\" '$X'", ["run", "1", "1", "11", "$X"]),
    ("X='a  b'\nrun $X \"$X\"", ["run", "a", "b", "a  b"]),
    ('E=\nrun $E "$E" end', ["run", "", "end"]),
    ("A=(1 '2 3' # no\n 4)\nrun \"${A[@]}\" ${#A[@]} ${A[1]}", ["run", "1", "2 3", "4", "3", "2", "3"]),
    ('A=()\nrun "${A[@]}" end', ["run", "end"]),
    ("A=(1)\nA+=(2)\nX=a\nX+=b\nrun ${A[*]} $X", ["run", "1", "2", "ab"]),
    ('run ${X:-8} ${X-9} ${Y:=7} $Y ${Y:+set} ${Z:+set} ${N:-"q r"}', ["run", "8", "9", "7", "7", "set", "q r"]),
    ("X=${X:-${Y:-5}}\nrun $((X * 2 + 1)) $(( (X + 1) / 4 ))", ["run", "11", "1"]),
    ("A=2\nrun $(((A + 1) * 2)) $(((A)))", ["run", "6", "2"]),
    ("P=/a/b/c.yaml\nrun ${P##*/} ${P%.yaml} ${P%%/*} ${P#/a/}", ["run", "c.yaml", "/a/b/c", "b/c.yaml"]),
    ('if [ -z "$X" ]; then X=1; else X=2; fi\nrun $X', ["run", "1"]),
    ("X=b\nif [ $X = a ]; then Y=1; elif [[ $X == b && 3 -gt 2 ]]; then Y=2; fi\nrun $Y", ["run", "2"]),
    ("X=4\nif ! [ $X -lt 3 ] && (( X == 4 )); then run yes; else run no; fi", ["run", "yes"]),
    ("case sglang in\n vllm) A=1;;\n sg*|trt) A=2;;\n *) A=3;;\nesac\nrun $A", ["run", "2"]),
    ("for i in 1 2 3; do A+=($i); done\nrun ${A[@]}", ["run", "1", "2", "3"]),
    ("for ((i=0; i<3; i++)); do A+=($i); done\nrun ${A[@]}", ["run", "0", "1", "2"]),
    ("i=0\nwhile [ $i -lt 3 ]; do i=$((i+1)); done\nrun $i", ["run", "3"]),
    ('f() { local N=$1; run $N "$@"; }\nf a b', ["run", "a", "a", "b"]),
    ("function g {\n run in\n}\ng", ["run", "in"]),
    ("printf -v L '[%s]' \"$(IFS=', '; A=(1 0); echo \"${A[*]}\")\"\nrun $L", ["run", "[1,0]"]),
    ("cat <<EOF > file\n--not this\nEOF\nrun real", ["run", "real"]),
    ("run a 2>&1 | tee log.txt >/dev/null", ["tee", "log.txt"]),
    ("export A=1 B=$((1+1))\nrun $A$B", ["run", "12"]),
    ("run $(basename /x/y.sh) $(dirname /x/y.sh)", ["run", "y.sh", "/x"]),
    ("{ run grouped; }", ["run", "grouped"]),
    ("( run sub )", ["run", "sub"]),
    ("false || run other", ["run", "other"]),
    ("A=(n=1 b 'm=2 3')\nrun \"${A[@]}\"", ["run", "n=1", "b", "m=2 3"]),
    ("run ${X:-\"['a','b']\"} ${Y:-['a']}", ["run", "['a','b']", "[a]"]),
    ("( run sub ) 200>/dev/null", ["run", "sub"]),
    ("cat <<< 'x y' >/dev/null\nrun a", ["run", "a"]),
    ("A=1 B=2\nrun $A$B", ["run", "12"]),
]


@pytest.mark.parametrize(("script", "expected"), SCRIPTS)
def test_what_a_script_starts(script: str, expected: list[str]) -> None:
    assert words(script) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
@pytest.mark.parametrize(("script", "expected"), SCRIPTS)
def test_bash_agrees(script: str, expected: list[str], tmp_path: Path) -> None:
    """The table above is what bash does, not what we think that it does."""
    show = 'run() { printf "%s\\n" run "$@"; }\ntee() { printf "%s\\n" tee "$@" >&2; }\n'
    ran = subprocess.run(
        ["bash", "-c", show + script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert (ran.stdout or ran.stderr).split("\n")[:-1] == expected


@pytest.mark.parametrize(
    "script",
    [
        "case $(hostname) in\n a) X=1;;\n *) echo no >&2; X=2; exit 1;;\nesac\nrun $X",
        "if [ -f /etc/x ]; then X=1; else X=2; exit 1; fi\nrun $X",
        "die() { echo $1; exit 1; }\nX=1\nif [ -f /etc/x ]; then X=2; die gone; fi\nrun $X",
        "X=1\nif [ -f /etc/x ]; then X=2; false || exit 3; fi\nrun $X",
        "X=1\nif [ -f /etc/x ]; then if [ -f /etc/y ]; then X=2; exit; else X=3; exit; fi; fi\nrun $X",
    ],
)
def test_an_undecided_branch_that_ends_the_script_is_not_taken(script: str) -> None:
    assert [word.text for word in followed(script).launches[-1].words] == ["run", "1"]


@pytest.mark.parametrize(
    "script",
    [
        "X=1\nif [ -f /etc/x ]; then X=2; [ -f /etc/y ] || exit 1; fi\nrun $X",  # may go on
        "X=1\nif [ -f /etc/x ]; then X=2; ( exit 1 ); fi\nrun $X",  # ends the subshell alone
        "X=1\nif [ -f /etc/x ]; then X=2; if [ -f /etc/y ]; then exit 1; fi; fi\nrun $X",
    ],
)
def test_a_branch_that_may_go_on_counts(script: str) -> None:
    assert followed(script).launches[-1].words[-1].missing == ("X",)


def test_a_missing_argument_does_not_end_what_is_read() -> None:
    assert words('if [ -z "$1" ]; then echo usage; exit 1; fi\nrun $((1 + 1))') == ["run", "2"]


def test_probes_for_other_accelerators_fail() -> None:
    probe = "D=${D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}\nrun $D"
    assert words(probe) == ["run", "gpu"]


@pytest.mark.parametrize(
    ("script", "unknown"),
    [
        ("run $HOSTS", "$HOSTS"),
        ("N=$(nvidia-smi -L | wc -l)\nrun $N", "$(nvidia-smi -L | wc -l)"),
        ("run $((GPUS * 2))", "$((GPUS * 2))"),
        ("N=$(nproc)\nif [ $N -gt 4 ]; then X=1; else X=2; fi\nrun $X", "X"),
        ("if [ -f /etc/x ]; then X=1; fi\nrun $X", "X"),
        ("case $(hostname) in a) X=1;; b) X=2;; esac\nrun $X", "X"),
        ("run ${!NAME}", "${!NAME}"),
        ("M=Qwen\nrun ${M,,}", "${M,,}"),
        ("run $((1>0?1:0))", "$((1>0?1:0))"),
        ("run $(seq 1 3)", "$(seq 1 3)"),
        ("run ${NEEDED:?must be set}", "$NEEDED"),
    ],
)
def test_what_only_the_machine_knows_is_named_and_not_guessed(script: str, unknown: str) -> None:
    last = followed(script).launches[-1].words[-1]
    assert unknown in last.missing


def test_branches_that_agree_leave_nothing_unknown() -> None:
    script = "if [ $(nproc) -gt 4 ]; then X=1; Y=a; else X=1; Y=b; fi\nrun $X $Y"
    _, same, other = followed(script).launches[-1].words
    assert (same.text, same.missing) == ("1", ())
    assert other.missing == ("Y",)


def test_every_word_keeps_its_line() -> None:
    script = 'A=(\n  --one 1\n  --two \\\n  2\n)\nB="\n--three 3\n--four 4"\nrun ${A[@]} $B --five'
    lines = {word.text: word.where.line for word in followed(script).launches[-1].words}
    assert lines == {
        "run": 9,
        "--one": 2,
        "1": 2,
        "--two": 3,
        "2": 4,
        "--three": 7,
        "3": 7,
        "--four": 8,
        "4": 8,
        "--five": 9,
    }


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("run 'open", "run.sh:1: a single quote has no closing quote."),
        ('\nrun "open', "a double quote has no closing quote."),
        ("run ${X", "'}' is missing."),
        ("if true; then\nrun\n", "'fi' is missing."),
        ("for i in 1 2; run; done", "'do' is missing."),
        ("case x in\n a) run", "'esac' is missing."),
        ("run )", "cannot be parsed."),
        ("for ((;;)); do :; done", "loops forever"),
        ("f() { f; }\nf", "recurses without end"),
        ("A=(1 2", "')' is missing."),
    ],
)
def test_a_broken_script_is_refused_with_its_line(script: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^run\.sh") as refused:
        followed(script)
    assert sentence in str(refused.value)


def test_sourced_files_are_followed_and_missing_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("MODEL=(--num-experts 8)\n")
    run = tmp_path / "run.sh"
    run.write_text(
        'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        'source "${DIR}/models/m.sh"\n. ./gone.sh\nsource $ELSEWHERE/x.sh\n'
        f"python train.py {FLAGS} ${{MODEL[@]}}\n"
    )
    raw = read_run([run])
    assert {entry.key: entry.value for entry in raw.entries}["num_experts"] == ("8",)
    assert [path.rpartition("/")[2] for path in raw.files] == ["run.sh", "m.sh"]
    assert any("gone.sh, which does not exist" in sentence for sentence in raw.absent.values())
    assert any("$ELSEWHERE is not known" in sentence for sentence in raw.absent.values())


def test_files_that_source_one_another_end(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"source {tmp_path}/b.sh\nrun {FLAGS}\n")
    (tmp_path / "b.sh").write_text(f"source {tmp_path}/a.sh\n")
    with pytest.raises(InvalidInputError, match="in a circle"):
        read_run([tmp_path / "a.sh"])


def test_the_command_with_the_most_settings_is_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run.sh"
    run.write_text(
        "ray start --head --num-gpus 8\nhf download --repo-type model x\n"
        f"python convert.py --num-layers 99\ntorchrun --nproc-per-node 8 train.py {FLAGS} --moe-router-topk 2\n"
    )
    entries = {entry.key: entry.value for entry in read_run([run]).entries}
    assert entries["num_layers"] == ("4",)
    assert "head" not in entries


def test_arguments_cut_off_by_a_missing_backslash_are_named_and_taken(tmp_path: Path) -> None:
    """As in THUDM/slime:scripts/run-kimi-k2-Instruct.sh at 57f3c59b."""
    run = tmp_path / "run.sh"
    run.write_text(f"python train.py --num-layers 4 --colocate\n  ${{MODEL[@]}} \\\n  {FLAGS} --moe-router-topk 2\n")
    raw = read_run([run])
    assert {entry.key for entry in raw.entries} >= {"colocate", "num_layers", "moe_router_topk"}
    assert any("run.sh:2: these arguments are not part of any command" in note for note in raw.notes)


def test_variables_that_a_script_exports_or_hands_to_ray_are_kept(tmp_path: Path) -> None:
    run = tmp_path / "run.sh"
    run.write_text(
        f'export A=1\nB=2\nX="{{ \\"env_vars\\": {{\\"D\\": \\"$(hostname)\\", \\"E\\": \\"5\\"}} }}"\n'
        f'C=3 ray job submit --runtime-env-json="$X" -- python3 train.py {FLAGS}\n'
    )
    raw = read_run([run])
    assert {name: value.text for name, value in raw.variables.items()} == {"A": "1", "C": "3", "D": "", "E": "5"}
    assert raw.words == ["ray", "job", "submit", "python3", "train.py"]
