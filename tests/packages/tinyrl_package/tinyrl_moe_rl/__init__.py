"""moe_rl inside tinyrl."""
