"""Configuration: names, files, Hugging Face configs; every constant has a source and every wrong key a sentence."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_rl.config import (
    ASSUMED_SHAPE,
    CONFIGS,
    LoadedModel,
    cluster_names,
    cluster_num_nodes,
    cluster_yaml,
    load_cluster,
    load_model,
    model_from_trace,
    model_names,
    override_model,
)
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import NO_CONSTANT, HardwareSpec
from moe_rl.huggingface import FAMILIES, read_hugging_face_config


@pytest.mark.parametrize("name", cluster_names())
def test_every_constant_of_a_cluster_names_its_source(name: str) -> None:
    hardware = load_cluster(name)
    constants = {field.name for field in fields(HardwareSpec)} - set(NO_CONSTANT)
    assert set(hardware.sources) == constants
    assert all(len(source) > 10 for source in hardware.sources.values())


@pytest.mark.parametrize("name", model_names())
def test_every_model_says_where_its_numbers_come_from(name: str) -> None:
    loaded = load_model(name)
    assert loaded.origin.startswith("https://")
    assert loaded.spec.num_moe_layers >= 1


def test_models_are_found_by_any_of_their_names_in_any_case() -> None:
    names = ("qwen3-30b-a3b", "Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "QWEN/QWEN3-30B-A3B")
    assert {load_model(name).spec for name in names} == {load_model("qwen3-30b-a3b").spec}


def test_no_two_models_share_a_name() -> None:
    names = []
    for stem in model_names():
        content = yaml.safe_load((CONFIGS / "models" / f"{stem}.yaml").read_text())
        names += sorted({stem, content["name"].lower(), *(name.lower() for name in content["hugging_face"])})
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("load", "name", "expected"),
    [
        (load_model, "gpt-oss-21b", "Did you mean 'gpt-oss-20b'?"),
        (load_cluster, "h1000", "Did you mean 'h100'?"),
        (load_cluster, "tpu", "Known: a100, b200, b300, b300-efa, gb200, gb300, h100, h100-efa, h20, h200, h800."),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(load: Any, name: str, expected: str) -> None:
    with pytest.raises(InvalidInputError, match="unknown") as error:
        load(name)
    assert expected in str(error.value)


def write_yaml(path: Path, content: object) -> str:
    path.write_text(yaml.safe_dump(content))
    return str(path)


def cluster_content() -> dict[str, Any]:
    content = yaml.safe_load((CONFIGS / "clusters" / "h100.yaml").read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nvlink_gb_per_sec": {"value": 1.0, "source": "x"}}, "Did you mean 'nvlink_gb_per_s'?"),
        ({"rdma_gb_per_s": {"value": -1.0, "source": "x"}}, "rdma_gb_per_s must be positive, got -1.0."),
        ({"rdma_gb_per_s": 43.0}, "key 'rdma_gb_per_s'"),
        ({"rdma_gb_per_s": {"value": 43.0}}, "key 'rdma_gb_per_s.source' is missing."),
        ({"ranks_per_node": {"value": "eight", "source": "x"}}, "key 'ranks_per_node.value'"),
    ],
)
def test_a_wrong_cluster_file_is_named_in_one_sentence(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    path = write_yaml(tmp_path / "mine.yaml", cluster_content() | change)
    with pytest.raises(InvalidInputError) as error:
        load_cluster(path)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_cluster_file_may_say_how_many_nodes_there_are(tmp_path: Path) -> None:
    assert cluster_num_nodes("h100") is None
    sized = cluster_content() | {"num_nodes": {"value": 20, "source": "our cluster"}}
    path = write_yaml(tmp_path / "mine.yaml", sized)
    assert cluster_num_nodes(path) == 20
    assert load_cluster(path) == load_cluster("h100")
    (tmp_path / "again.yaml").write_text(cluster_yaml(load_cluster(path), num_nodes=20))
    assert cluster_num_nodes(str(tmp_path / "again.yaml")) == 20
    with pytest.raises(InvalidInputError, match="num_nodes must be at least 1"):
        load_cluster(write_yaml(tmp_path / "none.yaml", sized | {"num_nodes": {"value": 0, "source": "none"}}))


def test_a_cluster_file_of_ones_own_is_read(tmp_path: Path) -> None:
    mine = cluster_content() | {"name": "mine", "rdma_gb_per_s": {"value": 86.0, "source": "two NICs per GPU"}}
    hardware = load_cluster(write_yaml(tmp_path / "mine.yaml", mine))
    assert (hardware.rdma_gb_per_s, hardware.sources["rdma_gb_per_s"]) == (86.0, "two NICs per GPU")


def test_a_cluster_repeats_only_what_differs_from_the_one_that_it_is_like(tmp_path: Path) -> None:
    mine = {"name": "mine", "like": "H200", "rdma_gb_per_s": {"value": 86.0, "source": "two NICs per GPU"}}
    hardware, h200 = load_cluster(write_yaml(tmp_path / "mine.yaml", mine)), load_cluster("h200")
    assert replace(hardware, name="h200", rdma_gb_per_s=h200.rdma_gb_per_s, sources=h200.sources) == h200
    assert hardware.sources["rdma_gb_per_s"] == "two NICs per GPU"
    assert hardware.sources["hbm_gib"] == f"assumed: as on H200: {h200.sources['hbm_gib']}"
    for like in ("h1000", 3, ["h100"]):
        with pytest.raises(InvalidInputError, match="'like' must be the name of another cluster"):
            load_cluster(write_yaml(tmp_path / "mine.yaml", mine | {"like": like}))


@pytest.mark.parametrize("content", ["a: [1", "- 1", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=r"broken\.yaml"):
        load_model(str(path))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"there is no file nowhere/mine\.yaml"):
        load_cluster("nowhere/mine.yaml")


def from_trace(**given: int) -> LoadedModel:
    return model_from_trace(name="mine", moe_layer_ids=(1, 2, 3), num_experts=16, top_k=2, overrides=given)


def test_a_model_from_the_trace_lists_what_it_assumes() -> None:
    loaded = from_trace(hidden_size=1024)
    assert loaded.spec.hidden_size == 1024
    assert (loaded.spec.num_layers, loaded.spec.num_experts, loaded.spec.top_k) == (4, 16, 2)
    assert set(loaded.spec.assumed_fields) == set(ASSUMED_SHAPE) - {"hidden_size"}
    assert all(field in loaded.assumptions[0] for field in loaded.spec.assumed_fields)


def test_a_model_from_the_trace_with_every_width_assumes_nothing() -> None:
    assert from_trace(**ASSUMED_SHAPE).assumptions == ()


def test_options_override_a_model_and_are_reported() -> None:
    loaded = override_model(load_model("deepseek-v3"), {"num_layers": 5, "hidden_size": 7168})
    assert loaded.spec.moe_layer_ids == (3, 4)
    assert loaded.assumptions[-1] == "set by options: num_layers 5"


TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0, 3],
        "head_dim": 16,
    },
    "qwen3_next": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "deepseek_v2": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
        "n_shared_experts": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "n_group": 4,
        "topk_group": 2,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "head_dim": 16,
    },
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 4,
        "moe_layer_interval": 2,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


def write_config(tmp_path: Path, content: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_a_hugging_face_config_is_read_as_transformers_builds_the_model(tmp_path: Path, family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    content = TINY | {"model_type": family} | FAMILY_CONFIGS[family]
    spec, _ = read_hugging_face_config(write_config(tmp_path, content) / "config.json")
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**content)
        layers = transformers.AutoModelForCausalLM.from_config(config).model.layers
    experts = {
        index: parameters
        for index, layer in enumerate(layers)
        if (parameters := [(n, p) for n, p in layer.named_parameters() if "experts." in n and "shared" not in n])
    }
    assert tuple(experts) == spec.moe_layer_ids
    matrices = [p for n, p in experts[spec.moe_layer_ids[0]] if "bias" not in n]
    assert sum(p.numel() for p in matrices) == spec.num_experts * spec.expert_params
    shared = [p for n, p in layers[spec.moe_layer_ids[0]].named_parameters() if "shared_expert" in n and p.shape[0] > 1]
    assert sum(p.numel() for p in shared) == 3 * spec.hidden_size * spec.shared_expert_ffn_hidden_size


def test_every_listed_family_without_a_transformers_class_says_so() -> None:
    assert set(FAMILIES) - set(FAMILY_CONFIGS) == {
        "kimi_k2",
        "glm4_moe_lite",
        "qwen3_vl_moe_text",
        "qwen3_5_moe_text",
        "glm4v_moe_text",
        "deepseek_v32",
        "nemotron_h",
    }


def test_glm4_moe_lite_lists_its_layer_kinds(tmp_path: Path) -> None:
    content = TINY | FAMILY_CONFIGS["deepseek_v3"] | {"model_type": "glm4_moe_lite"}
    content["mlp_layer_types"] = ["dense", "sparse", "dense", "sparse", "sparse"]
    spec, _ = read_hugging_face_config(write_config(tmp_path, content) / "config.json")
    assert spec.moe_layer_ids == (1, 3, 4)


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({"model_type": "mixtral", "sliding_window": 64}, 5),
        ({"model_type": "mixtral", "sliding_window": None}, 0),
        (
            {"model_type": "gpt_oss", "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 3},
            3,
        ),
        ({"model_type": "qwen3_moe", "sliding_window": 64, "use_sliding_window": False}, 0),
    ],
)
def test_layers_with_a_window_are_counted(tmp_path: Path, given: dict[str, Any], layers: int) -> None:
    content = TINY | {"num_hidden_layers": 5} | FAMILY_CONFIGS[given["model_type"]] | given
    spec, _ = read_hugging_face_config(write_config(tmp_path, content) / "config.json")
    assert (spec.sliding_window, spec.num_sliding_window_layers) == (64 if layers else 0, layers)


def test_layers_of_linear_attention_are_priced_as_a_window_and_said_so(tmp_path: Path) -> None:
    """The keys of Qwen3-Next's config.json give the shape that the named model has."""
    content = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    named = load_model("qwen3-next-80b-a3b").spec
    for said in ({"full_attention_interval": 4}, {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 12}):
        read = load_model(str(write_config(tmp_path, content | said)))
        assert replace(read.spec, name=named.name) == named
        assert "Linear attention" in read.assumptions[0]


@pytest.mark.parametrize(
    ("model", "content"),
    [
        (
            "kimi-k2",
            {"model_type": "kimi_k2", "num_hidden_layers": 61, "n_routed_experts": 384, "num_experts_per_tok": 8,
             "hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432, "n_shared_experts": 1,
             "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "v_head_dim": 128, "n_group": 1,
             "qk_rope_head_dim": 64, "q_lora_rank": 1536,
             "topk_group": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840},
        ),
        (
            "glm-4.5",
            {"model_type": "glm4_moe", "num_hidden_layers": 92, "n_routed_experts": 160, "num_experts_per_tok": 8,
             "hidden_size": 5120, "moe_intermediate_size": 1536, "intermediate_size": 12288, "n_shared_experts": 1,
             "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "num_attention_heads": 96,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552},
        ),
        (
            "minimax-m2",
            {"model_type": "minimax_m2", "num_hidden_layers": 62, "num_local_experts": 256, "num_experts_per_tok": 8,
             "hidden_size": 3072, "intermediate_size": 1536, "shared_intermediate_size": 0, "num_attention_heads": 48,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 200064},
        ),
    ],
)  # fmt: skip
def test_a_named_model_has_the_shape_that_the_keys_of_its_own_config_give(
    tmp_path: Path, model: str, content: dict[str, Any]
) -> None:
    named = load_model(model).spec
    assert replace(load_model(str(write_config(tmp_path, content))).spec, name=named.name) == named


def test_latent_attention_has_the_projections_of_its_own_config(tmp_path: Path) -> None:
    content = TINY | {"model_type": "kimi_k2"} | FAMILY_CONFIGS["deepseek_v3"]
    loaded = load_model(str(write_config(tmp_path, content)))
    assert (loaded.spec.num_query_groups, loaded.spec.kv_channels) == (loaded.spec.num_attention_heads, 24)
    assert loaded.assumptions == ()
    deepseek = load_model("deepseek-v3").spec  # q_a, q_b, kv_a, kv_b, o
    low, heads = (1536, 512 + 64), 128
    assert deepseek.attention_params == (
        7168 * low[0] + low[0] * heads * 192 + 7168 * low[1] + 512 * heads * 256 + heads * 128 * 7168
    )
    assert deepseek.key_value_channels == heads * (192 + 128)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3", "glm-4.5-air"])
def test_a_named_model_equals_the_defaults_that_transformers_ships_for_its_family(tmp_path: Path, model: str) -> None:
    transformers = pytest.importorskip("transformers")
    family = {
        "qwen3-30b-a3b": "qwen3_moe",
        "gpt-oss-120b": "gpt_oss",
        "deepseek-v3": "deepseek_v3",
        "glm-4.5-air": "glm4_moe",
    }[model]
    content = transformers.AutoConfig.for_model(family).to_dict()
    if family == "qwen3_moe":
        content |= {"num_hidden_layers": 48, "head_dim": 128}  # the class defaults to 24 layers
    if family == "glm4_moe":
        content |= {"head_dim": 128}  # absent from the class, present in the model's config.json
    content.pop("_name_or_path", None)
    spec, _ = read_hugging_face_config(write_config(tmp_path, json.loads(json.dumps(content))) / "config.json")
    named = load_model(model).spec
    differing = {f.name for f in fields(spec) if getattr(spec, f.name) != getattr(named, f.name)}
    assert differing == {"name"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model_type": "qwen3moe"}, "Did you mean 'qwen3_moe'?"),
        ({"model_type": "llama"}, "moe_rl does not know which layers are MoE layers in model_type 'llama'"),
        ({"model_type": "mixtral", "num_hidden_layers": 4}, "must have one of the keys num_experts, num_local_experts"),
        ({"model_type": "mixtral", "num_hidden_layers": "4"}, "num_hidden_layers must be a whole number, got '4'."),
    ],
)
def test_a_config_json_that_cannot_be_used_is_explained(tmp_path: Path, content: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        load_model(str(write_config(tmp_path, content)))
    assert expected in str(error.value)


def test_a_truncated_config_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mix')
    with pytest.raises(InvalidInputError, match=r"cannot be read as a config\.json"):
        load_model(str(tmp_path))


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    text = TINY | {"model_type": "qwen3_moe"} | FAMILY_CONFIGS["qwen3_moe"]
    spec = load_model(str(write_config(tmp_path, {"model_type": "some_vl", "text_config": text}))).spec
    assert spec.num_experts == 8


def test_a_hybrid_of_mamba_and_experts_is_read_mixer_by_mixer(tmp_path: Path) -> None:
    """Nemotron 3 Nano: 23 Mamba-2 and MoE layers, 6 of attention, about 30 B parameters (NVIDIA's model page)."""
    content = {
        "model_type": "nemotron_h",
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 3712,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 131072,
    }
    read = load_model(str(write_config(tmp_path, content)))
    spec = read.spec
    assert (spec.num_layers, spec.num_moe_layers, spec.num_sliding_window_layers) == (29, 23, 23)
    assert spec.num_expert_matrices == 2
    assert 28e9 < spec.num_moe_layers * spec.num_experts * spec.expert_params < 32e9
    assert "Mamba" in read.assumptions[0]
    with pytest.raises(InvalidInputError, match="no mixer is followed by experts"):
        load_model(str(write_config(tmp_path, content | {"hybrid_override_pattern": "M-M*"})))


def test_sparse_attention_is_priced_as_a_window_and_said_so(tmp_path: Path) -> None:
    """DeepSeek-V3.2 is DeepSeek-V3 whose tokens attend to 2048 others."""
    named = load_model("deepseek-v3").spec
    content = {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "index_topk": 2048,
    }
    read = load_model(str(write_config(tmp_path, content)))
    expected = replace(named, name=read.spec.name, sliding_window=2048, num_sliding_window_layers=61)
    assert read.spec == expected
    assert any("index_topk" in sentence for sentence in read.assumptions)


def test_a_cluster_file_names_its_fabric_and_keeps_the_sources_of_the_same_nodes(tmp_path: Path) -> None:
    """Nodes of H100 over EFA: only the network's constants differ, and nothing else becomes an assumption."""
    efa = load_cluster(write_yaml(tmp_path / "mine.yaml", {"name": "mine", "like": "h100", "fabric": "efa"}))
    h100 = load_cluster("h100")
    of_network = {name for name in h100.sources if getattr(efa, name) != getattr(h100, name)}
    assert of_network == {"rdma_gb_per_s", "flat_rdma_gb_per_s", "inter_node_latency_us"}
    assert {name for name in h100.sources if efa.sources[name] != h100.sources[name]} == of_network
    assert replace(efa, name="h100-efa") == load_cluster("h100-efa")
    (tmp_path / "again.yaml").write_text(cluster_yaml(efa))
    assert load_cluster(str(tmp_path / "again.yaml")) == efa


def test_a_cluster_file_pools_the_nics_of_its_nodes_and_is_not_asked_to(tmp_path: Path) -> None:
    pooled = {"name": "mine", "like": "h100", "pooled_nics": {"value": 1, "source": "4 NICs for 8 GPUs"}}
    assert load_cluster(write_yaml(tmp_path / "mine.yaml", pooled)).pooled_nics == 1
    assert load_cluster("h100").pooled_nics == 0
    own = cluster_content()
    own.pop("pooled_nics")
    assert load_cluster(write_yaml(tmp_path / "own.yaml", own | {"name": "own"})).pooled_nics == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"fabric": "eaf"}, "the constants of the fabric 'eaf' are not known for these GPUs. Did you mean 'efa'?"),
        (
            {"fabrics": {"roce": {"hbm_gb_per_s": {"value": 1.0, "source": "x"}}}},
            "the constant 'hbm_gb_per_s' of a fabric is unknown",
        ),
    ],
)
def test_an_unknown_fabric_is_refused(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    path = write_yaml(tmp_path / "mine.yaml", {"name": "mine", "like": "h100"} | change)
    with pytest.raises(InvalidInputError) as error:
        load_cluster(path)
    assert expected in str(error.value)
