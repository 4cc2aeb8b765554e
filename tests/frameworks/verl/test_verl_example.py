"""The launch script of examples/verl sets what verl's own configuration has, and the doctor lets it attach."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_runner import moe_rl

SCRIPT = Path(__file__).parents[3] / "examples" / "verl" / "run_qwen3_30b_a3b.sh"


def test_the_doctor_lets_it_attach() -> None:
    said = moe_rl("doctor", "--no-environment", SCRIPT, "--attach")
    assert said.code == 0
    assert "verdict: attaches" in said.out


@pytest.mark.framework
def test_verl_knows_every_override(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir

    python = tmp_path / "python3"  # in the place of the one that would start verl
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "/data"}
    said = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=True).stdout
    module, *overrides = said.splitlines()[1:]
    spec = find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    with initialize_config_dir(str(Path(spec.origin).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides)
    assert module == "verl.trainer.main_ppo"
    assert config.actor_rollout_ref.actor.megatron.router_replay.mode == "R3"
    assert config.algorithm.rollout_correction.rollout_is == "moe_rl_sequence"
