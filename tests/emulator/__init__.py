"""An emulator of PTX: runs what Triton compiles for Hopper and Blackwell on a CPU, against an adversarial machine.

Triton's interpreter runs what a kernel says; this runs what the compiler made of it. The only authority is NVIDIA's
"Parallel Thread Execution ISA". Start with `launch.emulated`.
"""
