"""One module per framework: recognize its runs, and say its settings in Megatron's words."""
