"""Which kernels to run: the `kernels` section of the YAML. Knows nothing of requests or ranks."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

All2AllName = Literal[
    "auto",
    "local",
    "torch_dist",
    "allgather",
    "shm",
    "copy_engine",
    "symm",
    "deepep",
    "deepep_low_latency",
]
GroupedGemmName = Literal[
    "auto", "reference", "torch_grouped", "native", "triton", "deepgemm", "deepgemm_fp8"
]
AttentionName = Literal["auto", "sdpa", "native", "flashinfer"]


class KernelsConfig(BaseModel):
    """Backend names. A name that cannot run here is an error; only `auto` may choose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    all2all: All2AllName = Field("auto", description="Exchange of tokens around the experts.")
    grouped_gemm: GroupedGemmName = Field(
        "auto",
        description="The experts' matrix products. deepgemm_fp8 rounds weights to FP8 while loading them; auto takes "
        "it for checkpoints in FP8.",
    )
    attention: AttentionName = Field("auto", description="Attention over the paged KV cache.")
