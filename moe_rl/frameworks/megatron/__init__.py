"""Megatron-LM, and any loop around Megatron's schedules."""
