"""Cases of test_public_recipes.py: what `attach` says of a tiny model with the options of each public recipe."""

import standins  # noqa: F401, I001 - before Megatron

import dataclasses
import inspect

import tiny_gpt
import torch
from attach_cases import refusal
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from benchmarks.public_recipes import Recipe, recipes
from moe_rl.megatron import BalancerConfig, attach

NOT_BUILT = {"use_transformer_engine_op_fuser", "moe_mlp_glu_interleave_size"}
"""Options of a module that the stand-ins lack."""
FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)} - NOT_BUILT
LATER_PATTERN = "hybrid_layer_pattern"
PATTERN = LATER_PATTERN if LATER_PATTERN in inspect.signature(MambaModel).parameters else "hybrid_override_pattern"
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}


def built(recipe: Recipe) -> tiny_gpt.Run:
    """A tiny model with these options; those that this Megatron cannot build with are set on the finished one."""
    config = {**recipe.effective["config"], **recipe.model}
    later = {name: config.pop(name) for name in list(config) if name not in FIELDS}
    run = tiny_gpt.build(tiny_gpt.te_spec, **BF16, **config, **recipe.effective["ddp"])
    for name, value in later.items():
        setattr(run.config, name, value)
    return run


def hybrid() -> list[int]:
    """Which layers are planned, and how many, of a hybrid model as Nemotron is: attention, MoE, attention, MoE."""
    with tiny_gpt.parallel(2):
        model_parallel_cuda_manual_seed(1)
        model = MambaModel(
            tiny_gpt.config(num_layers=4, moe_grouped_gemm=True),
            mamba_stack_spec,
            vocab_size=tiny_gpt.VOCABULARY,
            max_sequence_length=tiny_gpt.SEQUENCE,
            **{PATTERN: "*E*E"},
        )
        balancer = attach([model], None, BalancerConfig())
        return [*balancer.model.moe_layer_ids, balancer.model.num_moe_layers]


def verdicts() -> dict[str, str]:
    """By recipe, the sentence with which `attach` refuses it; empty where it accepts it."""
    found = {}
    with tiny_gpt.parallel(2):
        for recipe in recipes():
            found[recipe.name] = refusal(lambda recipe=recipe: attached(built(recipe)))
    return found


def attached(run: tiny_gpt.Run) -> None:
    attach(run.models, run.optimizer, BalancerConfig()).detach()
