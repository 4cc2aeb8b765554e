"""The purpose of a GPU kernel (or, in a recording without a GPU, of an operator), told from its name.

Common tools recognize communication by an "nccl" prefix and so file DeepEP and HybridEP kernels as compute. The table
below is ordered: the first pattern that matches decides. A kernel that no pattern knows is "other", never a guess.
"""

import re

COMMUNICATION = frozenset({"dispatch", "combine", "all_to_all", "collective"})

# Namespaces and file names of DeepEP, HybridEP and UltraEP in demangled kernels.
_EP_LIBRARY = r"(deep_ep|dpsk::ep|hybrid_ep|hybridep|ultra_ep|internode|intranode)"
_TABLE = (
    ("dispatch", rf"{_EP_LIBRARY}.*(dispatch|notify|get_dispatch_layout|metadata_preprocess)"),
    ("combine", rf"{_EP_LIBRARY}.*combine"),
    ("all_to_all", r"(nccl|c10d|gloo).*(alltoall|all_to_all|sendrecv)"),
    ("collective", r"nccl|c10d::|gloo:|reduce_scatter_kernel|all_gather_kernel|all_reduce_kernel"),
    ("expert_gemm", r"m_grouped|k_grouped|grouped_gemm|groupedgemm|grouped_mm|group_gemm|cutlass.*group|fused_moe"),
    ("permute", r"permute|expand_input|moe_sort|sort_chunks"),
    ("attention", r"flash|fmha|attention|cudnn.*sdpa"),
    ("optimizer", r"adam|multi_tensor|l2norm|optimizer"),
    ("quantize", r"quantiz|cast_transpose|per_token_cast|per_block_cast|fp8_cast|scale_inv"),
    ("activation", r"swiglu|silu|gelu|glu_kernel"),
    ("norm", r"rms_?norm|layer_?norm|norm_kernel"),
    ("router", r"top_?k|router|gating|softmax"),
    ("dense_gemm", r"gemm|cublas|cutlass|wgmma|matmul|\bmm\b|addmm|bmm"),
    ("copy", r"memcpy|memset|copy_kernel|\bcopy_\b"),
)
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _TABLE)


def classify_kernel(kernel_name: str) -> str:
    """Return the class of a kernel by its (demangled) name; one of `COMMUNICATION` moves data between ranks."""
    for name, pattern in _COMPILED:
        if pattern.search(kernel_name):
            return name
    return "other"
