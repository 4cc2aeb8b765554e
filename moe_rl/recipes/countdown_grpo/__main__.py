"""`python -m moe_rl.recipes.countdown_grpo CONFIG.yaml [section.key=value ...]`."""

from moe_rl.recipes.countdown_grpo.run import main

if __name__ == "__main__":
    main()
