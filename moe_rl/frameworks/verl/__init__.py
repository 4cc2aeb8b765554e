"""verl, with its Megatron engine."""
