"""Renamed experts are the same function: Transformers' own models give the same logits, and routes map back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strategies import model_spec
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.expert_map import ExpertMap
from moe_rl.frameworks.vllm.renaming import ExpertRenaming
from moe_rl.planner.rollout_map import permute_in_groups
from moe_rl.rollout_engines import ROLLOUT_ENGINES, encoded_map

EXPERTS, LAYERS, MOE_LAYERS, TOP_K = 8, 3, (1, 2), 2
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_experts_per_tok": TOP_K,
    "vocab_size": 64,
}
MODEL = model_spec(num_experts=EXPERTS, num_layers=LAYERS, top_k=TOP_K, moe_layer_ids=MOE_LAYERS)


def qwen() -> Any:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(num_key_value_heads=1, head_dim=16, num_experts=EXPERTS, mlp_only_layers=[0], **SHAPE)
    )


def deepseek() -> Any:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            num_key_value_heads=2,
            n_routed_experts=EXPERTS,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            **SHAPE,
        )
    )


def names_file(folder: Path, rng: np.random.Generator, *, groups: int) -> Path:
    start = ExpertMap.start(num_layers=LAYERS, moe_layer_ids=MOE_LAYERS, num_experts=EXPERTS, ep_size=2)
    made = permute_in_groups(rng.gamma(0.3, size=(6, 2, EXPERTS)), start, num_groups=groups, iterations=50)
    assert not np.array_equal(made.slots, start.slots)
    path = folder / "names.json"
    path.write_bytes(encoded_map(ROLLOUT_ENGINES["vllm-permutation"], made, path))
    return path


def routed(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """Logits, and the sorted experts [T, L, K] that the routers chose."""
    ids: list[torch.Tensor] = []

    def note(module: Any, given: Any, named: Any, _: Any) -> None:
        ids.append(named["top_k_index"] if "top_k_index" in named else given[1])

    hooks = [
        model.model.layers[layer].mlp.experts.register_forward_hook(note, with_kwargs=True) for layer in MOE_LAYERS
    ]
    with torch.no_grad():
        logits = model(tokens).logits
    for hook in hooks:
        hook.remove()
    return logits, np.stack([each.reshape(-1, TOP_K).numpy() for each in ids], axis=1)


@pytest.mark.parametrize(("make", "groups"), [(qwen, 1), (deepseek, 4)], ids=["qwen3-moe", "deepseek-v3"])
def test_a_renamed_model_is_the_same_function(make: Any, groups: int, rng: np.random.Generator, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, renamed = make().double().eval(), make().double().eval()
    for each in (model, renamed):
        each.set_experts_implementation("eager")  # grouped products have no float64
    for name, value in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            value.copy_(torch.rand(EXPERTS))
    renaming = ExpertRenaming.read(names_file(tmp_path, rng, groups=groups), MODEL)
    renamed.load_state_dict(dict(renaming.renamed(model.state_dict().items())))
    tokens = torch.randint(0, 64, (2, 12))
    logits, chosen = routed(model, tokens)
    other, names = routed(renamed, tokens)
    # Routers take their softmax or sigmoid and its sum over experts in float32, in another order; all else is float64.
    rounding = len(MOE_LAYERS) * (EXPERTS + 2) * torch.finfo(torch.float32).eps
    assert (logits - other).abs().max() <= rounding * logits.abs().max()
    assert not np.array_equal(np.sort(names), np.sort(chosen))
    assert np.array_equal(np.sort(renaming.expert_ids(names)), np.sort(chosen))


def test_experts_under_names_of_their_own_are_renamed(rng: np.random.Generator, tmp_path: Path) -> None:
    renaming = ExpertRenaming.read(names_file(tmp_path, rng, groups=1), MODEL)
    named = [
        (f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", torch.tensor([layer, expert]))
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
    ]
    for name, tensor in renaming.renamed(named):
        layer, expert = tensor.tolist()
        mine = int(name.split(".experts.")[1].split(".")[0])
        row = MOE_LAYERS.index(layer) if layer in MOE_LAYERS else None
        assert name.startswith(f"model.layers.{layer}.mlp.experts.")
        assert expert == (mine if row is None else renaming.expert_of_name[row, mine])
    untouched = [
        ("model.embed_tokens.weight", torch.ones(8, 2)),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight", torch.arange(8)),
        ("model.layers.0.mlp.gate.weight", torch.arange(8)),
    ]
    assert list(renaming.renamed(untouched)) == untouched
    unknown = np.full((1, 2, TOP_K), -1)
    assert np.array_equal(renaming.expert_ids(unknown), unknown)


def test_what_cannot_be_renamed_is_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    renaming = ExpertRenaming.read(names_file(tmp_path, rng, groups=1), MODEL)
    for name, tensor, sentence in [
        ("model.layers.1.mlp.gate.weight", torch.ones(7, 4), "not a row for each of 8 experts"),
        ("model.layers.1.mlp.gate.wg.weight", torch.ones(8, 4), "it is not known how it goes with a renaming"),
        ("model.layers.1.mlp.experts.8.up_proj.weight", torch.ones(2), "is of expert 8, the model has 8"),
    ]:
        with pytest.raises(InvalidInputError, match=sentence):
            list(renaming.renamed([(name, tensor)]))
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"physical_to_logical_map": [list(range(EXPERTS))] * LAYERS}))
    with pytest.raises(InvalidInputError, match="is a map for sglang, not a permutation for vLLM"):
        ExpertRenaming.read(path, MODEL)
