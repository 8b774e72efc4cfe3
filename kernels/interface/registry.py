"""The backends of each seam by name, best first, and the place of each class.

A new backend is its file and a line here. Imports no backend, so that the configuration can list the names without
torch.
"""

from importlib import import_module
from typing import Any

ALL2ALL = {
    "local": "kernels.all2all.local.LocalAllToAll",
    "shm": "kernels.all2all.shm.ShmAllToAll",
    "hierarchical": "kernels.all2all.hierarchical.HierarchicalAllToAll",
    "copy_engine": "kernels.all2all.copy_engine.CopyEngineAllToAll",
    "allgather": "kernels.all2all.allgather.AllGatherAllToAll",
    "torch_dist": "kernels.all2all.torch_dist.TorchDistAllToAll",
    "symm": "kernels.all2all.symm.SymmAllToAll",
    "deepep": "kernels.all2all.deepep.DeepEpAllToAll",
    "deepep_hosts": "kernels.all2all.deepep_hosts.DeepEpHostsAllToAll",
    "deepep_low_latency": "kernels.all2all.deepep_low_latency.DeepEpLowLatencyAllToAll",
}
GROUPED_GEMM = {
    "deepgemm_fp8": "kernels.grouped_gemm.deepgemm.DeepGemmFp8",
    "triton_four_bit": "kernels.grouped_gemm.triton_four_bit.TritonFourBit",
    "native_four_bit": "kernels.grouped_gemm.native_four_bit.NativeFourBit",
    "native": "kernels.grouped_gemm.native.NativeGroupedGemm",
    "triton": "kernels.grouped_gemm.triton_grouped.TritonGroupedGemm",
    "deepgemm": "kernels.grouped_gemm.deepgemm.DeepGemm",
    "torch_grouped": "kernels.grouped_gemm.torch_grouped.TorchGroupedGemm",
    "reference": "kernels.grouped_gemm.reference.ReferenceGroupedGemm",
}
ATTENTION = {
    "flashinfer": "kernels.attention.flashinfer.FlashInferAttention",
    "flashinfer_fp8": "kernels.attention.flashinfer_fp8.FlashInferFp8Attention",
    "flashinfer_mla": "kernels.attention.flashinfer_mla.FlashInferMlaAttention",
    "flashinfer_mla_fp8": "kernels.attention.flashinfer_mla_fp8.FlashInferMlaFp8Attention",
    "triton": "kernels.attention.triton_paged.TritonPagedAttention",
    "native": "kernels.attention.native.NativeAttention",
    "sdpa": "kernels.attention.sdpa.SdpaAttention",
    "mla": "kernels.attention.mla.MlaAttention",
}
LINEAR_ATTENTION = {
    "triton": "kernels.linear_attention.triton_delta.TritonLinearAttention",
    "flashinfer": "kernels.linear_attention.flashinfer_delta.FlashInferLinearAttention",
    "native": "kernels.linear_attention.native.NativeLinearAttention",
    "torch": "kernels.linear_attention.torch_chunked.TorchLinearAttention",
}
SEAMS = {
    "all2all": ALL2ALL,
    "grouped_gemm": GROUPED_GEMM,
    "attention": ATTENTION,
    "linear_attention": LINEAR_ATTENTION,
}


def backend_class(seam: str, name: str) -> type[Any]:
    """Import and return the class of one backend."""
    module, _, class_name = SEAMS[seam][name].rpartition(".")
    found: type[Any] = getattr(import_module(module), class_name)
    return found
