"""The documentation's example runs as printed, and its tables name what exists."""

import dataclasses
import importlib
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from benchmarks.make_tables import BLOCK, renewed
from moe_rl.frameworks.verl import losses as verl
from moe_rl.importance import (
    LOSS_AGG_MODES,
    OBJECTIVES,
    ROLLOUT_PRESETS,
    PolicyLossInputs,
    RouterTap,
    shift_to_predicted,
)
from moe_rl.importance.objectives.base import Level, Widths

PAGE = Path(__file__).parents[2] / "docs" / "importance.md"


def test_the_example_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    grad = names["log_prob"].grad  # type: ignore[attr-defined]
    assert isinstance(grad, torch.Tensor)
    assert grad.isfinite().all()
    kept = names["kept"]
    assert isinstance(kept, torch.Tensor)
    assert torch.equal(grad[~kept], torch.zeros_like(grad[~kept]))
    # Group 2 has equal rewards and so no gradient; group 1 has one.
    assert grad[:2].abs().sum() > 0
    assert grad[2:].abs().sum() == 0
    assert re.search(r"gamma 0\.9\d\d", capsys.readouterr().out)


def capture_lines(framework: str) -> str:
    """The lines of the page's section on capturing the router that are for one framework."""
    section = PAGE.read_text().split("### Capturing the router")[1].split("\n## ")[0]
    named = re.search(rf"{framework}[^\n]*:\n\n```text\n(.*?)```", section, flags=re.DOTALL)
    assert named is not None
    return named[1]


class Engine(torch.nn.Module):
    """A small Qwen3-MoE whose weights move between two passes; beside it a stand-in of verl's engine."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 8}
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(vocab_size=32, head_dim=8, **sizes, **experts)
        self.model = transformers.Qwen3MoeForCausalLM(config)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.module, self.passes = [self.model], 0

    def forward(self, tokens: Tensor) -> Any:
        if self.passes:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter += 0.03 * torch.randn_like(parameter)
        self.passes += 1
        return self.model(tokens)

    def forward_backward_batch(self, data: Tensor, loss: Any, forward_only: bool) -> None:
        with torch.no_grad():
            self(data)


@pytest.mark.lengthy
def test_the_lines_for_transformers_run_as_printed() -> None:
    names = {"RouterTap": RouterTap, "shift_to_predicted": shift_to_predicted, "torch": torch}
    names |= {"model": Engine(), "tokens": torch.randint(32, (3, 5)), "B": 3, "S": 5}
    exec(capture_lines("Transformers"), names)
    gamma = names["gamma"]
    assert gamma.shape == (3, 5)
    assert torch.equal(gamma[:, 0], torch.ones(3))  # the first token is predicted by nothing
    assert (gamma[:, 1:] < 0.999).any()
    assert names["logits"].requires_grad


def registry_of_verl() -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    """verl's own (register_policy_loss, get_policy_loss_fn), or where it is not installed a stand-in of the two."""
    try:
        algos = importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError:
        known: dict[str, Any] = {}
        return lambda name: lambda loss: known.setdefault(name, loss), known.__getitem__
    return algos.register_policy_loss, algos.get_policy_loss_fn


@pytest.mark.lengthy
def test_the_lines_for_verl_run_as_printed() -> None:
    engine, tokens = Engine(), torch.randint(32, (3, 5))
    register, registered = registry_of_verl()
    names = {"RouterTap": RouterTap, "verl": verl, "engine": engine, "data": tokens, "compute_log_prob": None}
    names |= {"register_policy_loss": register, "rows_of": lambda rows, like: shift_to_predicted(rows.view(3, 5))}
    exec(capture_lines("verl"), names)
    with names["tap"].update_pass(names["old"]) as update:
        names["update"] = update
        log_prob = engine(tokens).logits.log_softmax(dim=-1).amax(dim=-1)
        arguments = (log_prob.detach(), log_prob, torch.full((3, 5), -1.0), torch.ones(3, 5))
        loss, metrics = registered("moe_rl_ppo")(*arguments)
    assert loss.requires_grad
    assert 0.5 < metrics["router_corr/gamma_mean"] < 0.999


@pytest.mark.lengthy
def test_the_lines_for_slime_run_as_printed() -> None:
    engine, given = Engine(), {}
    tokens = torch.randint(32, (1, 9))  # two samples packed: 5 and 4 tokens, of which 3 and 2 are the response
    tap = RouterTap(engine)
    with torch.no_grad(), tap.old_pass() as old:
        engine(tokens)

    def policy_loss_function(args: Any, batch: dict[str, Any], logits: Tensor, reduce: Any) -> str:
        given.update(batch)
        return "loss"

    with torch.no_grad(), tap.update_pass(old, forwards=[0, 0]) as update:
        engine(tokens)
        names = {"update": update, "accumulate": accumulate, "policy_loss_function": policy_loss_function}
        exec(capture_lines("slime"), names)
        batch = {"total_lengths": [5, 4], "response_lengths": [3, 2]}
        assert names["loss"](None, batch, torch.zeros(1), None) == "loss"
        engine.model(tokens)  # the same weights once more
        rows = update.finish().ratio
    assert (rows < 0.999).any()
    # The rows of the positions that predict the response tokens.
    assert [each.tolist() for each in given["router_shift_ratio"]] == [rows[1:4].tolist(), rows[6:8].tolist()]


def test_the_table_of_objectives_is_what_the_registry_says() -> None:
    text = PAGE.read_text()
    assert BLOCK.sub(renewed, text) == text, "run: make tables"


def test_every_objective_declares_its_facts() -> None:
    known = {field.name for field in dataclasses.fields(PolicyLossInputs)}
    for entry in OBJECTIVES:
        assert entry.formula
        assert entry.source
        assert set(entry.needs) <= known
        assert entry.default_loss_agg_mode in LOSS_AGG_MODES
        assert entry.ratio_level in get_args(Level)
        assert entry.widths in get_args(Widths)


def test_the_presets_on_the_page_exist() -> None:
    named = set(re.findall(r"`((?:decoupled|bypass)_(?!ppo`|policy)\w+)`", PAGE.read_text()))
    assert len(named) > 5
    assert named <= set(ROLLOUT_PRESETS)
