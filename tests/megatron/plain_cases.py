"""Cases of test_harness.py: plain Megatron, nothing of moe_rl but the harness."""

import tiny_gpt


def plain_training_is_repeatable() -> list[dict[str, list[float]]]:
    with tiny_gpt.parallel(ep_size=2):
        return [tiny_gpt.train(tiny_gpt.build(), steps=4, micro_batches=2) for _ in range(2)]
