"""A stand-in of TransformerEngine in plain torch, so that Megatron's own code that needs it runs on a CPU.

Nothing of the real package is in it. It follows the interface that TransformerEngine's user guide documents, release
2.10 (https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html; every module here names its
page), as far as Megatron-Core asks for it, and where real memory would be undefined it holds NaN. Its numbers and its
speed say nothing about the real package's, and no test on a CPU can say whether the release that you run does the same.
What it leaves out (tensor parallelism, Userbuffers, CPU offload, CUDA graphs) raises `NotImplementedError`.
"""

from transformer_engine import common, pytorch  # Megatron writes transformer_engine.common.recipe, te.pytorch.Linear

__all__ = ["common", "pytorch"]
__version__ = "2.10.0"
