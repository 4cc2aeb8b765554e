"""Record which experts a Hugging Face MoE model routes to while it generates, and write a trace for `moe-rl simulate`.

    python examples/record_hf.py run.moetrace                       # a tiny Qwen3-MoE with random weights
    python examples/record_hf.py run.moetrace --model /path/to/model

Needs the packages of `pip install '.[hf]'`.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_rl
from moe_rl.replay.hf_recorder import record_routing


def tiny_model() -> Qwen3MoeForCausalLM:
    """Four MoE layers of 16 experts, top-4."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=4,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    """Generate from random prompts in batches, each of them a training step, and write what the routers chose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="trace to write, e.g. run.moetrace")
    parser.add_argument("--model", help="folder or id of a Hugging Face model; a tiny random one without it")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()

    model: PreTrainedModel = (
        AutoModelForCausalLM.from_pretrained(arguments.model) if arguments.model else tiny_model()
    ).eval()
    prompts = torch.randint(1, model.config.vocab_size, (arguments.sequences, 16))
    with record_routing(model) as recorder:
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=arguments.new_tokens, do_sample=True
        )
    trace = recorder.trace(model=arguments.model or "tiny-qwen3-moe")
    moe_rl.open_trace(trace).save(arguments.target)
    print(
        f"{trace.num_sequences} sequences, {trace.num_tokens} tokens, {trace.num_layers} MoE layers: {arguments.target}"
    )


if __name__ == "__main__":
    main()
