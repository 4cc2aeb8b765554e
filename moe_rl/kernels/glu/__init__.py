"""Gated activations of expert MLPs: SwiGLU and the clamped form of gpt-oss, times probability, quantized or not."""
