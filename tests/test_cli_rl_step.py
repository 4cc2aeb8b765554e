"""`moe-rl rl-step`: the parts of every policy, a picture, and what cannot be asked."""

import json
import re
from pathlib import Path

import pytest
from cli_runner import moe_rl, write_npz

from moe_rl.config import bundled_traces

SETTING = ("--ep", 4, "--ep-group-tokens", 200, "--num-experts", 8, "--policy", "eplb-oracle,moe-rl")


def test_parts_add_up_and_the_picture_shows_every_policy(tmp_path: Path) -> None:
    trace, plot = write_npz(tmp_path / "t.npz"), tmp_path / "step.svg"
    ran = moe_rl(
        "rl-step", trace, *SETTING, "--prompt-tokens", 10, "--reward-seconds", 2, "--plot", plot, "--json", "-"
    )
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert set(document["policies"]) == {"static", "eplb-oracle", "moe-rl"}
    for name, figures in document["policies"].items():
        assert figures["step_time_s"] == pytest.approx(sum(figures["parts_s"].values()))
        assert figures["parts_s"]["reward"] == 2.0
        assert figures["parts_s"]["framework"] == document["policies"]["static"]["parts_s"]["framework"]
        assert name in plot.read_text()
    assert any("the time of the rollout is predicted" in note for note in document["notes"])
    table = moe_rl("rl-step", trace, *SETTING, "--plot", tmp_path / "step.html").out
    assert "<h1>moe-rl: update " in (tmp_path / "step.html").read_text()
    assert "weight sync" in table
    assert "moe-rl" in table


def test_without_an_earlier_step_policies_that_need_one_are_left_out(tmp_path: Path) -> None:
    ran = moe_rl(
        "rl-step", write_npz(tmp_path / "t.npz"), "--ep", 4, "--num-experts", 8, "--batch", "recorded", "--json", "-"
    )
    assert ran.code == 0, ran.err
    assert "eplb is left out" in ran.err + ran.out
    policies = json.loads(ran.out)["policies"]
    assert "eplb" not in policies
    assert {"static", "moe-rl"} <= set(policies)


def test_no_figure_of_the_tables_is_cut(tmp_path: Path) -> None:
    policies = "eplb-oracle,lplb-oracle,ultraep,moe-rl,llep"
    ran = moe_rl("rl-step", write_npz(tmp_path / "t.npz"), *SETTING[:-1], policies)
    assert ran.code == 0, ran.err
    assert "\u2026" not in ran.out
    for name in ("static", *policies.split(",")):
        assert re.search(rf"^ ?{name} .* \d\.\d+-\d\.\d+x +\d\.\d+x *$", ran.out, re.MULTILINE), ran.out
    assert re.search(r"RL step [\d.]+x \([\d.]+-[\d.]+\) against static|saves no time", ran.out)


@pytest.mark.parametrize(
    ("arguments", "balanced", "reason"),
    [
        ((), {"update"}, "the old-log-prob pass and the reference pass. If the trainer replays"),
        (("--routes-from", "rollout"), {"log_prob", "update"}, "(--routes-from rollout): the reference pass."),
        (("--old-log-prob-passes", 0), set(), "the reference pass and the update. If the trainer replays"),
        (("--routes-from", "previous_pass", "--reference-passes", 0), set(), "No gain is credited to plans"),
        (("--routes-from", "rollout", "--reference-passes", 0), {"log_prob", "update"}, ""),
    ],
)
def test_only_what_a_run_balances_is_credited_and_the_reason_is_said(
    arguments: tuple[object, ...], balanced: set[str], reason: str
) -> None:
    document = json.loads(moe_rl("rl-step", *FROM_LENGTHS, *arguments, "--json", "-").out)
    static, even = (document["policies"][name]["parts_s"] for name in ("static", "forced_balance"))
    assert {part for part in static if even[part] < static[part]} == balanced
    said = [note for note in document["notes"] if note.startswith("not balanced")]
    assert len(said) == bool(reason)
    assert all(reason in note for note in said)
    table = " ".join(moe_rl("rl-step", *FROM_LENGTHS, *arguments).out.split())
    assert ("The update is not balanced, because its routes" in table) == ("update" not in balanced)


@pytest.mark.parametrize(
    ("model", "packed", "warns"),
    [("gpt-oss-20b", (), True), ("gpt-oss-20b", ("--packed-sequences",), False), ("qwen3-30b-a3b", (), False)],
)
def test_packed_rows_of_a_model_with_sinks_are_priced_or_said(model: str, packed: tuple[str, ...], warns: bool) -> None:
    described = (*FROM_LENGTHS[2:], "--model", model, *packed, "--json", "-")
    notes = json.loads(moe_rl("rl-step", *described).out)["notes"]
    assert any("has attention sinks" in note for note in notes) == warns


def test_a_rollout_without_graphs_waits_for_its_host(tmp_path: Path) -> None:
    trace = write_npz(tmp_path / "t.npz")
    documents = [
        json.loads(moe_rl("rl-step", trace, *SETTING, *eager, "--json", "-").out)
        for eager in ((), ("--rollout-enforce-eager",))
    ]
    rollouts = [document["policies"]["static"]["parts_s"]["rollout"] for document in documents]
    assert rollouts[0] < rollouts[1]


def test_rollouts_beside_training_hide_the_shorter_side(tmp_path: Path) -> None:
    trace = write_npz(tmp_path / "t.npz")
    apart = ("--rollout-gpus", 4, "--staleness", 1, "--rollout-tokens-per-s", 1, "--json", "-")
    figures = json.loads(moe_rl("rl-step", trace, *SETTING, *apart).out)["policies"]["static"]
    parts = figures["parts_s"]
    assert figures["step_time_s"] == pytest.approx(parts["rollout"] + parts["weight_sync"])


def test_a_transport_of_one_published_sync_is_an_order_of_magnitude(tmp_path: Path) -> None:
    trace, caution = write_npz(tmp_path / "t.npz"), "Its constant comes from one published sync"
    for name, expected in (("rdma", True), ("stage-broadcast", False)):
        apart = ("--rollout-gpus", 4, "--staleness", 1, "--weight-sync-transport", name, "--json", "-")
        notes = json.loads(moe_rl("rl-step", trace, *SETTING, *apart).out)["notes"]
        assert [caution in note for note in notes if f"the weight sync by {name}: " in note] == [expected]


def test_the_trainers_gpus_have_two_names_with_a_trace_too(tmp_path: Path) -> None:
    trace = write_npz(tmp_path / "t.npz")
    asked = ("--ep", 4, "--num-experts", 8, "--policy", "moe-rl", "--batch", "recorded")
    both = [
        json.loads(moe_rl("rl-step", trace, *asked, flag, 8, "--json", "-").out) for flag in ("--gpus", "--train-gpus")
    ]
    assert both[0]["policies"] == both[1]["policies"]


@pytest.mark.parametrize(("model", "gpus", "size"), [("qwen3-30b-a3b", 32, 2), ("qwen3-30b-a3b", 6, 2),
    ("gpt-oss-20b", 8, 1), ("qwen3-235b-a22b", 128, 16)])  # fmt: skip
def test_engines_are_as_large_as_simulate_takes_them_unless_stated(model: str, gpus: int, size: int) -> None:
    """BF16 weights take at most half of an engine: 61 GB of two GPUs with 80 GB each."""
    asked = (*FROM_LENGTHS[6:12], "--model", model, "--ep", 2, "--train-gpus", gpus, "--json", "-")
    chosen, stated = (
        json.loads(moe_rl("rl-step", *asked, *more).out) for more in ((), ("--rollout-engine-size", size))
    )
    assert chosen["policies"] == stated["policies"]
    words = f"each rollout engine is taken to have {size} GPU{'s' * (size > 1)}: set --rollout-engine-size."
    assert words in chosen["notes"]
    assert not any("each rollout engine" in note for note in stated["notes"])


@pytest.mark.lengthy
def test_simulate_and_rl_step_have_the_same_parts() -> None:
    asked = (bundled_traces()["countdown-grpo"], "--ep", 8, "--policy", "static,moe-rl")
    gain = json.loads(moe_rl("simulate", *asked, "--json", "-").out)
    step = json.loads(moe_rl("rl-step", *asked, "--json", "-").out)
    said = [note for note in gain["notes"] if "whose time is predicted for engines of" in note]
    assert len(said) == 1
    for name in ("static", "moe-rl"):
        assert gain["rl_step"]["parts_s"][name] == pytest.approx(step["policies"][name]["parts_s"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens-per-rank", 4096), "an RL step cannot use --batch scaled (implied by --tokens-per-rank"),
        (("--objective", "imbalance"), "an RL step is computed from times"),
        (("--staleness", 1), "set rollout_gpus"),
        (("--log-prob-passes", 1), "an RL step consists of several passes"),
        (("--plot", "a.png"), "must end in .html"),
        (("--num-samples", 4), "--num-samples 4 only applies without a trace"),
        (("--train-gpus", 8, "--gpus", 4), "--train-gpus 8 and --gpus 4 differ: give only one."),
        (("--rollout-engine-size", 0), "--rollout-engine-size must be at least 1"),
        (("--sweep", "ep=4,8"), "must have the form NAME=VALUE,VALUE, where NAME is an option of the RL step"),
        (("--mini-batches", 0), "--mini-batches must be at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    ran = moe_rl("rl-step", write_npz(tmp_path / "t.npz"), *SETTING, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


FROM_LENGTHS = ("--model", "qwen3-30b-a3b", "--ep", 8, "--train-gpus", 32, "--num-samples", 512, "--mean-length", 3200,
                "--max-length", 4096, "--micro-batch-tokens", 4096, "--rollout-engine-size", 2)  # fmt: skip


def test_lengths_alone_make_a_step() -> None:
    figures = json.loads(moe_rl("rl-step", *FROM_LENGTHS, "--json", "-").out)["policies"]
    assert list(figures) == ["static", "forced_balance"]
    assert figures["forced_balance"]["update_speedup_vs_static"] > figures["forced_balance"]["speedup_vs_static"] > 1
    same = json.loads(moe_rl("rl-step", *FROM_LENGTHS, "--imbalance", 1, "--json", "-").out)["policies"]
    assert same["forced_balance"]["speedup_vs_static"] == 1


def test_bounds_of_several_guesses_stand_where_nobody_states_an_imbalance() -> None:
    ran = moe_rl("rl-step", *FROM_LENGTHS, "--json", "-")
    (note,) = [note for note in json.loads(ran.out)["notes"] if "there is no trace" in note]
    bounds = re.findall(r"([\d.]+)x as fast with (\d\.\d)", note)
    assert [imbalance for _, imbalance in bounds] == ["1.2", "1.5", "2.5"]
    for bound, imbalance in bounds:
        stated = json.loads(moe_rl("rl-step", *FROM_LENGTHS, "--imbalance", imbalance, "--json", "-").out)
        assert float(bound) == pytest.approx(stated["policies"]["forced_balance"]["speedup_vs_static"], abs=5e-4)
        assert not any("as fast with" in note for note in stated["notes"])


@pytest.mark.parametrize(
    ("imbalance", "title"),
    [
        (
            1.5,
            r"At most, with perfect balance: the update 1\.\d\dx and the RL step 1\.\d{3}x as fast, [\d.]+ m?s less .*",
        ),
        (1, "Balancing the update saves no time in this RL step"),
    ],
)
def test_a_step_without_a_trace_has_a_title(tmp_path: Path, imbalance: float, title: str) -> None:
    page = tmp_path / "step.html"
    ran = moe_rl("rl-step", *FROM_LENGTHS, "--imbalance", imbalance, "--html", page)
    assert re.search(title, " ".join(ran.out.split()))
    assert re.search(f"<h1>{title}</h1>", page.read_text())


def test_micro_batches_have_simulates_size_and_gpus_are_the_trainers_unless_options_say_otherwise() -> None:
    described = [*FROM_LENGTHS[:4], *FROM_LENGTHS[6:12], *FROM_LENGTHS[14:], "--json", "-"]
    figures = [
        json.loads(moe_rl("rl-step", *described, *more).out)["policies"]
        for more in (("--gpus", 32), ("--train-gpus", 32, "--micro-batch-tokens", 8192))
    ]
    assert figures[0] == figures[1]
    ran = moe_rl("rl-step", *described, "--gpus", 32, "--train-gpus", 16)
    assert "--train-gpus 16 and --gpus 32 differ" in ran.err


def test_a_sweep_prints_a_table_for_every_value() -> None:
    ran = moe_rl("rl-step", *FROM_LENGTHS, "--sweep", "mini-batches=1,4")
    assert ran.code == 2  # it prices the passes again: not an option of the RL step alone
    ran = moe_rl("rl-step", *FROM_LENGTHS, "--sweep", "finished_share=1,0.5", "--json", "-")
    points = json.loads(ran.out)["points"]
    whole, half = (points[f"finished_share={share}"]["static"]["parts_s"]["rollout"] for share in ("1", "0.5"))
    assert half < whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-samples", 0), "--num-samples must be at least 1"),
        (("--mean-length", 5000), "--mean-length 5000 is greater than --max-length 4096"),
        (("--model", "from-trace"), "needs --model when no trace is given"),
        (("--ep", 64), "does not divide the number of training GPUs (32)"),
        (("--imbalance", 0.5), "imbalance must be at least 1"),
        (("--draft-tokens", 2, "--accepted-tokens", 4), "accepted_tokens must be 1 to 3"),
        (("--rollout-precision", "fp4"), "'fp4' is unknown. Did you mean 'fp8'?"),
    ],
)
def test_lengths_that_make_no_step_are_refused(arguments: tuple[object, ...], message: str) -> None:
    ran = moe_rl("rl-step", *FROM_LENGTHS, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


STEP = (
    "--model", "qwen3-30b-a3b", "--ep", 4, "--tp", 4, "--num-samples", 64, "--mean-length", 2000,
    "--micro-batch-tokens", 8192, "--rollout-engine-size", 2,
)  # fmt: skip


def test_expert_tp_is_priced_in_the_trainer_alone_and_more_parts_are_slower() -> None:
    """Narrower products and more rows to send: the same work cannot take less time. Whole experts are the default."""
    steps = {}
    for parts in (None, 1, 2, 4):
        typed = () if parts is None else ("--expert-tensor-parallel-size", parts)
        ran = moe_rl("rl-step", *STEP, "--train-gpus", 16, *typed, "--json", "-")
        assert ran.code == 0, ran.err
        steps[parts] = json.loads(ran.out)["policies"]["static"]["parts_s"]
    assert steps[None] == steps[1]
    for part in ("update", "log_prob"):
        assert steps[1][part] < steps[2][part] < steps[4][part]
    for part in ("rollout", "weight_sync"):
        assert steps[1][part] == steps[4][part]


@pytest.mark.parametrize("flag", ["--gpus", "--train-gpus"])
def test_gpus_that_expert_tp_does_not_divide_are_refused(tmp_path: Path, flag: str) -> None:
    sizes = ("--pp", 8, "--expert-tensor-parallel-size", 4)
    ran = moe_rl("rl-step", *STEP, flag, 64, *sizes, "--json", tmp_path / "step.json")
    assert ran.code == 2
    assert f"{flag} 64 is not a multiple of 128" in ran.err
    assert "(EP 4 x expert TP 4 x PP 8). Set --expert-tensor-parallel-size 1, or other sizes." in ran.err
    assert not list(tmp_path.iterdir())
    other = moe_rl("rl-step", *STEP, flag, 24, *sizes)
    assert "is not a multiple of 128" in other.err
    assert "Set --expert-tensor-parallel-size 1" not in other.err, "EP 4 x PP 8 does not divide 24 either"


def test_an_engine_that_is_too_small_names_the_option() -> None:
    ran = moe_rl("rl-step", *STEP[2:], "--model", "qwen3-235b-a22b", "--train-gpus", 16)
    assert ran.code == 2
    assert "do not fit on 2 GPUs of h100: set a larger --rollout-engine-size." in ran.err


def test_each_list_of_fitted_models_says_which_part_it_is_of() -> None:
    ran = moe_rl("rl-step", *STEP[2:-1], 16, "--model", "qwen3-235b-a22b", "--train-gpus", 16, "--json", "-")
    assert ran.code == 0, ran.err
    (engine,) = [note for note in json.loads(ran.out)["notes"] if "DeepSeek-V3, Qwen3-30B, Qwen3-235B" in note]
    (trainer,) = [note for note in json.loads(ran.out)["notes"] if "(fitted: Qwen3-30B-A3B" in note]
    assert engine.startswith("simulated: rollout, weight sync and framework have five constants of their own")
    assert trainer.startswith("the prediction of the trainer's passes is outside the runs")


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (("--rollout-attention-size", 3), "--rollout-attention-size (3) does not divide --rollout-engine-size (2)"),
        (("--rollout-attention-size", 0), "--rollout-attention-size"),
        (("--rollout-engine-size", 3), "--rollout-engine-size (3) does not divide the number of rollout GPUs (16)"),
    ],
)
def test_an_engine_of_impossible_sizes_is_refused(typed: tuple[object, ...], sentence: str) -> None:
    ran = moe_rl("rl-step", *STEP, "--train-gpus", 16, *typed)
    assert ran.code == 2
    assert sentence in ran.err
