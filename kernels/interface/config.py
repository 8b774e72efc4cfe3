"""Which backends to run: the `kernels` section of the YAML. Knows nothing of requests or ranks."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kernels.interface.registry import ALL2ALL, ATTENTION, GROUPED_GEMM, LINEAR_ATTENTION

if TYPE_CHECKING:
    All2AllName = str
    GroupedGemmName = str
    AttentionName = str
    LinearAttentionName = str
else:
    All2AllName = Literal[("auto", *ALL2ALL)]
    GroupedGemmName = Literal[("auto", *GROUPED_GEMM)]
    AttentionName = Literal[("auto", *ATTENTION)]
    LinearAttentionName = Literal[("auto", *LINEAR_ATTENTION)]


class KernelsConfig(BaseModel):
    """Backend names. A name that cannot run here is an error; only `auto` may choose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    all2all: All2AllName = Field("auto", description="Exchange of tokens around the experts.")
    grouped_gemm: GroupedGemmName = Field(
        "auto",
        description="The experts' matrix products. deepgemm_fp8 rounds weights to FP8 while loading them; auto takes "
        "it for checkpoints in FP8. triton_four_bit and native_four_bit keep weights in four bits, which other "
        "backends widen to model.dtype.",
    )
    attention: AttentionName = Field("auto", description="Attention over the paged KV cache.")
    linear_attention: LinearAttentionName = Field(
        "auto",
        description="Linear attention (gated delta nets); only for models with such layers.",
    )
    cascade: Literal["auto", "off"] = Field(
        "auto",
        description="Decodes that begin with the same KV blocks: auto = attention reads these blocks once for all "
        "of them where that pays and kernels.attention can; off = each decode reads its whole sequence.",
    )
    cache: str | None = Field(
        None,
        min_length=1,
        description="Folder of compiled kernels, on every node, such as `phalanx compile` writes; relative to the "
        "YAML's folder; null = ~/.cache/phalanx.",
    )

    @field_validator("cascade", mode="before")
    @classmethod
    def _yaml_bool(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value
