"""Quantization to E4M3 with fp32 scales: 1 x 128, 128 x 128, one scale per row, and 128 x 1 with a transpose."""
