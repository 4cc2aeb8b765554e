"""Kernel names as the tools print them, each with what it does."""

import pytest

from moe_rl.profiling.kernel_classes import COMMUNICATION, classify_kernel

NAMES = {
    "dispatch": [
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*, long*)",
        "void deep_ep::internode::notify_dispatch<false, 4>(int const*, int*, int)",
        "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, void*)",
        "void hybrid_ep::dispatch_kernel<__nv_bfloat16, 4, 8>(hybrid_ep::dispatch_kernel_param_t)",
        "void dpsk::ep::intranode::dispatch<8>(int4*)",
    ],
    "combine": [
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*)",
        "void hybrid_ep::combine_kernel<4, 8>(hybrid_ep::combine_kernel_param_t)",
    ],
    "all_to_all": [
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllToAll_RING_LL",
        "c10d::alltoall_base_",
    ],
    "collective": [
        "c10d::allreduce_",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
    ],
    "expert_gemm": [
        "void deep_gemm::sm90_m_grouped_fp8_gemm_1d2d_impl<1536u, 4096u>",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<>>>",
        "fused_moe_kernel",
    ],
    "permute": ["_permute_kernel", "void moe_permute_topK_kernel<__nv_bfloat16>", "_unpermute_kernel"],
    "attention": ["flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", "void fmha_cutlassF_bf16_aligned_64x128"],
    "optimizer": ["void at::native::multi_tensor_apply_kernel<AdamFunctor<float>>"],
    "quantize": ["void transformer_engine::detail::cast_transpose_kernel<>", "_per_token_cast_to_fp8"],
    "activation": ["void swiglu_kernel<__nv_bfloat16>", "triton_poi_fused_silu_mul_0"],
    "norm": ["void rms_norm_kernel<c10::BFloat16>", "ln_fwd_layernorm_kernel"],
    "router": ["void topk_softmax_kernel<8, 128>", "fused_topk_with_score_function_forward_kernel"],
    "dense_gemm": [
        "nvjet_tst_128x256_64x4_2x1_v_bz_gemm_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int>",
        "aten::addmm",
    ],
    "copy": ["Memcpy DtoH (Device -> Pinned)", "aten::copy_"],
    "other": ["vectorized_elementwise_kernel", "my_private_thing"],
}


@pytest.mark.parametrize(("expected", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_kernel_is_filed_where_it_belongs(expected: str, name: str) -> None:
    assert classify_kernel(name) == expected


def test_deepep_counts_as_communication_without_an_nccl_prefix() -> None:
    assert classify_kernel("void deep_ep::intranode::combine<8>()") in COMMUNICATION
    assert classify_kernel("sm90_m_grouped_fp8_gemm") not in COMMUNICATION
