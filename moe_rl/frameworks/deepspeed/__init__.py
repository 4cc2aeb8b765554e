"""DeepSpeed AutoEP."""
