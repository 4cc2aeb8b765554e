"""A run's settings: what is wrong is said in a sentence about the user's value, before anything is on disk."""

from pathlib import Path

import pytest

from examples.countdown.config import CountdownGrpoConfig, load_config
from examples.countdown.run import main
from moe_rl.core.errors import InvalidInputError

ROOT = Path(__file__).parents[2]
SHIPPED = [ROOT / "examples" / "countdown" / f"{name}.yaml" for name in ("grpo", "demo", "trace", "small")]


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 3\n")
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_configs_are_valid(path: Path) -> None:
    load_config(path)


def test_there_is_a_shipped_config() -> None:
    assert SHIPPED


def test_what_is_written_is_read_back(empty: Path) -> None:
    overrides = ["train.learning_rate=1e-4", "balancer.parameters={tolerance: 0.02}", "train.router_shift={floor: 0.8}"]
    config = load_config(empty, overrides)
    assert (config.seed, config.train.learning_rate, config.train.router_shift.floor) == (3, 1e-4, 0.8)
    empty.write_text(config.yaml())
    assert load_config(empty) == config


WRONG = {
    "steps=3": "unknown key 'steps'. Did you mean 'num_steps'",
    "train.lr=1": "train.lr",
    "num_steps=0": "must be at least 1, got 0",
    "num_steps=many": "key 'num_steps' must be a whole number, got 'many'",
    "train.objective=grp": "unknown objective 'grp'. Did you mean 'grpo'?",
    "train.objective_options={clip: 1}": "objective 'grpo' has no option 'clip'",
    "train.replay=r4": "key 'train.replay' must be 'R3', 'R2' or 'off'",
    "train.precision=float16": "key 'train.precision' must be 'float32' or 'bfloat16', got 'float16'",
    "rollout.precision=fp8": "'float32', 'bfloat16', 'fp8-block' or 'fp8-block-pow2', got 'fp8'",
    "balancer.recipe=fp8-block": "recipe 'fp8-block' needs `experts: grouped`",
    "checks.export_kl_limit=0": "must be greater than 0, got 0",
    "train.loss_agg_mode=mean": "unknown loss_agg_mode 'mean'",
    "train.rollout_correction={rollout_iss: token}": "Did you mean 'rollout_is'?",
    "train.rollout_correction={bypass_mode: true}": "bypass_mode cannot be set",
    "train.router_shift={floor: 2}": "must be less than or equal to 1, got 2",
    "train.micro_batch_size=7": "not a multiple of world_size x train.micro_batch_size (14)",
    "train.num_mini_batches=3": "must be a multiple of train.num_mini_batches (3)",
    "rollout.problems_per_step=3": "rollout.problems_per_step (3) must be a multiple of world_size (2)",
    "rollout.temperature=0": "must be greater than 0, got 0",
    "model.num_experts=15": "model.num_experts (15) must be a multiple of world_size (2)",
    "model.num_query_groups=3": "num_attention_heads (4) must be a multiple of num_query_groups (3)",
    "model.top_k=17": "top_k (17) exceeds num_experts (16)",
    "model.max_position_embeddings=8": "model.max_position_embeddings is 8",
    "problems.operators=^": "operators must be some of + - * /",
    "warm_start.learning_rate=-1": "learning_rate must be above 0",
    "evaluation.num_problems=1": "evaluation.num_problems (1) must be at least world_size (2)",
    "balancer.policy=ultra": "unknown policy 'ultra'. Did you mean 'ultraep'?",
    "balancer.policy=eplb": "policy 'eplb' moves homes in every pass",
    "balancer.reorder_every=1": "policy 'ultraep' never moves homes: with reorder_every, choose one of relibra, moe-rl",
    "balancer.parameters={slots: 2}": "policy 'ultraep' has no parameter 'slots'",
    "balancer.cluster=h1000": "unknown cluster 'h1000'. Did you mean 'h100'?",
    "seed": "override 'seed' is not of the form key=value",
    "seed.x=1": "'seed' is not a section",
    "seed=[": "'[' is not a YAML value",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_refused_with_a_sentence(override: str, empty: Path) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        load_config(empty, [override])
    assert WRONG[override] in str(refusal.value)


def test_reorders_without_a_balancer_are_refused() -> None:
    with pytest.raises(ValueError, match="reorder_every needs the balancer"):
        CountdownGrpoConfig.model_validate({"balancer": {"enabled": False, "policy": "relibra", "reorder_every": 1}})


def test_the_command_ends_with_exit_code_2_and_leaves_nothing(
    empty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, foreign = tmp_path / "run", tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    wrong = {
        "unknown objective 'grp'": [str(empty), "train.objective=grp", f"out={out}"],
        "there is no file": [str(tmp_path / "missing.yaml"), f"out={out}"],
        "contains ['thesis.tex'], which is not part of a run": [str(empty), f"out={foreign}"],
        "is a file: a run needs a folder": [str(empty), f"out={empty}"],
        "can be resumed or overwritten": [str(empty), f"out={out}", "--resume", "--overwrite"],
    }
    for part, arguments in wrong.items():
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        sentence = capsys.readouterr().err
        assert sentence.startswith("error: ")
        assert part in sentence
        assert sentence.count("\n") == 1
    assert not out.exists()
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]
